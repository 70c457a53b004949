"""A real viewer has the whole tree. Name a virtual environment with arize-phoenix by PHOENIX to run this, as root."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from traces import SPLIT_SPANS

SUPPORT = Path(__file__).parents[1] / "support"
PICTURE = Path(__file__).parents[2] / "build" / "phoenix.png"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("PHOENIX" not in os.environ, reason="PHOENIX names no virtual environment with arize-phoenix")
def test_phoenix_has_the_whole_tree() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    run = [sys.executable, str(SUPPORT / "phoenix_run.py"), os.environ["PHOENIX"], str(PICTURE)]
    alone = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]  # nothing of it outlives it
    inside = [*alone, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *run]
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        inside, capture_output=True, text=True, timeout=550, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    spans = json.loads(done.stdout.splitlines()[-1])["spans"]
    names = Counter(span["name"] for span in spans)
    assert names - Counter(name for name, _ in SPLIT_SPANS.elements()) == {"prefill.chunk": names["prefill.chunk"] - 1}
    ids = {span["context"]["span_id"]: span for span in spans}
    assert len(ids) == len(spans) == sum(names.values())
    (root,) = (span for span in spans if span["parent_id"] is None)
    assert root["name"] == "pageferry.request"
    assert [span["name"] for span in spans if span is not root and span["parent_id"] not in ids] == []
    receiving = next(
        span for span in spans if span["name"] == "kv.push" and ids[span["parent_id"]]["name"] == "kv.push"
    )
    assert receiving["attributes"]["pageferry.handoff.pages"] > 0
