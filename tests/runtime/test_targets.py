"""Addresses as text, and what the gRPC library is told of them."""

import json

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.runtime.targets import parse_target


def test_one_address_is_taken_as_it_is() -> None:
    for address in ("127.0.0.1:50051", "router.example:443", "[::1]:50051", "unix:/run/pageferry"):
        target = parse_target(address)
        assert (target.uri, target.options) == (address, ())


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        ("localhost:1, 10.0.0.2:65535", "ipv4:127.0.0.1:1,10.0.0.2:65535"),
        ("[::1]:1,[fd00::2]:2", "ipv6:[::1]:1,[fd00::2]:2"),
        ("dns:///routers.example:50051", "dns:///routers.example:50051"),
    ],
)
def test_several_share_calls_among_those_that_serve(text: str, uri: str) -> None:
    target = parse_target(text)
    assert target.uri == uri
    config = json.loads(dict(target.options)["grpc.service_config"])
    assert config["loadBalancingConfig"] == [{"round_robin": {}}]
    assert config["healthCheckConfig"] == {"serviceName": "pageferry.v1.InferenceService"}
    assert config["methodConfig"][0]["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("127.0.0.1:1,127.0.0.2", "must be host:port"),
        ("127.0.0.1:1,", "must be host:port"),
        ("127.0.0.1:1,127.0.0.1:0", "must be host:port"),
        ("127.0.0.1:1,127.0.0.1:65536", "must be host:port"),
        ("127.0.0.1:1,127.0.0.1:١", "must be host:port"),
        ("router-a.example:1,router-b.example:1", "dns:///name:port"),
        ("127.0.0.1:1,[::1]:1", "must not mix"),
    ],
)
def test_what_can_not_be_read_is_refused(text: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit) as caught:
        parse_target(text)
    assert text in caught.value.message


def test_a_port_of_more_digits_than_python_reads_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be host:port"):
        parse_target("127.0.0.1:1,127.0.0.1:" + "9" * 5000)
