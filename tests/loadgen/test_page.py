import dataclasses
import re
from html.parser import HTMLParser

import bench_results
import pytest

from pageferry.loadgen import page
from pageferry.loadgen.page_plots import in_flight, output_rate, plots
from pageferry.loadgen.result import BenchResult, Record

EVIL = "<script>alert('x')</script>\"'&"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Fails where tags don't match; keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"<{tag}/> is not HTML")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def evil() -> BenchResult:
    made = bench_results.result(EVIL, error=EVIL, input_tokens=EVIL)
    target = dataclasses.replace(made.target, model=EVIL, address=EVIL)
    return dataclasses.replace(made, target=target, command=EVIL, started=EVIL)


@pytest.fixture(scope="module", params=["one", "empty", "evil", "evil compared", "empty compared"])
def html(request: pytest.FixtureRequest) -> str:
    match request.param:
        case "one":
            return page.render(bench_results.result(error="connection lost"))
        case "empty":
            return page.render(bench_results.empty())
        case "evil":
            return page.render(evil())
        case "evil compared":
            return page.render_comparison(bench_results.result(), evil())
    return page.render_comparison(bench_results.empty(), bench_results.result("second", scale=2.0))


def test_a_page_is_well_formed_and_ids_are_unique(html: str) -> None:
    reader = Reader(html)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = [attributes["aria-labelledby"] for _, attributes in reader.tags if "aria-labelledby" in attributes]
    assert set(labelled) <= set(ids)


def test_a_page_runs_nothing_and_loads_nothing(html: str) -> None:
    reader = Reader(html)
    assert not {"script", "iframe", "object", "img", "form"} & {tag for tag, _ in reader.tags}
    for tag, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert not re.search(r"https?://|@import", html)
    (policy,) = (found["content"] for _, found in reader.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "script-src" not in policy


def test_tables_have_headers_and_plots_a_text(html: str) -> None:
    reader = Reader(html)
    for tag, attributes in reader.tags:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "rowgroup")
        if tag == "svg":
            assert attributes["role"] == "img" and attributes["aria-label"]
    assert [tag for tag, _ in reader.tags].count("h1") == 1


def test_what_others_wrote_is_text() -> None:
    html = page.render(evil())
    assert "<script" not in html and html.count("&lt;script&gt;alert(") >= 6
    assert Reader(html).text.count(EVIL) >= 5  # title, heading, model, address, command, error


def test_the_page_has_the_numbers_and_what_spoils_them() -> None:
    text = Reader(page.render(bench_results.result(error="connection lost"))).text
    assert "The client was busy." in text and "1 of 12 requests failed" in text and "connection lost" in text
    assert "Other processes took 13 % of the machine's CPU" in text
    assert "pageferry bench --requests 12" in text and "A processor, 2 cores" in text and "8.0 GiB" in text
    quiet = Reader(page.render(dataclasses.replace(bench_results.empty(), label="nothing"))).text
    assert "No request completed." in quiet and "Other processes" not in quiet


def test_a_comparison_says_first_what_differs() -> None:
    one, other = bench_results.result(), bench_results.result("second", scale=0.5, concurrency=4)
    text = Reader(page.render_comparison(one, other)).text
    assert "Different load: concurrency is 2 in A and 4 in B." in text
    assert text.index("Different load") < text.index("Comparison") and "0.50×" in text
    assert "Different load" not in Reader(page.render_comparison(one, one)).text


def test_plots_are_those_there_is_data_for() -> None:
    titles = [plot.title for plot in plots({"run": bench_results.result()})]
    assert titles == [
        "Time to first token",
        "Inter-token latency",
        "End to end",
        "Time to first token by input length",
        "Over time",
        "Batch sizes",
        "Goodput",
    ]
    same = dataclasses.replace(bench_results.empty(), requests=(bench_results.record(), bench_results.record(1.0)))
    assert "Time to first token by input length" not in [plot.title for plot in plots({"run": same})]
    assert plots({"run": bench_results.empty()}) == []
    failed = dataclasses.replace(bench_results.empty(), requests=(bench_results.record(ttft_ms=None, error="no"),))
    assert [plot.title for plot in plots({"run": failed})] == ["Over time"]


def test_output_is_counted_where_it_arrived() -> None:
    merged = Record(0.5, 100.0, 300.0, 8, 6, None, (200.0,), None)  # three tokens at 0.6 s, three at 0.8 s
    middles, rates = output_rate([merged, bench_results.record(error="no", ttft_ms=None, tokens=1)], 0.25)
    assert middles == [0.125, 0.375, 0.625, 0.875]
    assert rates == [0.0, 0.0, 12.0, 12.0]
    assert output_rate([], 0.25) == ([], [])


def test_requests_in_flight_rise_and_fall() -> None:
    one, other = Record(0.0, 1.0, 1000.0, 1, 1, None, (), None), Record(0.5, 1.0, 1000.0, 1, 1, None, (), None)
    assert in_flight([other, one]) == ([0.0, 0.5, 1.0, 1.5], [1, 2, 1, 0])
