"""Tokenizers of both forms that a model comes in, and their chat templates."""

import asyncio
import json
import shutil
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from gguf_writer import write_gguf
from hypothesis import given, strategies as st
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import EOS_ID
from tokenizers import Tokenizer as Encoder, pre_tokenizers

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
from pageferry.core.gguf import GgufType
from pageferry.core.model_files import map_gguf, resolve_model
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.gguf_tokenizer import GgufVocabulary
from pageferry.text.template_files import gguf_templates
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

USER = [{"role": "user", "content": "Hi"}]
SAMPLES = ["in 2024 and  12", "it's\n\n  x", "don’t ÄÖ 北京 12345 !!\r\n", "a\tb  ", "I'LL we'Re 1½"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


def byte_level_metadata(**changes: object) -> Mapping[str, object]:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, "12", "123", "<|begin|>", "<|user|>"]
    fields = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": ["1 2", "12 3"],
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "bos_token_id": len(tokens) - 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_packaged_model_splits_digits_one_by_one(smollm2: Tokenizer) -> None:
    assert [smollm2.piece(id_) for id_ in smollm2.encode("in 2024 and  12")] == [
        "in", " ", "2", "0", "2", "4", " and", "  ", "1", "2",
    ]  # fmt: skip
    assert smollm2.encode("Hi") == [26843]
    assert smollm2.eos_ids == (2, 0)


def test_packaged_model_adds_no_bos_as_its_file_says(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>user\n") == [1, 4093, 198]


def test_equal_beginnings_share_only_equal_ids(smollm2: Tokenizer) -> None:
    hi, space, newline = (smollm2.encode(text) for text in ("Hi", "Hi ", "Hi\n"))
    assert space[: len(hi)] == hi == newline[: len(hi)]
    assert space != newline
    two_tokens = [198, 198]  # as a model may generate them
    assert smollm2.decode(two_tokens) == "\n\n"


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


@given(st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=30), st.booleans())
def test_packaged_model_decodes_as_the_library_does(token_ids: list[int], skip_special: bool) -> None:
    ours, library = packaged()
    assert ours.decode(token_ids, skip_special=skip_special) == library.decode(
        token_ids, skip_special_tokens=skip_special
    )


@cache
def packaged() -> tuple[Tokenizer, Encoder]:
    files = resolve_model("smollm2")
    buffer, file = map_gguf(files.path)
    buffer.close()
    return load_tokenizer(files), GgufVocabulary(file.metadata).build()


def test_packaged_chat_template(smollm2: Tokenizer) -> None:
    assert smollm2.apply_chat_template(USER).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def longest_wait_while_encoding(tokenizer: Tokenizer, text: str) -> float:
    """How long the event loop stood still at most, as a share of the time that another thread took to encode."""
    began = last = time.perf_counter()
    longest_s = 0.0
    encoding = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
    while not encoding.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    assert await encoding
    return longest_s / (last - began)


async def test_a_long_text_does_not_hold_up_other_threads(smollm2: Tokenizer) -> None:
    # Under the interpreter's lock it is above 0.9, else about 0.05; a busy machine may take one try's processor away.
    shares = [await longest_wait_while_encoding(smollm2, "a b c " * 50_000) for _ in range(3)]
    assert min(shares) < 0.5


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123", ["a", " ", "123"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "a123", ["a", "1", "2", "3"]),
    ],
)
def test_pre_decides_how_digits_are_split(pre: str, text: str, pieces: list[str]) -> None:
    encoder = GgufVocabulary(byte_level_metadata(pre=pre)).build()
    assert [encoder.decode([id_]) for id_ in encoder.encode(text).ids] == pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert', supported are gpt2 \(byte-level BPE\) and llama"),
        ({"pre": "foo"}, "tokenizer.ggml.pre is 'foo', supported are default, gpt-2, smollm"),
        ({"tokens": []}, "tokenizer.ggml.tokens is 'list', must be a list of texts"),
        ({"bos_token_id": 1000}, "bos_token_id is 1000, must be from 0 to 259"),
    ],
)
def test_an_unknown_vocabulary_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GgufVocabulary(byte_level_metadata(**changes)).token_of("bos")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["12"]}, "tokenizer.ggml.merges is '12', must be two tokens that are one token together"),
        ({"merges": ["1 \0"]}, "tokenizer.ggml.merges is"),
        ({"merges": ["1 2", "1 3"]}, "tokenizer.ggml.merges is '1 3'"),
        ({"token_type": [1, 3]}, "tokenizer.ggml.token_type is '2 values', must be one number for each of 260 tokens"),
        ({"token_type": 3}, "tokenizer.ggml.token_type is 3"),
        ({"token_type": ["a"] * 260}, "tokenizer.ggml.token_type is '260 values', must be one number for each"),
        ({"model": "llama"}, "tokenizer.ggml.scores is None, must be one number for each of 260 tokens"),
    ],
)
def test_a_broken_vocabulary_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GgufVocabulary(byte_level_metadata(**changes)).build()


