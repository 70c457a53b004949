"""A setting's file, read again once it has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pageferry.core.errors import InvalidArgumentError, PageferryError
from pageferry.runtime.file_stamp import Stamp, stamp_of

CHECK_S = 1.0  # how often the file is looked at

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """Text that `parse`, which is given the path too, makes something of; one that is wrong is told once."""

    def __init__(
        self, path: Path, setting: str, reason: str, parse: Callable[[str, str], T], clock: Callable[[], float]
    ) -> None:
        """`setting` names the file, and `reason` is the error's, where it can't be read."""
        self._path = path
        self._setting = setting
        self._reason = reason
        self._parse = parse
        self._clock = clock
        self._stamp: Stamp | None = None
        self._checked = clock()
        self._problem = ""  # with the file as it is, as was told

    def read(self) -> T:
        """Raises InvalidArgumentError."""
        self._stamp = stamp_of(self._path)  # before it is read: a change in between is found the next time
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            message = f"{self._setting}: {self._path} can't be read: {why}"
            raise InvalidArgumentError(message, reason=self._reason) from None
        return self._parse(text, str(self._path))

    def look(self, take: Callable[[T], None], refuse: Callable[[str], None]) -> None:
        """Let `take` have what the file says now if it has changed, or `refuse` why it can't be had."""
        now = self._clock()
        if now - self._checked < CHECK_S:
            return
        self._checked = now
        try:
            if stamp_of(self._path) != self._stamp:
                take(self.read())
            self._problem = ""
        except PageferryError as error:
            if error.message != self._problem:
                refuse(error.message)
            self._problem = error.message
