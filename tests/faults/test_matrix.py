"""Every fault at every state of a request, simulated; `--rewrite` writes the table in docs/faults.md anew.

All of it takes a minute; `pytest -m "slow or not slow" tests/faults/test_matrix.py`.
"""

import functools
from pathlib import Path

import pytest
from sim.matrix import Case, Outcome, cases, report, run_case

_DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
_MARK = "<!-- What follows is written by pytest tests/faults/test_matrix.py --rewrite -->\n"
_QUICK = ("prefill-killed", "decode-killed", "pages-")


@functools.cache
def outcome_of(case: Case) -> Outcome:
    return run_case(case)


def _parameter(case: Case) -> object:
    return pytest.param(case, id=case.id, marks=() if case.id.startswith(_QUICK) else pytest.mark.slow)


@pytest.mark.parametrize("case", [_parameter(case) for case in cases()])
def test_nothing_is_lost(case: Case) -> None:
    outcome_of(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_table_is_current(request: pytest.FixtureRequest) -> None:
    before, mark, table = _DOCUMENT.read_text().partition(_MARK)
    now = "\n" + report({case: outcome_of(case) for case in cases()})
    if request.config.getoption("--rewrite"):
        _DOCUMENT.write_text(before + mark + now)
    else:
        assert table == now
