"""The client library.

    async with Client("127.0.0.1:50051") as client:
        async for delta in client.generate("Once upon a time", max_tokens=32):
            print(delta.text, end="")

`SyncClient` is the same without asyncio. Errors are those of `pageferry.core.errors`: `InvalidArgumentError` for a bad
request, `UnavailableError` where another try may help, and so on; all are `PageferryError`.
"""

from pageferry.client.client import Client, Generation
from pageferry.client.request import Message, Options, Prompt
from pageferry.client.result import Choice, Delta, Pages, Result, Token, Usage
from pageferry.client.sync import SyncClient, SyncGeneration
from pageferry.core.errors import PageferryError

__all__ = [
    "Choice",
    "Client",
    "Delta",
    "Generation",
    "Message",
    "Options",
    "PageferryError",
    "Pages",
    "Prompt",
    "Result",
    "SyncClient",
    "SyncGeneration",
    "Token",
    "Usage",
]
