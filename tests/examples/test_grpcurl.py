"""Each recipe for grpcurl in docs/clients.md, run as it stands against a router, prints what is shown there."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from programs import find

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"  # in the docs


def recipes() -> Iterator[tuple[str, str]]:
    """Commands, and what is shown below them."""
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8").partition("\n## grpcurl\n")[2]
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        lines = block.splitlines(keepends=True)
        while lines:
            command = lines.pop(0).removeprefix("$ ")
            while command.endswith("\\\n") or command.count("'") % 2:
                command += lines.pop(0)
            shown = ""
            while lines and not lines[0].startswith("$ "):
                shown += lines.pop(0)
            yield command, shown


RECIPES = list(recipes())


def pattern(shown: str) -> str:
    """What the output must match, from its first character to its last."""
    return ".*".join(re.escape(part.strip()) for part in shown.split("…"))


def test_all_recipes_are_found() -> None:
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert len(RECIPES) == len(re.findall(r"^\$ grpcurl", text, re.MULTILINE)) > 10
    assert all(ADDRESS in command and shown for command, shown in RECIPES)


@pytest.mark.slow
def test_the_recipes_print_what_is_shown(real: Cluster) -> None:
    environment = os.environ | {"PATH": f"{Path(find('grpcurl')).parent}:{os.environ['PATH']}"}
    for command, shown in RECIPES:
        done = subprocess.run(
            ["bash", "-c", command.replace(ADDRESS, real.address)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode != 0) == shown.startswith("ERROR:"), f"{command}\n{done.stderr}"
        output = (done.stdout + done.stderr).strip()
        assert re.fullmatch(pattern(shown), output, re.DOTALL), f"{command}\n{output}\nis not\n{shown}"
