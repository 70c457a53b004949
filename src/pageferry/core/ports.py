"""Numbers of TCP ports."""

import ipaddress

MAX_PORT = 65535


def is_port(text: str) -> bool:
    """Whether the text is the number of a port that can be called."""
    digits = text.lstrip("0")
    return text.isascii() and text.isdecimal() and 0 < len(digits) <= len(str(MAX_PORT)) and int(digits) <= MAX_PORT


def has_ip(address: str) -> bool:
    """Whether the host of a `host:port` is an IP address; one of IPv6 stands in brackets."""
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
