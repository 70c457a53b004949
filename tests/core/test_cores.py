from pathlib import Path

import pytest

from pageferry.core.cores import num_cores


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 8), ("", 8)]
)
def test_a_quota_counts_in_whole_cores(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert num_cores(tmp_path) == cores


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_the_older_files_of_a_quota(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_cores(tmp_path) == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_cgroups_the_cores_are_those_it_may_run_on(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == 8
