"""Pools on a device as bytes: what one gives, another takes, and as the processor's pools have it."""

import threading

import pytest
import torch
from gpu_pages import on_device
from page_pools import layout, poisoned

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pool import PageId
from pageferry.engine.gpu_load import open_device
from pageferry.engine.gpu_pages import DevicePages
from pageferry.engine.pages import PageTensors

GROUPS = parse_groups("0,2=window:32;1=full", 3, None)
TAILED = layout(PageFormat.parse("k=int8:channel,v=int4:asym"), groups=GROUPS)


def filled(of: CacheLayout, device: str) -> tuple[PageTensors, DevicePages]:
    """The same random bytes on the processor and on the device."""
    pages = poisoned(of, 4, num_tails=2)
    for pool in (*pages.pools, *pages.tails):
        pool.memory.random_(0, 256)
    return pages, on_device(pages, device)


def test_bytes_are_those_of_the_processors_pools(device: str) -> None:
    expected, tested = filled(TAILED, device)
    for place in (Place(0, PageId(3)), Place(1, PageId(0)), Place(0, PageId(1), True), Place(1, PageId(1), True)):
        key, num_layers = PageKey(place.group, 5, place.is_tail), len(GROUPS[place.group].layers)
        assert tested.read(key, place, 0, num_layers) == expected.read(key, place, 0, num_layers)
        assert tested.read(key, place, num_layers - 1, 1) == expected.read(key, place, num_layers - 1, 1)
    is_timed = tested.copied_s is not None and 0 < tested.copied_s < 60
    assert is_timed == bool(tested.device_name) == (tested.device.type == "cuda")


def test_a_page_goes_from_one_pool_to_another_from_any_thread(device: str) -> None:
    _, source = filled(TAILED, device)
    _, target = filled(TAILED, device)
    key, there = PageKey(0, 0), Place(0, PageId(2))

    def move() -> None:
        for layer in (0, 1):
            target.write(there, layer, 1, source.read(key, Place(0, PageId(1)), layer, 1))

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert torch.equal(target.pools[0].memory[2].cpu(), source.pools[0].memory[1].cpu())


def test_pages_are_blanked_and_copied_as_on_the_processor(device: str) -> None:
    both = filled(TAILED, device)
    for pages in both:
        pages.blank([Place(0, PageId(1)), Place(1, PageId(2)), Place(1, PageId(0), True)])
        pages.copy(Place(0, PageId(3)), Place(0, PageId(0)))
    for expected, tested in zip(*((*pages.pools, *pages.tails) for pages in both), strict=True):
        assert torch.equal(tested.memory.cpu(), expected.memory)


@pytest.mark.parametrize("text", ["int8", "k=int8:channel,v=int4"])
def test_plain_pages_are_converted_on_the_host(text: str, device: str) -> None:
    plain = layout(PageFormat.parse("fp32"), groups=GROUPS)
    receiver = layout(PageFormat.parse(text), groups=GROUPS)
    expected, tested = poisoned(plain, 4), None
    for pool in expected.pools:
        pool.memory.view(torch.float32).normal_()
    tested = on_device(expected, device)
    keys = [PageKey(0, 1), PageKey(1, 2), PageKey(1, 3, is_tail=True)][: 3 if receiver.format.has_tails else 2]
    for key in keys:
        place = Place(key.group, PageId(3))
        bytes_of = [pages.converted(receiver).read(key, place, 0, 1) for pages in (tested, expected)]
        assert bytes_of[0] == bytes_of[1]
    assert tested.converted(plain) is tested


def test_payloads_of_another_length_are_refused(device: str) -> None:
    _, pages = filled(TAILED, device)
    with pytest.raises(InvalidArgumentError, match="has 3 bytes, must have"):
        pages.write(Place(0, PageId(0)), 0, 1, b"abc")
    with pytest.raises(InvalidArgumentError, match="page 4 is outside the pool of 4"):
        pages.read(PageKey(0, 0), Place(0, PageId(4)), 0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"device is 'cuda:1', but torch sees no GPU.*cpu is always there"):
        open_device("cuda:1")
