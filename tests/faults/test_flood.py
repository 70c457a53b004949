"""Strangers' garbage: what it is made of, and a short flood; `make flood` makes ten thousand connections."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from garbage import METHODS, fill
from http2_bytes import BEGINNING, call, frame


def frames(data: bytes) -> list[tuple[int, int, bytes]]:
    """Kind, flags and payload of each frame."""
    found = []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], data[9:end]))
        data = data[end:]
    return found


def test_a_call_is_written_as_a_library_would() -> None:
    _, headers, body = frames(call("/a.B/C", b"xyz").removeprefix(BEGINNING))
    assert headers[:2] == (1, 4)
    assert b"\0\x05:path\x06/a.B/C" in headers[2]
    assert body == (0, 1, b"\0\0\0\0\x03xyz")


@pytest.mark.parametrize(("size", "prefix"), [(126, b"\x7e"), (127, b"\x7f\0"), (300, b"\x7f\xad\x01")])
def test_long_metadata_have_their_length_before_them(size: int, prefix: bytes) -> None:
    _, headers, _ = frames(call("/a", b"", [("x", "a" * size)]).removeprefix(BEGINNING))
    assert headers[2].endswith(b"\0\x01x" + prefix + b"a" * size)


def test_metadata_beyond_a_frame_go_on_in_others() -> None:
    _, *headers, _ = frames(call("/a", b"", [("x", "a" * 40_000)]).removeprefix(BEGINNING))
    assert [(kind, flags) for kind, flags, _ in headers] == [(1, 0), (9, 0), (9, 4)]
    assert frame(0, 0, 1, b"") == b"\0\0\0\0\0\0\0\0\x01"


def test_messages_with_wrong_fields_are_messages() -> None:
    draws = random.Random(0)
    for _ in range(50):
        for _, kind in (method for methods in METHODS.values() for method in methods):
            message = fill(kind(), draws)
            assert kind.FromString(message.SerializeToString()).ByteSize() == message.ByteSize()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_flood_harms_nobody() -> None:
    script = Path(__file__).with_name("flood.py")
    command = [sys.executable, str(script), "--connections", "300", "--rate", "50", "--any-latency"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "wrong_fields to decode: status 3" in result.stdout
