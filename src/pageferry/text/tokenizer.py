"""Text to token ids and back, and the model's chat template, for both forms that a model comes in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as Encoder

from pageferry.core.errors import InternalError, InvalidArgumentError, PageferryError
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, map_gguf, naming, read_json
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.gguf_tokenizer import GgufVocabulary
from pageferry.text.pieces import PieceRule, Pieces, decoder_of
from pageferry.text.template_files import DEFAULT, TOOL_USE, directory_templates, gguf_templates, read_template

_SPECIAL_NAMES = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"unk": "unknown", "pad": "padding"}
_MAX_SHOWN = 32  # characters of a token in a message


class Tokenizer:
    """Any thread may encode; all else belongs to one."""

    def __init__(self, encoder: Encoder, *, template: ChatTemplate, eos_ids: Iterable[int], bos_id: int | None) -> None:
        """`bos_id` is put before every text that does not come from the chat template, unless the encoder does so."""
        self._encoder = encoder
        self._bos_id = bos_id
        self.template = template
        self.eos_ids = tuple(eos_ids)
        special_ids = {id_ for id_, token in encoder.get_added_tokens_decoder().items() if token.special}
        state = encoder.decoder.__getstate__() if encoder.decoder is not None else None
        rule = PieceRule.from_decoder(None if state is None else decoder_of(state))
        self.pieces = Pieces(encoder.id_to_token, rule, special_ids)

    @property
    def vocab_size(self) -> int:
        return self._encoder.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of the text; special tokens written in it are taken as such.

        Without `add_special`, which is for rendered chats, nothing is put around them.
        """
        try:
            # Only a batch is encoded without the interpreter's lock, so that other threads run meanwhile.
            (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=add_special)
        except BaseException as error:
            if isinstance(error, Exception) or _is_panic(error):
                raise InternalError("the model's tokenizer fails on this text", reason="TOKENIZER_FAILED") from None
            raise
        ids: list[int] = encoding.ids
        if add_special and self._bos_id is not None:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        return self.pieces.decode(token_ids, skip_special=skip_special)

    def piece(self, token_id: int) -> str:
        """A token's own text; special ones are shown."""
        return self.pieces.bytes_of(token_id).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        return self.template.render(messages, {"add_generation_prompt": add_generation_prompt})


def load_tokenizer(files: ModelFiles, template_file: Path | None = None) -> Tokenizer:
    """With a chat template of the user's own in place of the model's, where a file of it is named.

    Raises InvalidArgumentError, naming the file, where one can't be read, is of an unsupported kind, or does not match
    the model.
    """
    with naming(files.path):
        config = load_config_of(files)
        encoder, bos_id, templates, special_tokens = (
            _from_gguf(files) if files.kind == "gguf" else _from_directory(files)
        )
        eos_ids = check_match(encoder, config, special_tokens)
    if template_file is not None:
        templates = {DEFAULT: read_template(template_file)}
    template = ChatTemplate(templates.get(DEFAULT), special_tokens, templates.get(TOOL_USE))
    return Tokenizer(encoder, template=template, eos_ids=eos_ids, bos_id=bos_id)


def _from_gguf(files: ModelFiles) -> "_Parts":
    buffer, file = map_gguf(files.path)
    buffer.close()
    vocabulary = GgufVocabulary(file.metadata)
    special_tokens = {
        f"{name}_token": token for name in _SPECIAL_NAMES if (token := vocabulary.token_of(_GGUF_NAMES.get(name, name)))
    }
    with _reading(files.path):
        encoder = vocabulary.build()
    bos_id = vocabulary.get("bos_token_id") if vocabulary.adds_bos else None
    return _Parts(encoder, bos_id, gguf_templates(file.metadata), special_tokens)


def _from_directory(files: ModelFiles) -> "_Parts":
    path = files.path / "tokenizer.json"
    if not path.is_file():
        how = "other forms are not read; AutoTokenizer.save_pretrained of transformers writes it"
        raise InvalidArgumentError(f"model directory {files.path} has no tokenizer.json: {how}", reason="MODEL_INVALID")
    with _reading(path):
        encoder = Encoder.from_file(str(path))
    # Limits of the file's own would cut prompts without a word.
    encoder.no_truncation()
    encoder.no_padding()
    config_path = files.path / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    names = [f"{name}_token" for name in _SPECIAL_NAMES]
    special_tokens = {name: token for name in names if (token := _token_text(config.get(name))) is not None}
    return _Parts(encoder, None, directory_templates(files.path, config), special_tokens)


class _Parts(NamedTuple):
    encoder: Encoder
    bos_id: int | None  # put before texts that are no chats
    templates: Mapping[str, str]  # by name
    special_tokens: Mapping[str, str]  # what templates know


def check_match(encoder: Encoder, config: ModelConfig, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """The ids that end a text: the model's, and the tokenizer's own one.

    Raises InvalidArgumentError where the tokenizer has a token that the model has no row for, lacks one that the model
    begins or ends texts with, or has an ordinary piece of text where the model ends its texts.
    """
    token, most = max(encoder.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1], default=("", -1))
    if most >= config.vocab_size:
        raise _mismatch(f"its token {token[:_MAX_SHOWN]!r} is {most}, the model has {config.vocab_size} rows")
    ids = [*config.eos_ids, *([] if config.bos_id is None else [config.bos_id])]
    if missing := [token_id for token_id in ids if encoder.id_to_token(token_id) is None]:
        raise _mismatch(f"the model begins or ends texts with token {missing[0]}, which it does not have")
    added = encoder.get_added_tokens_decoder()
    if added and config.eos_ids and not set(config.eos_ids) & set(added):
        end = config.eos_ids[0]
        piece = str(encoder.id_to_token(end))[:_MAX_SHOWN]
        raise _mismatch(f"the model ends texts with token {end}, which is text here, {piece!r}")
    own = special_tokens.get("eos_token")
    own_id = None if own is None else encoder.token_to_id(own)
    if own is not None and own_id is None:
        raise _mismatch(f"eos_token {own[:_MAX_SHOWN]!r} of tokenizer_config.json is not in tokenizer.json")
    return tuple(dict.fromkeys([*config.eos_ids, *([] if own_id is None else [own_id])]))


def _mismatch(text: str) -> InvalidArgumentError:
    message = f"the tokenizer is not the model's: {text}"
    return InvalidArgumentError(message, reason="TOKENIZER_MISMATCH")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let what the library can't make a tokenizer of be an InvalidArgumentError that names the file."""
    try:
        yield
    except PageferryError:
        raise
    except BaseException as error:  # the library raises nothing more special, and panics are not even Exceptions
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise InvalidArgumentError(f"{path} can't be read: {error}", reason="MODEL_INVALID") from None


def _is_panic(error: BaseException) -> bool:
    """Whether the library's code in Rust has failed; the class can't be imported."""
    return type(error).__name__ == "PanicException"


def _token_text(value: object) -> str | None:
    """A special token of tokenizer_config.json, which is a text or an object with one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
