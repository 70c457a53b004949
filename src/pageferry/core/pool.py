"""The accounting of a page pool: which page belongs to whom. It holds no bytes."""

from typing import NewType

PageId = NewType("PageId", int)
