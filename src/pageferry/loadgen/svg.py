"""Matplotlib figures as SVG that takes its colours and fonts from the page around it, or brings them along."""

import io
import re
import warnings
from contextlib import AbstractContextManager
from xml.etree import ElementTree

import matplotlib as mpl
from cycler import cycler
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#010203"  # text and axes; becomes the colour of the surrounding text
# Told apart with any colour vision, with a contrast of 3 and more: on white, and on near black.
LIGHT = ("#0072b2", "#c04e00", "#008060", "#a63d97", "#7d6608", "#5b6670")
DARK = ("#56b4e9", "#ff9d4d", "#2fc79a", "#e38fd3", "#e0c44c", "#a9b4bf")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
_STYLE = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.prop_cycle": cycler(color=LIGHT, linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, and is wider than what the page is shown in
    "font.size": 10,
    "grid.alpha": 0.16,
    "grid.color": INK,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "pageferry",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
_NAMESPACE = re.compile(r"\{[^}]*\}")
_REFERENCE = re.compile(r"url\(#")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LEGEND_CHARACTERS = 42


def palette_css() -> str:
    """The series' colours as variables, for light and dark."""
    light, dark = (" ".join(f"--series-{n}: {colour};" for n, colour in enumerate(side)) for side in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def styled() -> AbstractContextManager[None]:
    """In which figures are drawn and rendered."""
    return mpl.rc_context(_STYLE)  # type: ignore[arg-type] # it wants a literal for every key


def render(figure: Figure, name: str, alt: str) -> str:
    """An `<svg>` to stand inside HTML: without a size, ids starting with `name`, equal bytes for equal figures."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page's font may have it
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)  # type: ignore[no-untyped-call]
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = _NAMESPACE.sub("", element.tag)
        for key in list(element.attrib):
            _adapt(element.attrib, key, name)
    viewbox = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"viewBox": viewbox, "role": "img", "aria-label": printable(alt)}
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def standalone(svg: str) -> str:
    """The same as a file of its own, e.g. for an `<img>`: with its colours, for light and dark."""
    css = f"{palette_css()}\nsvg {{ color: #1c2128; }} text {{ font-family: {FONT} !important; }}"
    css += "\n@media (prefers-color-scheme: dark) { svg { color: #e6e9ed; } }"
    head, inside = svg.split(">", 1)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head).groups()  # type: ignore[union-attr] # render's
    size = f'width="{float(width):g}" height="{float(height):g}"'
    return f'{head} xmlns="http://www.w3.org/2000/svg" {size}><style>{css}</style>{inside}\n'


def printable(text: str, limit: int | None = None) -> str:
    """`text` without what XML can't hold; longer than `limit`, its end is left out."""
    text = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def legend_text(text: str) -> str:
    """A label as a legend takes it: one line, not too long, and not hidden for its first character."""
    return "\N{ZERO WIDTH SPACE}" * text.startswith("_") + printable(" ".join(text.split()), _LEGEND_CHARACTERS)


def _adapt(attributes: dict[str, str], key: str, name: str) -> None:
    value = attributes.pop(key)
    bare = _NAMESPACE.sub("", key)
    if bare == "id":
        value = f"{name}-{value}"
    elif bare == "href":
        value = f"#{name}-{value.removeprefix('#')}"
    elif bare in ("style", "clip-path", "fill", "stroke"):
        value = _REFERENCE.sub(f"url(#{name}-", value).replace(INK, "currentColor")
        for number, colour in enumerate(LIGHT):
            value = value.replace(colour, f"var(--series-{number})")
    attributes[bare] = value