def test_pre_that_is_missing_is_the_architectures() -> None:
    metadata = {"general.architecture": "qwen2"} | byte_level_metadata()
    assert (GgufVocabulary(metadata).pre, GgufVocabulary(byte_level_metadata()).pre) == ("qwen2", "default")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Don't STOPnow", ["Don", "'t", " STOPnow"]),
        ("aBC 2024/x", ["a", "BC", " ", "2", "0", "2", "4", "/x"]),
        ("x //\n\n  y", ["x", " //\n\n", " ", " y"]),
        ("日本語テキスト", ["日本語テキスト"]),
    ],
)
def test_tekken_splits_where_its_expression_does(text: str, pieces: list[str]) -> None:
    split = GgufVocabulary(byte_level_metadata(pre="tekken")).build().pre_tokenizer
    assert split is not None
    assert [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)] == pieces


def test_bos_is_added_where_the_file_or_its_kind_says_so() -> None:
    assert not GgufVocabulary(byte_level_metadata(pre="smollm")).adds_bos
    assert GgufVocabulary(byte_level_metadata(pre="llama-bpe")).adds_bos
    assert not GgufVocabulary(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).adds_bos
    vocabulary = GgufVocabulary(byte_level_metadata(add_bos_token=True))
    tokenizer = Tokenizer(vocabulary.build(), template=ChatTemplate(None, {}), eos_ids=(), bos_id=258)
    assert tokenizer.encode("a")[0] == 258
    assert tokenizer.encode("<|begin|>a", add_special=False).count(258) == 1


def test_only_control_tokens_are_special() -> None:
    vocabulary = GgufVocabulary(byte_level_metadata())
    tokenizer = Tokenizer(vocabulary.build(), template=ChatTemplate(None, {}), eos_ids=(), bos_id=None)
    assert tokenizer.decode(tokenizer.encode("<|begin|>a<|user|>")) == "a<|user|>"


@pytest.mark.parametrize("text", SAMPLES)
def test_directory_equals_the_library(tiny_model: Path, text: str) -> None:
    tokenizer = load_tokenizer(resolve_model(str(tiny_model)))
    library = Encoder.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((EOS_ID,), 320)


@pytest.mark.slow
def test_a_directory_equals_transformers(tiny_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_model)
    ours = load_tokenizer(resolve_model(str(tiny_model)))
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text)


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_template_from_a_file_of_its_own_and_from_a_list(copied: Path) -> None:
    config = copied / "tokenizer_config.json"
    templates = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages|length }}"},
    ]
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}, "chat_template": templates}), encoding="utf-8")
    assert load_tokenizer(resolve_model(str(copied))).apply_chat_template(USER) == "<b>1"
    (copied / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(resolve_model(str(copied))).apply_chat_template(USER) == "file"


def test_a_template_of_the_users_own_goes_before_the_models(copied: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("own {{ eos_token }}", encoding="utf-8")
    assert load_tokenizer(resolve_model(str(copied)), own).apply_chat_template(USER) == "own <|im_end|>"
    with pytest.raises(InvalidArgumentError, match=r"none\.jinja can't be read"):
        load_tokenizer(resolve_model(str(copied)), tmp_path / "none.jinja")


def test_chats_with_tools_take_the_template_that_is_named_for_them(copied: Path) -> None:
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools|length }} tools", encoding="utf-8")
    (copied / "chat_template.jinja").write_text("{{ tools is none }}", encoding="utf-8")
    template = load_tokenizer(resolve_model(str(copied))).template
    assert template.render(USER, {"tools": [{"type": "function"}]}) == "1 tools"
    assert template.render(USER) == "True"


def test_templates_of_a_gguf_are_found_by_name() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "tokenizer.chat_template.x": 1}
    assert gguf_templates(metadata) == {"default": "a", "tool_use": "b"}


