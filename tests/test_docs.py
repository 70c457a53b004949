"""What the docs lead to is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "bench").glob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
]


def _broken(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    paths = [link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    return [f"{page.relative_to(ROOT)}: {path}" for path in paths if not (page.parent / path).exists()]


def test_links_between_files_lead_somewhere() -> None:
    assert len(PAGES) > 20
    assert [broken for page in PAGES for broken in _broken(page)] == []
