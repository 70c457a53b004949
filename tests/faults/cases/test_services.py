"""The harness itself: what it does to services, and that they come back."""

import pytest
from cluster import generate, greedy, wait_idle
from services import Deployment


async def test_services_are_killed_paused_and_started_again_at_their_addresses() -> None:
    with Deployment(prefill=1, decode=1) as deployment:
        (decode,) = deployment.decode
        async with deployment.stub() as stub:
            before = await generate(stub, greedy([5] * 40, 8))
            decode.pause()
            assert decode.is_alive
            decode.resume()
            address, pid = decode.address, decode.pid
            decode.restart()
            deployment.wait_ready()
            assert (decode.address, decode.pid != pid) == (address, True)
            await wait_idle(stub)
            assert (await generate(stub, greedy([5] * 40, 8))).token_ids == before.token_ids
        assert all(service.fds() > 3 and service.rss() > 10**7 for service in deployment.services)


def test_a_service_that_can_not_start_is_told_with_its_words() -> None:
    with (
        pytest.raises(AssertionError, match=r"ended before it was ready(.|\n)*page_size"),
        Deployment(1, 1, of_role={"decode": {"engine.page_size": "0"}}),
    ):
        pass