def config_of(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 319}, "its token '<unused[0-9]+>' is 319, the model has 319 rows"),
        ({"vocab_size": 400, "eos_token_id": 320}, "begins or ends texts with token 320, which it does not have"),
        ({"vocab_size": 400, "bos_token_id": 399}, "begins or ends texts with token 399, which it does not have"),
        ({"eos_token_id": [40, 50]}, "ends texts with token 40, which is text here"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(copied: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"model: the tokenizer is not the model's: .*{message}") as caught:
        load_tokenizer(resolve_model(str(config_of(copied, **changes))))
    assert caught.value.reason == "TOKENIZER_MISMATCH"


def test_an_end_that_the_tokenizer_does_not_have_is_refused(copied: Path) -> None:
    (copied / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"eos_token '<eos>' of tokenizer_config\.json is not in tokenizer"):
        load_tokenizer(resolve_model(str(copied)))


def test_the_tokenizers_own_end_counts_too(copied: Path) -> None:
    config_of(copied, eos_token_id=[0])
    assert load_tokenizer(resolve_model(str(copied))).eos_ids == (0, EOS_ID)


def test_rows_without_a_token_are_no_text(copied: Path) -> None:
    """Embeddings are padded to even sizes: what is drawn there must not show."""
    tokenizer = load_tokenizer(resolve_model(str(config_of(copied, vocab_size=384))))
    assert tokenizer.decode([5, 383, 320, 6]) == tokenizer.decode([5, 6])
    assert tokenizer.piece(383) == ""


def test_a_gguf_with_more_tokens_than_rows_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    tokens = ["1", "2", "3", "12", "123", *(f"<{index}>" for index in range(5, 321))]
    path = tmp_path / "more.gguf"
    metadata = METADATA | byte_level_metadata(tokens=tokens, token_type=[1] * 321)
    path.write_bytes(write_gguf(metadata, gguf_tensors(tiny_model, GgufType.F32)))
    with pytest.raises(InvalidArgumentError, match=r"more\.gguf: the tokenizer is not the model's: its token '<320>'"):
        load_tokenizer(resolve_model(str(path)))


@pytest.mark.parametrize("entry", [{"name": [], "template": "x"}, {"name": {}}, {"template": "x"}, "x", None])
def test_entries_of_a_list_of_templates_that_are_none_are_left_out(copied: Path, entry: object) -> None:
    config = copied / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [entry, {"name": "default", "template": "yes"}]}), encoding="utf-8")
    assert load_tokenizer(resolve_model(str(copied))).apply_chat_template(USER) == "yes"


def test_a_template_file_that_is_no_text_is_refused(copied: Path) -> None:
    (copied / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(InvalidArgumentError, match=r"chat_template\.jinja can't be read"):
        load_tokenizer(resolve_model(str(copied)))


def test_a_directory_without_a_tokenizer_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(resolve_model(str(copied)))
    (copied / "tokenizer.json").unlink()
    with pytest.raises(InvalidArgumentError, match=r"has no tokenizer\.json"):
        load_tokenizer(resolve_model(str(copied)))


def test_a_tokenizer_that_the_library_panics_at_is_refused(copied: Path) -> None:
    path = copied / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["continuing_subword_prefix"] = "#" * 20  # longer than any token
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(resolve_model(str(copied)))


@pytest.mark.field("vllm-project/vllm#18140", "vllm-project/vllm#39279")
def test_without_a_template_each_chat_says_how_to_set_one() -> None:
    with pytest.raises(FailedPreconditionError, match=r"no chat template; put a chat template into tokenizer_config"):
        ChatTemplate(None, {}).render(USER)


@pytest.mark.field("vllm-project/vllm#18140", "vllm-project/vllm#39279")
def test_a_broken_template_fails_chats_only() -> None:
    template = ChatTemplate("\n{% for %}", {})
    assert "error in line 2" in template.problem
    with pytest.raises(FailedPreconditionError, match="error in line 2"):
        template.render(USER)


def test_a_template_may_refuse_a_chat() -> None:
    with pytest.raises(InvalidArgumentError, match="no system role"):
        ChatTemplate("{{ raise_exception('no system role') }}", {}).render(USER)


def test_a_template_that_fails_does_not_show_the_chat() -> None:
    with pytest.raises(FailedPreconditionError, match="TypeError") as caught:
        ChatTemplate("{{ messages[0]['content'] + 1 }}", {}).render([{"role": "user", "content": "secret"}])
    assert "secret" not in caught.value.message


def test_marks_of_what_the_model_says_are_left_out() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!"
    assert ChatTemplate(source, {}).render(USER) == "Hi!"


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(InvalidArgumentError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(USER)
    assert ChatTemplate("{{ strftime_now('%Y')|length }}{{ 'ä'|tojson }}", {}).render(USER) == '4"ä"'
