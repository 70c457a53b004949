"""What must stay between caller and model: marked, sent through real services that fail, and looked for everywhere."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from fake_engine import make_work
from services import Deployment

from pageferry.client import Client, PageferryError
from pageferry.runtime.convert_work import work_to_proto
from pageferry.v1 import decode_pb2, inference_pb2 as pb, page_pb2
from pageferry.v1.decode_pb2_grpc import DecodeServiceStub
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub
from pageferry.v1.page_pb2_grpc import PageServiceStub

pytestmark = pytest.mark.timeout(300)
PROMPT, SYSTEM, STOP, KEY, SALT = (f"marked-{name}-c0ffee" for name in ("prompt", "system", "stop", "key", "salt"))
MARKS = (PROMPT, SYSTEM, STOP, KEY, SALT)
IDS = [311, 298, 307, 301, 287, 319]
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
BODIES = (  # each is wrong for one of completions and chat completions, if not for both
    f'{{"prompt": "{PROMPT}',
    json.dumps({"prompt": f"{PROMPT}\ud800"}),
    json.dumps({"prompt": PROMPT, "stop": [STOP] * 1000}),
    json.dumps({"prompt": PROMPT, "max_tokens": 10**9}),
    json.dumps({"prompt": PROMPT, "temperature": -1}),
    json.dumps({"prompt": PROMPT * 5000}),
    json.dumps({"messages": CHAT, "prompt": PROMPT, "stop": {STOP: 1}}),
    json.dumps({"messages": [{"role": "user", "content": {"text": PROMPT}}]}),
)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with Deployment(prefill=1, decode=1, settings={"router.salt_key": SALT}) as made:
        yield made


def post(url: str, body: str) -> str:
    """What an error says; empty where there is none."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60):
            return ""
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


async def errors_over_http(http: str) -> list[str]:
    paths = ("/v1/completions", "/v1/chat/completions")
    said = [[await asyncio.to_thread(post, http + path, body) for path in paths] for body in BODIES]
    assert all(any(both) for both in said)
    return [text for both in said for text in both]


async def errors_over_grpc(client: Client) -> list[str]:
    found = []
    for prompt, options in (
        (PROMPT, {"temperature": -1.0}),
        (PROMPT * 5000, {}),
        (PROMPT, {"stop": [STOP] * 1000}),
        (PROMPT, {"model": "no-such-model"}),
        ([*IDS, 10**6], {}),
        ([{"role": SYSTEM, "content": PROMPT}], {"max_tokens": 10**7}),
    ):
        with pytest.raises(PageferryError) as caught:
            await client.generate(prompt, **options).result()  # type: ignore[arg-type]
        found.append(f"{caught.value.message} {caught.value.violations}")
    return found


async def misuse_a_ticket(address: str) -> tuple[bytes, str]:
    """A ticket, and what is said of it to somebody else."""
    async with grpc.aio.insecure_channel(address) as channel:
        work = work_to_proto(make_work("secret-ticket", IDS * 4))
        request = decode_pb2.DecodeRequest(work=work, source=decode_pb2.PROMPT_SOURCE_PUSHED)
        decode = DecodeServiceStub(channel).Decode(request)
        reserved = (await anext(aiter(decode))).reserved
        opening = page_pb2.Open(ticket=reserved.ticket, request_id="another", layout=reserved.layout)
        push = PageServiceStub(channel).Push(iter([page_pb2.PushRequest(open=opening)]))
        said = f"{await push.details()} {await push.trailing_metadata()}"
        decode.cancel()
    return reserved.ticket, said


async def test_marked_texts_and_secrets_are_in_no_log_span_metric_or_error(deployment: Deployment) -> None:
    (router,), (decode,) = deployment.routers, deployment.decode
    said: list[str] = []
    async with Client(router.address, api_key=KEY) as client:
        whole = await client.generate(CHAT, max_tokens=64, stop=STOP, temperature=0, ignore_eos=True).result()
        assert len(whole.text) > 40
        await client.generate(IDS, max_tokens=8, temperature=0).result()
        said += [*await errors_over_http(router.http), *await errors_over_grpc(client)]
        ticket, answer = await misuse_a_ticket(decode.address)
        said.append(answer)
        dying = client.generate(PROMPT, max_tokens=2000, temperature=0, ignore_eos=True)
        reader = aiter(dying)
        await anext(reader)
        decode.kill()
        with pytest.raises(PageferryError) as caught:
            async for _ in reader:
                pass
        said.append(caught.value.message)
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = InferenceServiceStub(channel)
            traces = [
                (await stub.GetTrace(pb.GetTraceRequest(id=trace_id))).traces_data
                for trace_id in (whole.trace_id, dying.trace_id)
            ]
            said.append(str(await stub.GetStatus(pb.GetStatusRequest())))
        metrics = await asyncio.to_thread(urllib.request.urlopen, f"{router.http}/metrics")
        said.append(metrics.read().decode())
    haystack = "\n".join([*said, deployment.output, *(trace.decode("latin-1") for trace in traces)])
    assert "request_id" in haystack and "pageferry.request" in haystack and len(haystack) > 10_000
    for mark in (*MARKS, whole.text, ", ".join(map(str, IDS[:4])), ticket.hex(), repr(ticket)[2:-1]):
        before, found, after = haystack.partition(mark)
        assert not found, f"…{before[-300:]}[{mark[:40]}]{after[:100]}…"
