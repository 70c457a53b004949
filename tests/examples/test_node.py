"""The Node example against routers: streams, cancels, keeps deadlines, tells errors whole, and uses several routers."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import programs
import pytest
from cluster import wait_idle
from moments import until
from services import Deployment

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 60


@pytest.fixture(scope="module")
def node() -> str:
    found = programs.find("node")
    if not (EXAMPLE / "node_modules" / "@grpc" / "grpc-js").is_dir():
        programs.lack(f"the example's modules are missing: npm install --prefix {EXAMPLE}")
    return found


@pytest.fixture(scope="module")
def deployment(node: str) -> Iterator[Deployment]:
    with Deployment(prefill=1, decode=1, routers=2) as made:
        yield made


def command(node: str, deployment: Deployment, *arguments: str) -> list[str]:
    return [node, str(EXAMPLE / "generate.mjs"), "--address", deployment.routers[0].address, *arguments]


def run(node: str, deployment: Deployment, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = command(node, deployment, *arguments)
    return subprocess.run(done, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_an_answer_is_streamed_and_its_end_told(node: str, deployment: Deployment) -> None:
    done = run(node, deployment, "--temperature", "0", "--max-tokens", "12", "Hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "FINISH_REASON_LENGTH: 12 tokens, the first after" in done.stderr


async def test_control_c_ends_the_work_too(node: str, deployment: Deployment) -> None:
    arguments = command(node, deployment, "--temperature", "0", "--max-tokens", "1500", "Hello")
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.read(20)  # it has begun
        process.send_signal(signal.SIGINT)
        _, told = await process.communicate()
    assert (process.returncode, told.decode().strip()) == (130, "cancelled")
    async with deployment.stub() as stub:
        await wait_idle(stub)
    assert requests(deployment, 0, "cancelled") == 1


def test_a_deadline_is_kept(node: str, deployment: Deployment) -> None:
    done = run(node, deployment, "--temperature", "0", "--max-tokens", "1500", "--deadline", "0.5", "Hello")
    assert done.returncode == 1
    assert done.stderr.strip().startswith("DEADLINE_EXCEEDED")


def test_wrong_options_are_told_with_the_right_ones(node: str, deployment: Deployment) -> None:
    done = run(node, deployment, "--temperature", "-1", "Hello")
    assert done.returncode == 2 and not done.stdout
    assert "--temperature" in done.stderr.splitlines()[0] and "usage: " in done.stderr
    assert "    at " not in done.stderr  # no stack


def test_an_error_is_told_with_its_details(node: str, deployment: Deployment) -> None:
    done = run(node, deployment, "--temperature=-1", "Hello")
    assert done.returncode == 1 and not done.stdout
    lines = done.stderr.splitlines()
    assert lines[0].startswith("INVALID_ARGUMENT: temperature is -1")
    assert '"type":"google.rpc.ErrorInfo","reason":"INVALID_FIELD","domain":"pageferry' in lines[1]
    assert '"field":"temperature"' in lines[2]


async def test_calls_go_to_several_routers_in_turn(node: str, deployment: Deployment) -> None:
    both = ",".join(router.address for router in deployment.routers)
    script = f"""
        import {{ connect, generate }} from {str(EXAMPLE / "generate.mjs")!r};
        const client = connect({both!r});
        let isOver = false;
        process.stdin.on("end", () => (isOver = true)).resume();
        const request = {{ prompt: "Hello", stop: {{ max_tokens: 2, ignore_eos: true }} }};
        while (!isOver)
          for await (const event of generate(client, request))
            if (event.usage) process.stdout.write(".");
        client.close();
    """

    def ended() -> list[int]:
        return [requests(deployment, index, "length") for index in range(2)]

    before = ended()
    command = [node, "--input-type=module", "-e", script]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    try:
        # Connections are made one after the other, and the first one there has all calls until then.
        await until(lambda: all(new > old for new, old in zip(ended(), before, strict=True)), "both are called", WAIT_S)
        shared = ended()
        await until(lambda: sum(ended()) >= sum(shared) + 20, "20 more calls", WAIT_S)
        after = ended()
        output, errors = await asyncio.wait_for(process.communicate(b""), WAIT_S)  # which ends its input
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, set(output)) == (0, {ord(".")}), errors.decode()
    assert len(output) == sum(ended()) - sum(before)
    assert min(new - old for new, old in zip(after, shared, strict=True)) >= 5, (shared, after)


def requests(deployment: Deployment, router: int, outcome: str) -> int:
    """How many requests of a router have ended so."""
    text = httpx.get(f"{deployment.routers[router].http}/metrics", timeout=WAIT_S).text
    name = f'pageferry_requests_total{{outcome="{outcome}"}} '
    return sum(int(float(line.removeprefix(name))) for line in text.splitlines() if line.startswith(name))
