"""What is refused before any work is done, with the field, the value and the limit."""

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import asking
import pytest
from fake_workers import Rig, Script

from pageferry.core.config import Config, EngineConfig, RouterConfig
from pageferry.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PageferryError,
    ResourceExhaustedError,
)
from pageferry.core.model_files import resolve_model, sampling_defaults
from pageferry.core.tenants import Tenant
from pageferry.router.admission import Admission
from pageferry.router.room import Limits
from pageferry.text.tokenizer import Tokenizer, load_tokenizer
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types
from pageferry.v1.types_pb2 import BeamSearch, Choices, Grammar, SamplingParams, StopConditions, TokenSequence

EOS = 2
CONTEXT_ONLY = Limits(2048, None, None)
ONE_SYSTEM = [("system", " Be brief.\r\n"), ("user", " Hi ")]
ask = partial(asking.ask, num_prompt=8, max_tokens=None)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tiny_model)))


LIMIT_ITSELF = (
    "vllm-project/vllm#16445",
    "EleutherAI/lm-evaluation-harness#2880",
    "vllm-project/vllm#33418",
    "vllm-project/vllm#36789",
)
Make = Callable[..., Admission]


@pytest.fixture
def admission(tokenizer: Tokenizer) -> Make:
    def make(limits: Limits = CONTEXT_ONLY, defaults: dict[str, float] | None = None, **config: object) -> Admission:
        return Admission(
            "tiny",
            tokenizer,
            vocab_size=320,
            config=RouterConfig(**config),
            limits=lambda: limits,
            defaults=defaults or {},
        )

    return make


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages])
    )


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (pb.GenerateRequest(), InvalidArgumentError, "input is None, must be prompt, chat or token_ids"),
        (pb.GenerateRequest(prompt=""), InvalidArgumentError, "prompt is '', must not be empty"),
        (ask(num_prompt=0), InvalidArgumentError, "token_ids is '', must hold at least one token"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 320])),
            InvalidArgumentError,
            "token_ids is 320, .* 0 to 319",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), InvalidArgumentError, "4294967295, .* 0 to 319"),
        (chat(), InvalidArgumentError, "chat.messages"),
        (chat(("", "x")), InvalidArgumentError, r"chat.messages\[0\].role is ''"),
        (ask(model="gpt"), NotFoundError, "model 'gpt' is not served, but 'tiny' is"),
        (ask(request_id="x" * 129), InvalidArgumentError, "request_id is '129 characters', must have at most 128"),
        (ask(max_tokens=0), InvalidArgumentError, "max_tokens is 0, must be at least 1"),
        (ask(stop_strings=["a", ""]), InvalidArgumentError, r"stop_strings\[1\] is '', must not be empty"),
        (
            ask(stop_strings=["a", "x" * 4097]),
            InvalidArgumentError,
            r"stop_strings\[1\] is '4097 characters', must have at most 4096",
        ),
        (ask(model="g" * 9999), NotFoundError, "model 'g{128}' is not served"),
        (ask(stop_strings=["x"] * 17), InvalidArgumentError, "stop_strings is '17 strings', must be at most 16"),
        (ask(stop=types.StopConditions(stop_token_ids=[320])), InvalidArgumentError, "stop_token_ids is 320"),
        (ask(stop=types.StopConditions(max_tokens=3, min_tokens=4)), InvalidArgumentError, "min_tokens is 4, .* 3"),
        (ask(stop=types.StopConditions(min_tokens=2041)), InvalidArgumentError, "min_tokens is 2041, .* 2040"),
        (ask(sampling=types.SamplingParams(temperature=float("nan"))), InvalidArgumentError, "temperature is nan"),
        (ask(sampling=types.SamplingParams(temperature=-1)), InvalidArgumentError, "temperature is -1"),
        (ask(sampling=types.SamplingParams(top_p=0)), InvalidArgumentError, "top_p is 0"),
        (ask(sampling=types.SamplingParams(min_p=1)), InvalidArgumentError, "min_p is 1"),
        (ask(sampling=types.SamplingParams(repetition_penalty=float("inf"))), InvalidArgumentError, "repetition_pen"),
        (ask(sampling=types.SamplingParams(frequency_penalty=3)), InvalidArgumentError, "frequency_penalty is 3"),
        (ask(sampling=types.SamplingParams(logprobs=21)), InvalidArgumentError, "logprobs is 21, .* 0 to 20"),
        (pb.GenerateRequest(chat=chat(("user", "x")).chat, echo=True), InvalidArgumentError, "echo is True, must not"),
        (ask(n=17), InvalidArgumentError, "n is 17, must be at most 16"),
        (ask(best_of=17), InvalidArgumentError, "best_of is 17, must be at most 16"),
        (ask(n=3, best_of=2), InvalidArgumentError, "n is 3, must be at most best_of, 2"),
    ],
)
async def test_bad_fields(
    admission: Make, request_: pb.GenerateRequest, error: type[PageferryError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await admission().admit(request_)


async def test_absent_fields_take_the_models_defaults_then_the_contracts(admission: Make) -> None:
    plain = await admission().admit(ask())
    assert (plain.sampling.temperature, plain.sampling.top_k, plain.sampling.num_logprobs) == (1.0, 0, None)
    assert plain.skip_special
    tuned = admission(defaults={"temperature": 0.6, "top_k": 20})
    assert (await tuned.admit(ask())).sampling.temperature == 0.6
    given = await tuned.admit(ask(sampling=types.SamplingParams(temperature=0, logprobs=0), skip_special_tokens=False))
    assert (given.sampling.temperature, given.sampling.top_k, given.sampling.num_logprobs) == (0, 20, 0)
    assert not given.skip_special


async def test_a_seed_and_an_id_are_drawn_where_none_is_set(admission: Make) -> None:
    drawn = [await admission().admit(ask()) for _ in range(2)]
    assert drawn[0].sampling.seed != drawn[1].sampling.seed
    assert drawn[0].request_id != drawn[1].request_id
    given = await admission().admit(ask(request_id="mine", sampling=types.SamplingParams(seed=7)))
    assert (given.sampling.seed, given.request_id) == (7, "mine")


async def test_the_models_end_tokens_end_it_unless_ignored(admission: Make) -> None:
    stop = types.StopConditions(stop_token_ids=[7])
    assert (await admission().admit(ask(stop=stop))).stop.stop_token_ids == {7, EOS}
    stop.ignore_eos = True
    assert (await admission().admit(ask(stop=stop))).stop.stop_token_ids == {7}


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "counts"),
    [
        (2048, None, "the prompt has 2048 tokens; the model takes 2048"),
        (2048, 1, "2048 tokens and max_tokens is 1, together 2049; the model takes 2048"),
        (8, 2045, "8 tokens and max_tokens is 2045, together 2053; the model takes 2048"),
        (5000, None, "the prompt has 5000 tokens; the model takes 2048"),
    ],
)
@pytest.mark.field(*LIMIT_ITSELF)
async def test_what_exceeds_the_context_is_refused_with_the_counts(
    admission: Make, num_prompt: int, max_tokens: int | None, counts: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=counts):
        await admission().admit(ask(num_prompt=num_prompt, max_tokens=max_tokens))


