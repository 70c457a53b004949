"""Numbers of TCP ports."""

MAX_PORT = 65535


def is_port(text: str) -> bool:
    """Whether the text is the number of a port that can be called."""
    digits = text.lstrip("0")
    return text.isascii() and text.isdecimal() and 0 < len(digits) <= len(str(MAX_PORT)) and int(digits) <= MAX_PORT
