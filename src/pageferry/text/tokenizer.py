"""Text to token ids and back, and the model's chat template, for both forms that a model comes in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder

from pageferry.core.errors import InternalError, InvalidArgumentError, PageferryError
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, map_gguf, naming, read_json
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.gguf_tokenizer import GgufVocabulary
from pageferry.text.pieces import PieceRule, Pieces, decoder_of

_DEFAULT_TEMPLATE = "default"  # of several named ones


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


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises InvalidArgumentError, naming the file, where it can't be read or is of an unsupported kind."""
    with naming(files.path):
        return _from_gguf(files) if files.kind == "gguf" else _from_directory(files)


def _from_gguf(files: ModelFiles) -> Tokenizer:
    buffer, file = map_gguf(files.path)
    buffer.close()
    vocabulary = GgufVocabulary(file.metadata)
    template = file.metadata.get("tokenizer.chat_template")
    special_tokens = {f"{name}_token": token for name in ("bos", "eos") if (token := vocabulary.token_of(name))}
    with _reading(files.path):
        encoder = vocabulary.build()
    return Tokenizer(
        encoder,
        template=ChatTemplate(template if isinstance(template, str) else None, special_tokens),
        eos_ids=ModelConfig.from_gguf(file, files.name).eos_ids,
        bos_id=vocabulary.get("bos_token_id") if vocabulary.adds_bos else None,
    )


def _from_directory(files: ModelFiles) -> Tokenizer:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise InvalidArgumentError(f"model directory {files.path} has no tokenizer.json", reason="MODEL_INVALID")
    with _reading(path):
        encoder = Encoder.from_file(str(path))
    # Limits of the file's own would cut prompts without a word.
    encoder.no_truncation()
    encoder.no_padding()
    config_path = files.path / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    special_tokens = {
        name: token for name in ("bos_token", "eos_token") if (token := _token_text(config.get(name))) is not None
    }
    return Tokenizer(
        encoder,
        template=ChatTemplate(_template_of(files.path, config), special_tokens),
        eos_ids=load_config_of(files).eos_ids,
        bos_id=None,
    )


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


def _template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text, from the file of its own, else from the configuration: a text, or a list of named ones."""
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{own_file} can't be read: {error}", reason="MODEL_INVALID") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == _DEFAULT_TEMPLATE]
        value = entries[-1].get("template") if entries else None
    return value if isinstance(value, str) else None
