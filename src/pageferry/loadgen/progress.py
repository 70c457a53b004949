"""Progress on standard error, drawn twice a second: it shares the cores with what is measured."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_REFRESHES_PER_S = 2


class Bar:
    """Nothing where standard error is no terminal, or `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        text = TextColumn("{task.fields[failed]}")
        self._progress = Progress(
            *columns,
            text,
            console=Console(file=sys.stderr),
            refresh_per_second=_REFRESHES_PER_S,
            disable=quiet or not sys.stderr.isatty(),
            transient=True,
        )
        self._task: TaskID | None = None
        self._failed = 0

    def begin(self, what: str, total: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._failed = 0
        self._task = self._progress.add_task(what, total=total, failed="")

    def advance(self, failed: bool) -> None:
        if self._task is None:
            return
        self._failed += failed
        if failed:
            self._progress.update(self._task, failed=f"{self._failed} failed")
        self._progress.advance(self._task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
