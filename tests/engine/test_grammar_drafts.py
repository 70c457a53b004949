"""Grammars with drafts: the same tokens as without, and a matcher that goes forward with accepted ones only."""

from pathlib import Path

import pytest
from compiled import needs_library
from decoding import Decoding, requested
from engines import load
from grammars import regex
from tiny_model import VOCAB_SIZE

from pageferry.core.model_files import resolve_model
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.text.grammar import Grammars
from pageferry.text.tokenizer import load_tokenizer

GRAMMARS = [regex(text) for text in (r"(ab|abc){4,40}", r"(\d\d, ){3,20}end", r'"(the |of )*x"')]


@needs_library
@pytest.mark.parametrize("source", ["lookup", "layers:2"])
def test_tokens_that_match_are_the_same_with_drafts(tiny_model: Path, source: str) -> None:
    engine = load(tiny_model, num_pages=200, speculation=source)
    tokenizer = load_tokenizer(resolve_model(str(tiny_model)))
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE)

    def works() -> list[Sequence]:
        made = []
        for number in range(12):
            grammar = GRAMMARS[number % len(GRAMMARS)]
            sampling = SamplingParams(temperature=number % 2, seed=number, grammar=grammar)
            sequence = requested([5 + number, 80, 90, 100] * 4, 40, sampling, number=number, stop=tokenizer.eos_ids)
            sequence.constraint = grammars.matcher(grammar)
            made.append(sequence)
        return made

    expected = Decoding(engine).outputs(works())
    drafted = works()
    assert Decoding(engine, source).outputs(drafted) == expected
    assert sum(one.num_accepted for one in drafted) > 0
    for sequence, output in zip(drafted, expected, strict=True):
        matcher = grammars.matcher(GRAMMARS[drafted.index(sequence) % len(GRAMMARS)])
        matcher.follow(output)
        assert not matcher.problem
