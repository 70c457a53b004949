"""The waterfall of a fixed trace, compared with a golden file; `--rewrite` writes it anew."""

from pathlib import Path

import pytest
from fake_trace import example, of_service, span
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from pageferry.cli import waterfall

GOLDEN = Path(__file__).parent.parent / "scenarios" / "waterfall.txt"


def test_golden(request: pytest.FixtureRequest) -> None:
    text = "\n".join(waterfall.render(example())) + "\n"
    if request.config.getoption("--rewrite"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_fit_the_terminal_with_all_attributes(width: int) -> None:
    lines = waterfall.render(example(), max_width=width)
    assert max(map(len, lines)) <= width
    notes = [word for line in waterfall.render(example()) for word in line.split() if "=" in word]
    assert [word for line in lines for word in line.split() if "=" in word] == notes
    assert any(line.endswith("…") for line in lines) == (width == 40)  # rows' names alone take more


def test_one_span() -> None:
    data = example()
    del data.resource_spans[1:]
    del data.resource_spans[0].scope_spans[0].spans[1:]
    assert waterfall.render(data)[0].startswith("1 span, ")


def test_spans_give_the_terminal_no_orders() -> None:
    orders = "\x1b[2J\r\n\x07\x9b\u202e"
    odd = span((1, 0), orders, "", (0, 1), gen_ai__request__model=orders)
    odd.status.code, odd.status.message = Status.STATUS_CODE_ERROR, orders
    lines = waterfall.render(TracesData(resource_spans=[of_service(orders, odd)]))
    assert len(lines) == 2 and all(map(str.isprintable, lines))
    assert lines[1].count("[2J") == 4


def test_no_spans() -> None:
    assert waterfall.render(TracesData()) == ["the trace has no spans"]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (414_720, "415 kB"), (1_105_920, "1.11 MB"), (5e12, "5e+03 GB")]
)
def test_bytes_text(num_bytes: float, text: str) -> None:
    assert waterfall.bytes_text(num_bytes) == text
