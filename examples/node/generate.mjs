// Streams one answer of a Pageferry router: `node generate.mjs --help`. Ctrl-C ends the answer, and the work for it.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const USAGE = `usage: node generate.mjs [options] PROMPT
  --address A         host:port; a:1,b:2 with IP addresses, or dns:///name:port, for several (127.0.0.1:50051)
  --max-tokens N      most tokens of the answer (64)
  --temperature T     0 is greedy; the model's own
  --deadline S        seconds until the whole answer must be there (none)
  --api-key KEY       where the router has tenants
  --ca --cert --key   PEM files, for TLS; --server-name NAME where the certificate has another name than the address`;

const protos = fileURLToPath(new URL("../../proto", import.meta.url));
const here = fileURLToPath(new URL(".", import.meta.url));
const definition = loader.loadSync(["pageferry/v1/inference.proto", "errors.proto"], {
  includeDirs: [protos, here], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pageferry.v1;

// Calls go to all addresses in turn. One that ends as UNAVAILABLE before its first message, as on a router that drains,
// is made again on another.
const serviceConfig = JSON.stringify({
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [{
    name: [{ service: "pageferry.v1.InferenceService" }],
    retryPolicy: {
      maxAttempts: 5, initialBackoff: "0.1s", maxBackoff: "1s", backoffMultiplier: 2,
      retryableStatusCodes: ["UNAVAILABLE"],
    },
  }],
});

export function connect(address, { credentials = grpc.credentials.createInsecure(), serverName } = {}) {
  const several = address.includes(",") ? `${address.includes("[") ? "ipv6" : "ipv4"}:${address}` : address;
  return new InferenceService(several, credentials, {
    "grpc.service_config": serviceConfig,
    "grpc.service_config_disable_resolution": 1,
    ...(serverName && { "grpc.ssl_target_name_override": serverName, "grpc.default_authority": serverName }),
  });
}

/** Yields Started, Delta…, Finished as objects. `signal` ends the generation on the servers, too. */
export async function* generate(client, request, { deadlineS, apiKey, signal } = {}) {
  const metadata = new grpc.Metadata();
  if (apiKey) metadata.set("authorization", `Bearer ${apiKey}`);
  const options = deadlineS ? { deadline: new Date(Date.now() + deadlineS * 1000) } : {};
  const call = client.Generate(request, metadata, options);
  const cancel = () => call.cancel();
  signal?.addEventListener("abort", cancel);
  try {
    for await (const message of call) yield message[message.event];
  } finally {
    signal?.removeEventListener("abort", cancel);
    call.cancel(); // of a loop that was left; one that is over stays as it is
  }
}

/** What the error says beside its code and message: [{type, ...fields}]. */
export function detailsOf(error) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed) return [];
  return definition["google.rpc.Status"].deserialize(packed).details.map(({ type_url, value }) => {
    const type = type_url.split("/").pop();
    return { type, ...definition[type]?.deserialize(value) };
  });
}

function credentialsOf({ ca, cert, key }) {
  if (!ca && !cert) return grpc.credentials.createInsecure();
  return grpc.credentials.createSsl(...[ca, key, cert].map((path) => path && readFileSync(path)));
}

function readArguments() {
  const text = { type: "string" };
  return parseArgs({
    allowPositionals: true,
    options: {
      address: { ...text, default: "127.0.0.1:50051" }, "max-tokens": { ...text, default: "64" }, temperature: text,
      deadline: text, "api-key": text, ca: text, cert: text, key: text, "server-name": text,
      help: { type: "boolean" },
    },
  });
}

async function main() {
  let given, positionals;
  try {
    ({ values: given, positionals } = readArguments());
  } catch (error) {
    console.error(`${error.message}\n${USAGE}`);
    return 2;
  }
  if (given.help || positionals.length !== 1) {
    console.log(USAGE);
    return given.help ? 0 : 2;
  }
  const client = connect(given.address, {
    credentials: credentialsOf(given), serverName: given["server-name"],
  });
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const request = {
    chat: { messages: [{ role: "user", content: positionals[0] }] },
    sampling: given.temperature && { temperature: Number(given.temperature) },
    stop: { max_tokens: Number(given["max-tokens"]) },
  };
  const options = { deadlineS: Number(given.deadline), apiKey: given["api-key"], signal: interrupt.signal };
  try {
    for await (const event of generate(client, request, options)) {
      if (event.text) process.stdout.write(event.text);
      if (event.usage) {
        const { reason, usage, timings } = event;
        console.error(`\n${reason}: ${usage.completion_tokens} tokens, the first after ${timings.ttft_ms.toFixed(1)} ms`);
      }
    }
    return 0;
  } catch (error) {
    if (interrupt.signal.aborted) {
      console.error("\ncancelled");
      return 130;
    }
    console.error(`${grpc.status[error.code] ?? "error"}: ${error.details ?? error.message}`);
    for (const detail of detailsOf(error)) console.error(`  ${JSON.stringify(detail)}`);
    return 1;
  } finally {
    client.close();
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = await main();
