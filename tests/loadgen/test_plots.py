import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from pageferry.loadgen.plots import Frame, Panel, Series, bars, cdf, lines
from pageferry.loadgen.svg import DARK, INK, LIGHT, standalone

FRAME = Frame("one", "What is seen", "time [s]")
LABELS = ("first", "<script>alert(1)</script>", "_hidden $x^2$ \x00\ud800", "中文 " + "long " * 20)


def draw_lines(frame: Frame = FRAME, labels: tuple[str, ...] = LABELS) -> str:
    series = [Series(label, [0, 1, 2], [number, 5, 3]) for number, label in enumerate(labels)]
    steps = Panel("pages", [Series("used", [0, 1, 2], [1, 0, 2], "steps")])
    return lines(frame, Panel("rate [1/s]", series, limit=4.0), steps)


def draw_cdf(frame: Frame = FRAME, labels: tuple[str, ...] = LABELS) -> str:
    return cdf(frame, {label: [1.0, 2.0, 30.0] for label in labels})


def draw_bars(frame: Frame = FRAME, labels: tuple[str, ...] = LABELS) -> str:
    return bars(frame, "share [%]", ["1", "2"], {label: [30.0, 70.0] for label in labels})


DRAW = pytest.mark.parametrize("draw", [draw_lines, draw_cdf, draw_bars])


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


@DRAW
def test_labels_are_text_of_the_picture_and_never_markup(draw: Callable[[], str]) -> None:
    svg = draw()
    assert "<script" not in svg
    found = texts(svg)
    assert "first" in found and LABELS[1] in found and "time [s]" in found
    assert any("_hidden $x^2$ \ufffd\ufffd" in text for text in found)
    assert any(text.startswith("中文 long") and text.endswith("…") and len(text) == 42 for text in found)


@DRAW
def test_the_same_plot_has_the_same_bytes(draw: Callable[[], str]) -> None:
    assert draw() == draw()


@DRAW
def test_colours_are_the_surrounding_page_s(draw: Callable[[], str]) -> None:
    svg = draw()
    assert "currentColor" in svg and INK not in svg
    assert "var(--series-0)" in svg and "var(--series-1)" in svg
    assert not any(colour in svg for colour in (*LIGHT, *DARK))


@DRAW
def test_ids_are_the_plot_s_own_and_every_reference_has_its_target(draw: Callable[[Frame], str]) -> None:
    svg = draw(FRAME)
    ids = re.findall(r'\bid="([^"]*)"', svg)
    assert ids and len(ids) == len(set(ids)) and all(id_.startswith("one-") for id_ in ids)
    references = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', svg)
    assert references and {one or other for one, other in references} <= set(ids)


@DRAW
def test_it_is_an_image_with_an_alternative(draw: Callable[[], str]) -> None:
    root = ElementTree.fromstring(draw())
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label") == "What is seen"
    assert "http" not in draw()


def test_a_single_series_needs_no_legend() -> None:
    assert "only" not in texts(draw_cdf(labels=("only",)))


def test_a_distribution_without_values_is_left_out() -> None:
    svg = cdf(FRAME, {"one": [1.0], "none": [], "two": [1.0, 2.0]})
    assert "none" not in texts(svg) and "two" in texts(svg)


def test_colours_stay_with_their_series() -> None:
    """What two results share keeps the second's colour where the first has nothing."""
    empty_first = {"A": [], "B": [1.0, 2.0]}
    lined = lines(FRAME, Panel("y", [Series("A", [], []), Series("B", [0, 1], [1, 2])]))
    for svg in (cdf(FRAME, empty_first), bars(FRAME, "y", ["1", "2"], empty_first), lined):
        assert "B" in texts(svg) and "A" not in texts(svg)
        assert "var(--series-1)" in svg and "var(--series-0)" not in svg


def test_long_labels_stand_in_as_many_columns_as_fit() -> None:
    def rows_of_legend(label: str) -> int:
        root = ElementTree.fromstring(draw_cdf(labels=tuple(f"{label}{number}" for number in range(4))))
        return len({text.get("y") for text in root.iter("text") if (text.text or "").startswith(label)})

    assert rows_of_legend("x") == 1 and rows_of_legend("a label of thirty characters, ") == 2


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0, 5.0], [7.0, 7.0], [0.001, 90_000.0]])
def test_logarithmic_axes_take_what_there_is(values: list[float]) -> None:
    svg = cdf(Frame("log", "", "gap [ms]", log_x=True, marks={"limit": 5.0}), {"gaps": values})
    assert "limit" in texts(svg)
    ticks = [text for text in texts(svg) if re.fullmatch(r"[\d.,]+", text)]
    assert ticks and "e" not in "".join(ticks)


def test_a_file_of_its_own_brings_colours_for_light_and_dark() -> None:
    svg = standalone(draw_cdf())
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("width") == "540" and root.get("height") == "290"
    assert f"--series-0: {LIGHT[0]}" in svg and f"--series-0: {DARK[0]}" in svg and "prefers-color-scheme: dark" in svg


def relative_luminance(colour: str) -> float:
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colours", "background"), [(LIGHT, "#ffffff"), (DARK, "#171c23")])
def test_series_stand_out_from_the_background(colours: tuple[str, ...], background: str) -> None:
    for colour in colours:
        low, high = sorted((relative_luminance(colour), relative_luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour  # enough for text, too
