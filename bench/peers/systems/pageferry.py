"""Pageferry itself: prefill and decode in one worker, and in one worker each, over HTTP and over gRPC."""

import sys

from peers.system import Place, Setting, System


def _grpc_port(place: Place) -> int:
    return place.port + 1


def _up(place: Place, *workers: str) -> list[str]:
    ports = ("--port", str(_grpc_port(place)), "--http-port", str(place.port))
    return [sys.executable, "-m", "pageferry.cli", "up", *workers, *ports]


def colocated(place: Place) -> list[str]:
    return _up(place, "--prefill", "0", "--decode", "1", "--threads", str(place.cores))


def split(place: Place) -> list[str]:
    threads = max(1, place.cores // 2)
    return _up(place, "--prefill", "1", "--decode", "1", "--threads", str(threads))


_COLOCATED = Setting("`--prefill 0 --decode 1`, a thread a core", "one worker does both", "README")
_SPLIT = Setting("`--prefill 1 --decode 1`, half of the cores each", "prefill never delays decode", "README")
SYSTEMS = (
    System("pageferry", "Pageferry, one worker, HTTP", colocated, settings=(_COLOCATED,)),
    System("pageferry-grpc", "Pageferry, one worker, gRPC", colocated, settings=(_COLOCATED,), grpc_port=_grpc_port),
    System("pageferry-split", "Pageferry, split, HTTP", split, settings=(_SPLIT,)),
    System("pageferry-split-grpc", "Pageferry, split, gRPC", split, settings=(_SPLIT,), grpc_port=_grpc_port),
)
