"""Pages for people: what they name is there, and no merge has left a passage twice."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
GENERATED = ("RESULTS.md", "api.md", "faults.md", "metrics.md")  # with commands or words that return
PASSAGE = 12  # words that a page has no reason to repeat

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="([^"]*)"', text))


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pages
def test_no_passage_stands_twice(page: Path) -> None:
    if page.name not in GENERATED:
        text = re.sub(r"^\|.*$", "", prose(page), flags=re.MULTILINE)
        words = re.findall(r"\S+", text)
        passages = Counter(" ".join(words[first : first + PASSAGE]) for first in range(len(words) - PASSAGE + 1))
        assert [passage for passage, count in passages.items() if count > 1] == []


def test_the_table_of_where_things_are_has_a_row_for_each_and_names_files_that_are_there() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    assert [name for name, count in Counter(name for name, _ in rows).items() if count > 1] == []
    files = {file for _, places in rows for file in re.findall(r"`(\w+/[\w/]+\.(?:py|h|proto))`", places)}
    assert len(files) > 100
    assert [
        file for file in sorted(files) if not any((top / file).exists() for top in (ROOT, ROOT / "src/pageferry"))
    ] == []