@pytest.mark.field(*LIMIT_ITSELF)
async def test_what_just_fits_the_context_is_taken(admission: Make) -> None:
    assert (await admission().admit(ask(num_prompt=2047, max_tokens=1))).stop.max_tokens == 1
    assert (await admission().admit(ask(num_prompt=2047))).stop.max_tokens == 1
    assert (await admission().admit(ask(num_prompt=8))).stop.max_tokens == 2040


POOLS = Limits(4096, prefill_pool_tokens=800, decode_pool_tokens=640)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (801, 1, "801 tokens and max_tokens is 1, together 802; the largest prefill worker's pages hold 800"),
        (1002, None, "1002 tokens; the largest prefill worker's pages hold 800"),
        (641, None, "641 tokens; the largest decode worker's pages hold 640"),
        (600, 42, "600 tokens and max_tokens is 42, together 642; the largest decode worker's pages hold 640"),
    ],
)
@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
async def test_what_no_pool_can_hold_is_refused_at_once(
    admission: Make, num_prompt: int, max_tokens: int | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        await admission(POOLS).admit(ask(num_prompt=num_prompt, max_tokens=max_tokens))


@pytest.mark.parametrize(("num_prompt", "max_tokens", "expected"), [(800, 1, 1), (600, 41, 41), (600, None, 41)])
async def test_what_just_fits_the_pools_is_taken(
    admission: Make, num_prompt: int, max_tokens: int | None, expected: int
) -> None:
    assert (await admission(POOLS).admit(ask(num_prompt=num_prompt, max_tokens=max_tokens))).stop.max_tokens == expected


class Untouchable:
    """A tokenizer that must not be used."""

    eos_ids = ()


async def test_oversize_text_is_refused_before_tokenising() -> None:
    limits = Limits(2048, None, None)
    strict = Admission("tiny", Untouchable(), vocab_size=320, config=RouterConfig(), limits=lambda: limits, defaults={})
    text = "ä" * (5 * 2**19)
    for request in (pb.GenerateRequest(prompt=text), chat(("user", text))):
        with pytest.raises(ResourceExhaustedError, match="is 5242880 bytes, the limit is 1048576"):
            await strict.admit(request)
    with pytest.raises(ResourceExhaustedError, match="text is 5242880 bytes"):
        await strict.tokenize(pb.TokenizeRequest(text=text))


async def test_long_text_is_tokenised_off_the_event_loop(admission: Make, tokenizer: Tokenizer) -> None:
    text = "some words " * 1000
    ticks = 0

    async def count() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    admitted = await admission(Limits(10**6, None, None)).admit(pb.GenerateRequest(prompt=text))
    counting.cancel()
    assert admitted.prompt_ids == tuple(tokenizer.encode(text))
    assert ticks > 1


async def test_chats_are_rendered_and_system_prompts_evened_out(admission: Make, tokenizer: Tokenizer) -> None:
    admitted = await admission().admit(chat(*ONE_SYSTEM))
    rendered = tokenizer.decode(admitted.prompt_ids, skip_special=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    )
    tokenized = await admission().tokenize(
        pb.TokenizeRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=t) for r, t in ONE_SYSTEM]))
    )
    assert tuple(tokenized) == admitted.prompt_ids
    as_sent = await admission(normalise_system=False).admit(chat(*ONE_SYSTEM))
    assert " Be brief.\r\n<|im_end|>" in tokenizer.decode(as_sent.prompt_ids, skip_special=False)


