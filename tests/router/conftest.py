"""A router over fake workers, as most tests here want it; a file that wants another has a `rig` of its own."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_workers import TOKENS, Rig, Script


@pytest.fixture
def rig(tiny_model: Path) -> Callable[..., Rig]:
    return lambda **options: Rig(str(tiny_model), Script(TOKENS), **options)


@pytest.fixture
async def router(rig: Callable[..., Rig]) -> AsyncIterator[Rig]:
    """With nothing left on it afterwards."""
    async with rig() as router:
        yield router
        await router.check_idle()
