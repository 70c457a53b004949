"""The beam searches of a decode worker: their beams as sequences, and the pages that these share.

A request's own sequence, the root, stands in the scheduler's queues and computes the prompt. From then on its beams are
stepped in its place, all of them or none. Where they are preempted, which they are together, the root computes all that
they have in common, and each beam the rest.
"""

from dataclasses import dataclass, field
from itertools import takewhile

from pageferry.core.beam import Beam, BeamSearch, Candidates
from pageferry.core.page_tables import PageTables
from pageferry.core.plan import NO_TOKEN, Ended
from pageferry.core.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class _Group:
    search: BeamSearch
    has_begun: bool = False
    given: list[Candidates] = field(default_factory=list)  # in this step, of the first beams


class BeamGroups:
    """Moves searches on as candidates come, and keeps each root's `beams`."""

    def __init__(self, tables: PageTables) -> None:
        self._tables = tables
        self._groups: dict[Sequence, _Group] = {}

    def take(self, sequence: Sequence, candidates: Candidates) -> Ended | None:
        """A beam, or the root once it has computed its tokens, has got candidates; the root's end, if that is all.

        The beams' come in the order of `beams`, all in one step.
        """
        root = sequence.owner
        assert root.work.beam is not None, f"{root.work.request_id} is no beam search"
        if root not in self._groups:
            self._groups[root] = _Group(BeamSearch(root.work.beam, root.work.stop))
        group = self._groups[root]
        if root.beams or not group.has_begun:
            group.given.append(candidates)
            if len(group.given) < len(root.members):
                return None
            group.search.advance(group.given)
            group.given, group.has_begun = [], True
            root.num_steps += bool(root.beams)
            if group.search.is_over:
                return _ended(root, group.search)
        self._follow(root, group.search.running)
        return None

    def num_apart(self, root: Sequence) -> int:
        """Pages of each full group that it needs, once it has computed its tokens, for what its beams have apart."""
        group = self._groups.get(root)
        if group is None or not group.has_begun:
            return 0
        running, num_common = group.search.running, len(root.token_ids)
        num_shared = num_common // self._tables.page_size
        num_each = self._tables.num_pages(root.num_prompt + len(running[0].token_ids)) - num_shared
        return num_shared + len(running) * num_each - self._tables.num_pages(num_common)

    def preempted(self, root: Sequence) -> None:
        """All its pages are given back."""
        group = self._groups.get(root)
        if group is None or not group.has_begun:
            return
        self._drop_beams(root)
        outputs = [beam.token_ids[:-1] for beam in group.search.running]  # each has to compute its last token
        common = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*outputs, strict=True))
        root.token_ids = [*root.work.prompt_ids, *(tokens[0] for tokens in common)]

    def end(self, root: Sequence) -> None:
        """It is over, and its pages are given back."""
        self._groups.pop(root, None)
        self._drop_beams(root)

    def _drop_beams(self, root: Sequence) -> None:
        for beam in root.beams:
            beam.status = SequenceStatus.FINISHED
        root.beams = []

    def _follow(self, root: Sequence, running: list[Beam]) -> None:
        """Let the sequences be the running beams: a parent goes on as the best of its own, and is forked for others."""
        before, root.beams = root.beams, []
        for sequence in before or [root]:
            self._tables.slide(sequence)
        taken = set()
        for beam in running:
            if not before:
                sequence = self._fork(root, root, beam)
            elif beam.parent not in taken:
                taken.add(beam.parent)
                sequence = before[beam.parent]
                sequence.append(beam.token_ids[-1])
            else:
                sequence = self._fork(root, before[beam.parent], beam)
            root.beams.append(sequence)
        for index, sequence in enumerate(before or [root]):
            if index not in taken:
                self._tables.give_up(sequence)
                sequence.status = SequenceStatus.FINISHED if before else root.status

    def _fork(self, root: Sequence, parent: Sequence, beam: Beam) -> Sequence:
        token_ids = [*root.work.prompt_ids, *beam.token_ids]
        child = Sequence(root.work, root.arrival, token_ids=token_ids, status=SequenceStatus.RUNNING, root=root)
        self._tables.fork(parent, child)
        return child


def _ended(root: Sequence, search: BeamSearch) -> Ended:
    if not search.hypotheses:
        return Ended(root, failure=f"{NO_TOKEN} any beam")
    return Ended(root, search.hypotheses[0].reason, hypotheses=tuple(search.hypotheses))
