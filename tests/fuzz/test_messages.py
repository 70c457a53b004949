"""Messages of peers and clients: what a router makes of a Watch stream, and what services make of requests."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzzing import WIRE_TEXTS, held_to_contract, messages, mutated, near, through_wire
from google.rpc.status_pb2 import Status
from grpc.aio import AioRpcError, Metadata
from hypothesis import given, strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pageferry.core.config import RouterConfig
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.layout import CacheLayout
from pageferry.core.limits import ModelLimits
from pageferry.core.model_files import resolve_model
from pageferry.router.admission import Admission
from pageferry.router.room import Limits
from pageferry.router.view import WatchGapError, WorkerView
from pageferry.runtime.convert import layout_from_proto, layout_to_proto, token_from_proto
from pageferry.runtime.convert_work import work_from_proto
from pageferry.runtime.errors import from_rpc_error, to_status
from pageferry.runtime.trace_store import TraceStore
from pageferry.text.tokenizer import Tokenizer, load_tokenizer
from pageferry.v1 import decode_pb2, inference_pb2 as pb, prefill_pb2, types_pb2, worker_pb2

GROUPS = (CacheGroup((0, 2), window=64, sinks=4), CacheGroup((1,)))
LAYOUT = CacheLayout("f" * 32, PageFormat.parse("k=int8:channel,v=int4:asym"), 16, 2, 16, GROUPS)
PLAIN = CacheLayout("f" * 32, PageFormat.parse("int8"), 16, 2, 16, (full_group(3),))
SNAPSHOT = worker_pb2.WatchResponse(
    incarnation=b"i" * 16,
    sequence=1,
    snapshot=worker_pb2.Snapshot(
        role=worker_pb2.WORKER_ROLE_DECODE,
        layout=layout_to_proto(LAYOUT),
        model="tiny",
        max_num_seqs=4,
        max_model_tokens=4096,
        chunk_tokens=64,
        load=pb.WorkerLoad(pools=[pb.PoolLoad(group=0, pages_total=9), pb.PoolLoad(group=1), pb.PoolLoad()]),
        cached_hashes=b"h" * 32,
    ),
)
LOAD = worker_pb2.WatchResponse(incarnation=b"i" * 16, sequence=2, load=SNAPSHOT.snapshot.load)


def use(view: WorkerView) -> None:
    """What routing asks of a view."""
    if view.snapshot is None:
        return
    assert view.layout is not None
    assert view.layout.cache_key
    assert len(view.available_pages) == len(view.pools)
    view.capacity_tokens()
    view.cached_tokens([b"h" * 16])
    assert view.layout.ships_to(view.layout)


@given(
    st.lists(near(SNAPSHOT) | near(LOAD) | messages(worker_pb2.WatchResponse), min_size=1, max_size=4), st.booleans()
)
def test_a_watch(stream: list[worker_pb2.WatchResponse], numbered: bool) -> None:
    view = WorkerView()
    with held_to_contract():
        view.apply(SNAPSHOT)
    for sequence, message in enumerate(stream, 2):
        if message.WhichOneof("event") == "snapshot":
            view.start_over()
            message.sequence = 1
        elif numbered:
            message.sequence, message.incarnation = sequence, view.incarnation
        with held_to_contract(WatchGapError):
            view.apply(through_wire(message, worker_pb2.WatchResponse.FromString))
        with held_to_contract():
            use(view)


@given(near(layout_to_proto(LAYOUT)) | near(layout_to_proto(PLAIN)) | messages(types_pb2.PageLayout))
def test_a_layout(message: types_pb2.PageLayout) -> None:
    with held_to_contract():
        layout = layout_from_proto(message)
        assert layout_to_proto(layout_from_proto(layout_to_proto(layout))) == layout_to_proto(layout)
        for group in layout.groups:
            group.most_live(4096, 64, layout.page_size)


SAMPLING = types_pb2.SamplingParams(temperature=0.5, seed=3, top_p=0.9)
STOP = types_pb2.StopConditions(max_tokens=5, stop_token_ids=[1])
WORK = types_pb2.WorkItem(request_id="r", prompt_ids=[1, 2], output_ids=[3], sampling=SAMPLING, stop=STOP)
DECODE = decode_pb2.DecodeRequest(work=WORK, source=decode_pb2.PROMPT_SOURCE_PUSHED, subscription=b"s" * 16, call=1)
TARGET = prefill_pb2.HandoffTarget(ticket=b"t" * 16, kv_endpoint="127.0.0.1:1", layout=layout_to_proto(LAYOUT))
PREFILL = prefill_pb2.PrefillRequest(work=WORK, target=TARGET)


@given(near(DECODE) | near(PREFILL) | messages(prefill_pb2.PrefillRequest))
def test_work(request: decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest) -> None:
    with held_to_contract():
        ModelLimits(320, 4096).check(work_from_proto(request.work))
    if isinstance(request, prefill_pb2.PrefillRequest):
        with held_to_contract():
            LAYOUT.check_ships_to(layout_from_proto(request.target.layout), ours="prefill", theirs="decode")


@given(messages(types_pb2.GeneratedToken))
def test_a_token(message: types_pb2.GeneratedToken) -> None:
    with held_to_contract():
        token_from_proto(message)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tiny_model)))


REQUEST = pb.GenerateRequest(request_id="r", prompt="Hello", sampling=SAMPLING, stop=STOP, stop_strings=["x"])


@given(
    request=near(REQUEST) | messages(pb.GenerateRequest) | messages(pb.TokenizeRequest),
    limits=st.builds(Limits, st.integers(1, 4096), st.none() | st.integers(0, 4096), st.none() | st.integers(0, 4096)),
)
def test_a_request(tokenizer: Tokenizer, request: Any, limits: Limits) -> None:
    admission = Admission(
        "tiny", tokenizer, vocab_size=320, config=RouterConfig(), limits=lambda: limits, defaults={"top_k": 5}
    )
    with held_to_contract():
        if isinstance(request, pb.TokenizeRequest):
            asyncio.run(admission.tokenize(request))
        else:
            admitted = asyncio.run(admission.admit(request))
            assert admitted.stop.max_tokens >= 1
            assert len(admitted.prompt_ids) + admitted.stop.max_tokens <= limits.max_model_tokens


ERRORS = st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])


@given(
    ERRORS,
    WIRE_TEXTS,
    mutated(st.binary(max_size=40)) | messages(Status).map(lambda status: status.SerializeToString()),
)
def test_an_error_of_a_peer(code: grpc.StatusCode, details: str, status: bytes) -> None:
    metadata = Metadata(("grpc-status-details-bin", status))
    with held_to_contract():
        to_status(from_rpc_error(AioRpcError(code, Metadata(), metadata, details)))


@given(messages(ExportTraceServiceRequest, depth=6), WIRE_TEXTS)
def test_spans_of_a_worker(request: ExportTraceServiceRequest, name: str) -> None:
    store = TraceStore(4)
    with held_to_contract():
        store.add(request.resource_spans)
        assert len(store) <= 4
    with held_to_contract():
        store.get(name)
