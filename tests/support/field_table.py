"""The option `--cases`: run the tests of faults only, and print a table of the faults met in the field.

Its rows: the public thread that a fault is known from, the test that shows it, how that ended.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

_FAULTS = Path(__file__).parents[1] / "faults"
_SOURCE = "field"  # of user properties: they come with the report of a test
_OUTCOMES = ("passed", "failed", "error", "skipped")


class FieldTable:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, others = [], []
        for item in items:
            sources = [source for marker in item.iter_markers(_SOURCE) for source in marker.args]
            item.user_properties += [(_SOURCE, source) for source in sources]
            (kept if sources or item.path.is_relative_to(_FAULTS) else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for outcome in _OUTCOMES:
            for report in terminalreporter.stats.get(outcome, ()):
                test = report.nodeid.partition("[")[0].removeprefix("tests/")
                for name, source in report.user_properties:
                    if name == _SOURCE:
                        rows[source, test][outcome] += 1
        terminalreporter.section("faults met in the field")
        for line in _lines(rows):
            terminalreporter.write_line(line)


def _lines(rows: dict[tuple[str, str], Counter[str]]) -> Iterable[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    last = ""
    for source, test in sorted(rows, key=lambda row: (row[0].lower(), row[1])):
        outcome = ", ".join(f"{number} {how}" for how, number in rows[source, test].items())
        shown = source if source != last else ""
        yield f"{shown:{widths[0]}}  {test:{widths[1]}}  {outcome}"
        last = source