@pytest.mark.field("vllm-project/vllm#18140", "vllm-project/vllm#39279")
async def test_a_model_without_a_chat_template_takes_prompts_only(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    plain = load_tokenizer(resolve_model(str(model)))
    admission = Admission(
        "tiny", plain, vocab_size=320, config=RouterConfig(), limits=lambda: CONTEXT_ONLY, defaults={}
    )
    with pytest.raises(FailedPreconditionError, match="put a chat template into"):
        await admission.admit(chat(("user", "Hi")))
    assert (await admission.admit(pb.GenerateRequest(prompt="Hi"))).prompt_ids == tuple(plain.encode("Hi"))


@pytest.mark.field("vllm-project/vllm#45591")
async def test_overriding_one_default_of_the_model_leaves_its_others_and_its_end_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    defaults = {"eos_token_id": [7, 106], "temperature": 0.25, "top_k": 5}
    (model / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    files = resolve_model(str(model))
    admission = Admission(
        "tiny",
        load_tokenizer(files),
        vocab_size=320,
        config=RouterConfig(),
        limits=lambda: CONTEXT_ONLY,
        defaults=sampling_defaults(files),
    )
    admitted = await admission.admit(ask(sampling=types.SamplingParams(top_k=3)))
    assert (admitted.sampling.top_k, admitted.sampling.temperature) == (3, 0.25)
    assert admitted.stop.stop_token_ids == {7, 106, EOS}


async def test_limits_come_from_the_workers(tiny_model: Path) -> None:
    config = Config(engine=EngineConfig(max_model_tokens=3000))
    async with Rig(str(tiny_model), Script(range(100, 140)), config=config) as router:
        with pytest.raises(InvalidArgumentError, match="the model takes 3000"):
            await router.generate(ask(num_prompt=3000))
        router.decode.publish(pages_total=50)
        await router.until(lambda: router.fleet.workers[1].view.load.pages_total == 50)
        with pytest.raises(InvalidArgumentError, match="decode worker's pages hold 800"):
            await router.generate(ask(num_prompt=802, max_tokens=2))
        answer = await router.generate(ask(num_prompt=5, max_tokens=2))  # nobody behind an impossible one waits
        assert len(answer.token_ids) == 2
        model = router.frontend.list_models().models[0]
        assert (model.name, model.max_model_tokens, model.vocab_size, model.ready) == ("tiny", 3000, 320, True)
        assert router.value("pageferry_requests_total", outcome="invalid_argument") == 2


@pytest.mark.parametrize(
    ("fields", "n", "num_choices", "logprobs"),
    [({}, 1, 1, None), ({"n": 3}, 3, 3, None), ({"n": 2, "best_of": 2}, 2, 2, None), ({"best_of": 4}, 1, 4, 0)],
)
async def test_log_probabilities_are_computed_where_answers_are_compared(
    admission: Make, fields: dict[str, int], n: int, num_choices: int, logprobs: int | None
) -> None:
    admitted = await admission().admit(ask(**fields))
    assert (admitted.n, admitted.num_choices, admitted.sampling.num_logprobs) == (n, num_choices, logprobs)
    assert admitted.is_ranked == (logprobs == 0)
    assert not admitted.wants_logprobs


async def test_answers_share_the_full_pages_of_the_prompt_and_a_tenants_pages_hold_all(admission: Make) -> None:
    tenant = Tenant("small", max_pages=12)
    # Two pages shared leave two and a half for each answer.
    admitted = await admission().admit(ask(num_prompt=40, n=4), tenant)
    assert admitted.stop.max_tokens == 4 * 16 + 1 - 40
    assert admitted.num_pages == 2 + 4 * 2 <= 12
    assert (await admission().admit(ask(num_prompt=40, max_tokens=25, n=4), tenant)).num_pages == 10
    with pytest.raises(InvalidArgumentError, match=r"max_pages, 12, hold 64 .* in each of 4 answers") as caught:
        await admission().admit(ask(num_prompt=40, max_tokens=26, n=4), tenant)
    assert caught.value.reason == "EXCEEDS_TENANT_PAGES"
    assert (await admission().admit(ask(num_prompt=40, max_tokens=26, n=1), tenant)).num_pages == 5


def sampled(**fields: object) -> pb.GenerateRequest:
    return ask(sampling=SamplingParams(**fields), max_tokens=5)


SCHEMA = Grammar(json_schema='{"type": "array", "uniqueItems": true}')


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (sampled(logit_bias={320: 1.0}), "logit_bias is 320, must be a token id from 0 to 319"),
        (sampled(logit_bias={3: 101.0}), r"logit_bias\[3\] is 101.0, must be from -100 to 100"),
        (sampled(banned=[TokenSequence(ids=[3, 320])]), r"banned\[0\] is 320, must be a token id from 0 to 319"),
        (sampled(banned=[TokenSequence()]), "banned is .*, must hold at least one token id each"),
        (
            sampled(banned=[TokenSequence(ids=[3] * 1024)] * 17),
            "banned is '17408 token ids', must be at most 16384 in all sequences",
        ),
        (ask(bad_words=["x"] * 65), "bad_words is '65 words', must be at most 64"),
        (ask(stop=StopConditions(max_repeats=1)), r"max_repeats is 1, must be 0 \(off\) or from 2 to 1000"),
        (sampled(grammar=SCHEMA), "^grammar.json_schema can't be compiled: .*uniqueItems"),
        (sampled(grammar=Grammar()), "grammar is None, must have one kind set"),
        (sampled(grammar=Grammar(choices=Choices())), "grammar.choices .*must be at least one text"),
        (
            ask(sampling=SamplingParams(grammar=Grammar(regex="a")), stop=StopConditions(ignore_eos=True)),
            "stop.ignore_eos is True, can't be combined with a grammar",
        ),
        (
            ask(sampling=SamplingParams(grammar=Grammar(regex="a")), beam=BeamSearch(width=2)),
            "beam is 'width 2', can't be combined with a grammar",
        ),
    ],
)
def test_sampling_that_cannot_be_done_is_refused_before_any_work(
    admission: Make, request_: pb.GenerateRequest, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        asyncio.run(admission().admit(request_))


def test_bad_words_become_banned_sequences_and_max_repeats_goes_on(admission: Make, tokenizer: Tokenizer) -> None:
    request = sampled(banned=[TokenSequence(ids=[7, 8])])
    request.bad_words.append("the")
    request.stop.max_repeats = 4
    admitted = asyncio.run(admission().admit(request))
    assert admitted.sampling.banned == ((7, 8), tuple(tokenizer.encode("the")), tuple(tokenizer.encode(" the")))
    assert admitted.stop.max_repeats == 4


def test_a_grammar_goes_on_as_it_is(admission: Make) -> None:
    admitted = asyncio.run(admission().admit(sampled(grammar=Grammar(choices=Choices(texts=["a", "b"])))))
    assert admitted.sampling.grammar is not None
    assert admitted.sampling.grammar.text == '["a", "b"]'


def test_no_more_log_probabilities_of_a_prompt_than_a_message_holds(admission: Make) -> None:
    limits = Limits(100_000, None, None)
    request = ask(num_prompt=8000, max_tokens=1, sampling=SamplingParams(prompt_logprobs=18))
    message = "prompt_logprobs is 18, must be so few that 8000 tokens have at most 150000"
    with pytest.raises(InvalidArgumentError, match=message):
        asyncio.run(admission(limits).admit(request))
    request.sampling.prompt_logprobs = 17
    assert asyncio.run(admission(limits).admit(request)).sampling.num_prompt_logprobs == 17
