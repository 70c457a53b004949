"""Errors in OpenAI's form."""

import math
from collections.abc import Mapping

from pageferry.core.errors import (
    FailedPreconditionError,
    FieldViolation,
    PageferryError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from pageferry.router.gateway.strict_json import Json

# How fields of the contract begin, and what a body has in that place.
_BODY_FIELDS = {
    "stop_strings": "stop",
    "stop.": "",
    "sampling.": "",
    "chat.messages": "messages",
    "chat.tools_json": "tools",
    "chat.template_variables_json": "chat_template_kwargs",
    "chat.continue_last": "continue_final_message",
    "chat": "messages",
    "token_ids": "prompt",
    "beam.": "",
}


def in_the_body_s_words(error: PageferryError, names: Mapping[str, str]) -> PageferryError:
    """The error with the names that a body has for fields of the contract, as `Reading.names` has them."""
    if error.violations and error.violations[0].field in names:
        first, *others = error.violations
        name = names[first.field]
        if error.message.startswith(first.field):
            error.message = name + error.message.removeprefix(first.field)
        error.violations = (FieldViolation(name, first.description), *others)
    return error


def error_status(error: PageferryError) -> int:
    """The HTTP status: as the class says, but for what only a changed request or server setting can mend."""
    if isinstance(error, FailedPreconditionError):
        return 400
    if isinstance(error, ResourceExhaustedError) and error.retry_after_ms is None:
        return 413  # over a size limit; a 429 would make clients send it again
    return error.http_status


def error_headers(error: PageferryError) -> dict[str, str]:
    """When to come again, and which credentials are wanted."""
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_body(error: PageferryError) -> Json:
    """OpenAI's error object; the same in a response and in a stream's event."""
    status = error_status(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    message, param = error.message, None
    if error.violations:
        field = error.violations[0].field
        param = _body_field(field)
        if message.startswith(field):
            message = param + message.removeprefix(field)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}


def _body_field(field: str) -> str:
    """The name that a field of the contract has in a body."""
    return next((new + field.removeprefix(old) for old, new in _BODY_FIELDS.items() if field.startswith(old)), field)
