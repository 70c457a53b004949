"""Scripts played on deployments of their own, once or until a short one is found that fails."""

from collections.abc import Callable, Mapping

from loopback import free_port
from services import Deployment

from chaos.run import SETTINGS, Run, Verdict
from chaos.script import Script
from chaos.shrink import shrink

Say = Callable[[str], None]
_ERROR_MARK = '"level": "error"'


async def play(script: Script, say: Say, *, stop_at_once: bool = False) -> Verdict:
    """Start what the script names, play it, and end all."""
    deployment = _deployment(script.sizes)
    run = Run(script, deployment, say, stop_at_once=stop_at_once)
    try:
        with deployment:
            await run.play()
            for service in deployment.services:
                for line in service.output.splitlines():
                    if _ERROR_MARK in line or "Traceback" in line:
                        run.complain(f"{service.name} logged {line[:2000]}")
    except AssertionError as error:  # one did not end well
        run.complain(str(error))
    return run.verdict


def _deployment(sizes: Mapping[str, int]) -> Deployment:
    """The last of each role is reached over links; all tell how many calls are open."""
    linked = {f"{role}-{size - 1}" for role, size in sizes.items()}
    deployment = Deployment(sizes["prefill"], sizes["decode"], sizes["router"], SETTINGS, linked=linked)
    last = deployment.decode[-1].settings
    last["handoff.transport"] = "inline"  # so that there are frames to spoil
    last["engine.speculation"] = "layers:1"
    for service in deployment.services:
        service.settings["telemetry.metrics_port"] = str(free_port())
    return deployment


async def shortest(script: Script, verdict: Verdict, say: Say, num_replays: int) -> Script:
    """The shortest part of a failing script that was found to fail, too."""

    async def fails(part: Script) -> bool:
        say(f"replaying {part.seconds:g} s with {len(part.asks)} requests and {len(part.faults)} faults")
        again = await play(part, lambda line: None, stop_at_once=True)
        say(f"it failed: {again.problems[0][:500]}" if again.problems else "it did not fail")
        return bool(again.problems)

    return await shrink(script, verdict.failed_at_s, fails, num_replays=num_replays)
