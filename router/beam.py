"""A beam search as a request has it: what can be asked for beside, and its hypotheses as answers."""

from collections.abc import Iterable

from pageferry.core.errors import InternalError, invalid
from pageferry.core.sampling import BeamParams
from pageferry.router.answer import Answer
from pageferry.runtime.convert_work import beam_from_proto
from pageferry.text.detokenize import TextStream
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FINISH_REASON_STOP, GeneratedToken, Hypothesis


def beam_of(request: pb.GenerateRequest, max_num_seqs: int | None) -> BeamParams | None:
    """What the request asks for; raises InvalidArgumentError for what it can't have, or can't have beside.

    `max_num_seqs` is what the decode worker with most slots has, None where none is there.
    """
    if not request.HasField("beam"):
        return None
    beam = beam_from_proto(request.beam)
    if max_num_seqs is not None and beam.width > max_num_seqs:
        limit = f"must be at most {max_num_seqs}, the max_num_seqs of the decode workers: each beam takes a slot"
        raise invalid("beam.width", beam.width, limit)
    if request.n > beam.width:
        raise invalid("n", request.n, f"must be at most beam.width, {beam.width}")
    if request.best_of:
        raise invalid("best_of", request.best_of, "must not be set with beam, which gives its n best hypotheses")
    return beam


def answers_of(hypotheses: Iterable[Hypothesis], texts: Iterable[TextStream]) -> list[Answer]:
    """An answer for each of the texts, which are new: the best hypotheses, best first, cut at stop strings."""
    answers = [_answer(one, text) for one, text in zip(hypotheses, texts, strict=False)]
    if not answers:
        raise InternalError("a decode worker sent no hypotheses", reason="NO_HYPOTHESES")
    return answers


def _answer(hypothesis: Hypothesis, text: TextStream) -> Answer:
    written = text.push(hypothesis.token_ids)
    written += text.finish()
    tokens = [
        GeneratedToken(position=position, token_id=token_id)
        for position, token_id in enumerate(hypothesis.token_ids[: text.num_tokens])
    ]
    is_cut = text.matched_stop is not None
    return Answer(
        deltas=[pb.Delta(text=written, tokens=tokens)],
        reason=FINISH_REASON_STOP if is_cut else hypothesis.reason,
        matched_stop=text.matched_stop or "",
        score=hypothesis.score,
    )
