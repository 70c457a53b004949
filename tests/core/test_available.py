"""What is left of memory, as the machine and control groups tell it, and beside a process that holds some."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import pytest

from pageferry.core.available import available_bytes

GIB = 2**30
MEMINFO = "MemTotal:       32000000 kB\nMemFree:        1000 kB\nMemAvailable:   16777216 kB\n"  # 16 GiB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_says_what_it_has() -> None:
    assert 0 < available_bytes() < 2**50


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, {})) == 16 * GIB


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize("group", ["/", "/kubepods/of/the/host"])
def test_a_containers_limit_of_version_2(tmp_path: Path, group: str) -> None:
    files = {
        "proc/self/cgroup": f"0::{group}\n",
        f"{V2}/memory.max": f"{4 * GIB}\n",
        f"{V2}/memory.current": f"{3 * GIB}\n",
        f"{V2}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
    }
    assert available_bytes(write(tmp_path, files)) == 3 * GIB


@pytest.mark.parametrize("group", ["/", "/docker/of/the/host"])
def test_a_containers_limit_of_version_1(tmp_path: Path, group: str) -> None:
    files = {
        "proc/self/cgroup": f"5:cpu,cpuacct:{group}\n4:memory:{group}\n0::/\n",
        f"{V1}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{V1}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{V1}/memory.stat": f"inactive_file {3 * GIB}\ntotal_inactive_file {GIB}\n",
    }
    assert available_bytes(write(tmp_path, files)) == 2 * GIB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        f"{V2}/a/memory.max": f"{2 * GIB}\n",
        f"{V2}/a/memory.current": f"{GIB}\n",
        f"{V2}/a/b/memory.max": "max\n",
        f"{V2}/a/b/memory.current": f"{GIB}\n",
    }
    assert available_bytes(write(tmp_path, files)) == GIB


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        f"{V2}/memory.max": f"{GIB}\n",
        f"{V2}/memory.current": f"{GIB + 4096}\n",
    }
    assert available_bytes(write(tmp_path, files)) == -4096


@contextmanager
def group_of(num_bytes: int) -> Iterator[Path]:
    """A control group with that limit; skips the test where none may be made."""
    for parent, limit in ((Path("/") / V1, "memory.limit_in_bytes"), (Path("/") / V2, "memory.max")):
        directory = parent / f"pageferry-test-{token_hex(4)}"
        with suppress(OSError):
            directory.mkdir()
            try:
                (directory / limit).write_text(str(num_bytes))
                yield directory
                return
            finally:
                directory.rmdir()
    pytest.skip("control groups of memory can't be made here")


HOLD = """
import sys
held = b"x" * int(sys.argv[1])
print("holds", flush=True)
sys.stdin.read()
"""
ASK = """
from pageferry.core.available import available_bytes
print(available_bytes())
"""


def start(code: str, group: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A process of the group."""

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, preexec_fn=join)


def ask(group: Path) -> int:
    with start(ASK, group) as process:
        output, _ = process.communicate(timeout=60)
    return int(output)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_what_another_process_of_the_group_holds_is_not_available() -> None:
    limit, held = 512 << 20, 256 << 20
    with group_of(limit) as group:
        alone = ask(group)
        with start(HOLD, group, str(held)) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            beside = ask(group)
            holder.communicate(timeout=60)
        assert limit // 2 < alone <= limit
        assert held <= alone - beside < held + (64 << 20)
