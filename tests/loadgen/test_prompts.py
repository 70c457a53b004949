from pathlib import Path

import pytest

from pageferry.core.errors import InvalidArgumentError, NotFoundError
from pageferry.loadgen.prompts import PromptMaker, tokenizer_of
from pageferry.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Tokenizer:
    return tokenizer_of(str(tiny_model))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer_of("smollm2")


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 300])
@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_a_prompt_has_exactly_its_tokens(name: str, num_tokens: int, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    text = PromptMaker(tokenizer, seed=1, chat=False).make(num_tokens)
    assert len(tokenizer.encode(text)) == num_tokens
    assert text == text.strip()


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_a_chat_has_exactly_its_tokens_with_the_template(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    text = PromptMaker(tokenizer, seed=1, chat=True, prefix_tokens=8).make(64)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert len(tokenizer.encode(rendered, add_special=False)) == 64


def test_prompts_differ_and_come_again_with_their_seed(tiny: Tokenizer) -> None:
    maker = PromptMaker(tiny, seed=5, chat=False)
    texts = [maker.make(2) for _ in range(60)]  # out of few words, so that equal ones are drawn
    assert len(set(texts)) == 60
    again = PromptMaker(tiny, seed=5, chat=False)
    assert [again.make(2) for _ in range(60)] == texts
    assert PromptMaker(tiny, seed=6, chat=False).make(2) != texts[0]


def test_prefixes_are_shared_in_turn(smollm2: Tokenizer) -> None:
    maker = PromptMaker(smollm2, seed=2, chat=False, prefix_tokens=24, num_prefixes=3)
    ids = [tuple(smollm2.encode(maker.make(40 + index))) for index in range(9)]
    assert [len(one) for one in ids] == list(range(40, 49))
    prefixes = [one[:24] for one in ids]
    assert len(set(prefixes)) == 3 and prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len({one[:28] for one in ids}) == 9


def test_no_room_after_prefix_and_template(tiny: Tokenizer) -> None:
    maker = PromptMaker(tiny, seed=2, chat=False, prefix_tokens=24)
    assert len(tiny.encode(maker.make(25))) == 25
    with pytest.raises(InvalidArgumentError, match="input tokens is 24, must be at least 25: 24 of the prefix"):
        maker.make(24)
    with pytest.raises(InvalidArgumentError, match="of the template"):
        PromptMaker(tiny, seed=2, chat=True).make(3)


def test_too_few_prompts_of_a_length(tiny: Tokenizer) -> None:
    maker = PromptMaker(tiny, seed=2, chat=False)
    with pytest.raises(InvalidArgumentError, match="too few prompts that differ"):
        for _ in range(1000):
            maker.make(1)


def test_a_tokenizer_that_is_not_there() -> None:
    with pytest.raises(NotFoundError, match="/nowhere"):
        tokenizer_of("/nowhere")
