"""Every probe and hook of the manifests, against services started with the settings that the manifests give them."""

import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
from manifests import services
from pods import POLL_S, READY_S, Pod, addresses_of, pods_of, services_of
from scaling import queries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    with pods_of(services_of("cpu"), tmp_path_factory.mktemp("pods")) as found:
        yield found


def test_a_router_without_workers_is_started_and_alive_and_not_ready(pods: dict[str, Pod]) -> None:
    pods["router"].start(addresses_of(pods))
    pods["router"].wait_for("startupProbe")
    assert pods["router"].probes() == {"startupProbe": True, "readinessProbe": False, "livenessProbe": True}


def test_workers_are_alive_while_they_load_and_pass_every_probe_then(pods: dict[str, Pod]) -> None:
    for role in ("prefill", "decode"):
        pods[role].start(addresses_of(pods))
    for role in ("prefill", "decode"):
        pods[role].wait_for("livenessProbe")
        pods[role].wait_for("startupProbe")
        assert set(pods[role].probes().values()) == {True}, pods[role].said
    pods["router"].wait_for("readinessProbe")
    assert set(pods["router"].probes().values()) == {True}


def test_a_service_that_stands_still_is_found_out(pods: dict[str, Pod]) -> None:
    worker = pods["decode"]
    worker.signal(signal.SIGSTOP)
    probe = dict(worker.workload.probes)["livenessProbe"]
    try:
        assert not worker.passes(probe, probe["timeoutSeconds"])
    finally:
        worker.signal(signal.SIGCONT)
    worker.wait_for("livenessProbe")


def test_metrics_are_where_the_annotations_say_and_have_what_scales(pods: dict[str, Pod]) -> None:
    said = ""
    for workload in services("cpu+adapter"):
        annotations = workload.manifest["spec"]["template"]["metadata"]["annotations"]
        port = pods[workload.role].ports[int(annotations["prometheus.io/port"])]
        url = f"http://127.0.0.1:{port}{annotations['prometheus.io/path']}"
        with urllib.request.urlopen(url, timeout=READY_S) as answer:
            text = answer.read().decode()
        assert "pageferry_requests_total" in text
        said += text
    for name, query in queries().items():
        for metric in set(re.findall(r"pageferry_\w+", query)):
            assert f"\n{metric}" in said, f"{name}: nobody has {metric}"
        for states in re.findall(r'state=~"([^"]+)"', query):
            for state in states.split("|"):
                assert re.search(rf'\npageferry_pages{{[^}}]*state="{state}"', said), f"{name}: no pages are {state}"
    assert re.search(r'\npageferry_pages{[^}]*pool="', said)


def test_a_router_serves_while_its_hook_runs_and_ends_in_its_time(pods: dict[str, Pod]) -> None:
    router = pods["router"]
    router.wait_for("readinessProbe")
    hook = router.workload.container["lifecycle"]["preStop"]["exec"]["command"]
    before = time.monotonic()
    with subprocess.Popen(hook) as running:
        while running.poll() is None:
            assert router.passes(dict(router.workload.probes)["readinessProbe"]), router.said
            time.sleep(POLL_S)
    assert running.returncode == 0
    router.signal(signal.SIGTERM)
    assert router.process is not None
    allowed = router.workload.pod["terminationGracePeriodSeconds"] - (time.monotonic() - before)
    assert router.process.wait(allowed) == 0, router.said


def test_workers_end_in_their_time(pods: dict[str, Pod]) -> None:
    for role in ("prefill", "decode"):
        assert "lifecycle" not in pods[role].workload.container
        pods[role].signal(signal.SIGTERM)
    for role in ("prefill", "decode"):
        process, allowed = pods[role].process, pods[role].workload.pod["terminationGracePeriodSeconds"]
        assert process is not None
        assert process.wait(allowed) == 0, pods[role].said
