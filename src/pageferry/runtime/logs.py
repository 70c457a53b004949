"""Structured logs: one JSON object a line on stderr, `event` naming what happened. No text of a request goes in."""

import json
import logging
import sys
import time
import traceback
from typing import Any

from pageferry.core.errors import invalid

_LOGGER = logging.getLogger("pageferry")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FIELDS = "pageferry_fields"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.name != _LOGGER.name:
            line["logger"] = record.name
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a status could not be sent: gRPC logs that as an error wherever a client leaves at that moment."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def configure_logging(service: str, level: str) -> None:
    """Send all logs of the process to stderr as JSON; libraries' only from warning upwards."""
    if level not in _LEVELS:
        raise invalid("telemetry.log_level", level, f"must be one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    handler.addFilter(_is_news)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    _LOGGER.setLevel(_LEVELS[level])


def log(event: str, *, level: str = "info", error: BaseException | None = None, **fields: object) -> None:
    """Log an event, e.g. `log("worker_ready", address=address, pages=1024)`.

    Of an error its type and where it came from are logged; its text, which may quote a request, at level debug only.
    """
    if error is not None:
        fields = {**fields, "error": type(error).__name__, "stack": traceback.format_tb(error.__traceback__)}
    debug = error is not None and _LOGGER.isEnabledFor(logging.DEBUG)
    _LOGGER.log(_LEVELS[level], event, exc_info=error if debug else None, extra={_FIELDS: fields})
