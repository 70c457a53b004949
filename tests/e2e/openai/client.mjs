// What the official Node client gets from a running Pageferry: `node client.mjs http://127.0.0.1:8080/v1`, where the
// package `openai` is installed in node_modules of this directory, or of one above it.
//
// Prints what comes and ends with an error where it is not what it should be; docs/openai-transcript.md is its output.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const question = [{ role: "user", content: "What is the capital of France?" }];
const story = [{ role: "user", content: "Write a long story about a ferry." }];
const city = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, country: { type: "string", maxLength: 20 } },
  required: ["city", "country"],
  additionalProperties: false,
};

async function stream(model) {
  const answer = await client.chat.completions.create({
    model, messages: question, temperature: 0, max_completion_tokens: 24,
    stream: true, stream_options: { include_usage: true },
  });
  const pieces = [], reasons = [];
  let usage;
  for await (const chunk of answer) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      if (choice.delta.content) pieces.push(choice.delta.content);
      if (choice.finish_reason) reasons.push(choice.finish_reason);
    }
  }
  console.log(`  ${pieces.join("|")}`);
  console.log(`  finish_reason: ${reasons}, completion_tokens: ${usage.completion_tokens}`);
  assert(reasons.length === 1 && usage.completion_tokens >= pieces.length && pieces.length > 1);
}

async function cancel(model) {
  const answer = await client.chat.completions.create({
    model, messages: story, max_completion_tokens: 2000, seed: 1, stream: true, ignore_eos: true,
  });
  let numChunks = 0;
  for await (const _ of answer) {
    if (++numChunks === 10) answer.controller.abort();
  }
  console.log(`  aborted after ${numChunks} chunks of at most 2000`);
  assert(numChunks < 100);
}

async function logprobs(model) {
  const answer = await client.chat.completions.create({
    model, messages: question, temperature: 0, max_completion_tokens: 3, logprobs: true, top_logprobs: 2,
  });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.length, 3);
  for (const token of content) {
    const likeliest = token.top_logprobs.map((top) => `'${top.token}' ${top.logprob.toFixed(3)}`).join(", ");
    console.log(`  '${token.token}' ${token.logprob.toFixed(3)}, bytes [${token.bytes}]; likeliest: ${likeliest}`);
    assert(token.logprob <= 0 && token.top_logprobs.length === 2);
  }
}

async function jsonSchema(model) {
  const answer = await client.chat.completions.create({
    model, messages: question, temperature: 0, max_completion_tokens: 64,
    response_format: { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } },
  });
  const text = answer.choices[0].message.content;
  console.log(`  ${JSON.stringify(JSON.parse(text))}`);
  assert.deepEqual(Object.keys(JSON.parse(text)).sort(), ["city", "country"]);
}

async function responses(model) {
  const kinds = new Set();
  const answer = await client.responses.create({
    model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24, stream: true,
  });
  let text = "";
  for await (const event of answer) {
    kinds.add(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  console.log(`  ${[...kinds].join(", ")}`);
  console.log(`  ${text}`);
  assert(kinds.has("response.completed") && text);
}

async function errors(model) {
  await assert.rejects(client.chat.completions.create({ model, messages: question, temperature: -1 }), (error) => {
    console.log(`  ${error.status} ${error.code}, param ${error.param}: ${error.error.message}`);
    return error instanceof OpenAI.BadRequestError && Boolean(error.requestID);
  });
}

const model = (await client.models.list()).data[0].id;
console.log(`model: ${model}`);
for (const step of [stream, cancel, logprobs, jsonSchema, responses, errors]) {
  console.log(`\n${step.name}:`);
  await step(model);
}
