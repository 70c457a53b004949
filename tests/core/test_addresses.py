"""Addresses and names of workers, as they are configured."""

import pytest

from pageferry.core.addresses import ServiceName, host_port, parse_worker
from pageferry.core.errors import InvalidArgumentError


@pytest.mark.parametrize("text", ["dns:///decode.pageferry.svc:50051", "dns:decode.pageferry.svc:50051"])
def test_a_name_of_several(text: str) -> None:
    assert parse_worker("decode", text) == ServiceName("decode.pageferry.svc", 50051)


@pytest.mark.parametrize("text", ["decode:50051", "10.0.0.1:1", "[fd00::1]:65535", "dnsmasq:53"])
def test_an_address_is_no_name(text: str) -> None:
    assert parse_worker("decode", text) is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("dns:///decode", "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("dns:///:1", "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("dns:///decode:0", "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("dns://10.0.0.10/decode:1", "must be dns:///name:port, whose name this machine's resolver is asked for"),
        ("dns:///de code:1", "must be dns:///name:port, whose name this machine's resolver is asked for"),
        ("dns:///decode..svc:1", "must be dns:///name:port, whose name this machine's resolver is asked for"),
        (f"dns:///{'a' * 64}:1", "must be dns:///name:port, whose name this machine's resolver is asked for"),
        ("dns:///fd00::1:1", "must be dns:///name:port, whose name this machine's resolver is asked for"),
    ],
)
def test_what_is_neither_is_refused(text: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_worker("decode", text)
    assert caught.value.message == f"decode is {text!r}, {limit}"


def test_an_ipv6_address_has_brackets_before_a_port() -> None:
    assert (host_port("fd00::1", 5), host_port("[fd00::1]", 5), host_port("pod", 5)) == ("[fd00::1]:5",) * 2 + (
        "pod:5",
    )
