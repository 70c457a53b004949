"""The component mtls, alone, with edge and with gateway-picker: run as rendered, with certificates of its own kind."""

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import Authority
from cluster import generate, greedy, pageferry
from envoys import ANY_PORT, Change, Envoy, Places, edge_places, place_tls, placed, shipped
from manifests import Manifest, Workload, kustomized, named, of_kind, render, workloads
from pods import Pod, addresses_of, pods_of, services_of

from pageferry.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MOUNTED = "/etc/pageferry-tls"
NAME = "pageferry.internal"
PICKING = ("components/gateway-picker", "components/mtls")
BODY = {"prompt": [5] * 40, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secrets(objects: tuple[Manifest, ...], authority: Authority) -> dict[str, Path]:
    """What cert-manager would make, in a directory for each secret."""
    found = {}
    for certificate in of_kind(objects, "Certificate"):
        spec, name = certificate["spec"], certificate["metadata"]["name"]
        if not spec.get("isCA"):
            names = [f"DNS:{one}" for one in spec.get("dnsNames", [])] + [f"URI:{one}" for one in spec["uris"]]
            identity = authority.issue_for(name, names)
            found[spec["secretName"]] = authority.secret(authority.directory / spec["secretName"], identity)
    return found


def start(pods: Mapping[str, Pod], held: Mapping[str, Path], model: Path) -> None:
    """Each with its certificate, until each of its probes passes."""
    here = addresses_of(pods) | {"127.0.0.1:50051": pods["decode"].address(50051)}
    here |= {'"smollm2"': f'"{model}"', "kv_memory_mb = 512": "kv_memory_mb = 16"}
    for name, pod in pods.items():
        _, volume = pod.workload.mount_of(MOUNTED)
        changed = {"PAGEFERRY_ROUTER_PICKER_PORT": str(pods["beside"].ports[8080])} if name == "picker" else {}
        pod.start(here | {MOUNTED: str(held[volume["secret"]["secretName"]])}, **changed)
    for pod in pods.values():
        for probe, _ in pod.workload.probes:
            pod.wait_for(probe)


def options(secret: Path) -> tuple[str, ...]:
    """Of our command line."""
    files = (
        f"--{option}={secret / name}" for option, name in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
    )
    return (*files, f"--server-name={NAME}")


def channel(address: str, secret: Path) -> grpc.aio.Channel:
    files = ((secret / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    credentials = grpc.ssl_channel_credentials(*files)
    return grpc.aio.secure_channel(address, credentials, options=(("grpc.ssl_target_name_override", NAME),))


def scraped(address: str, secret: Path) -> str:
    """As Prometheus does."""
    context = ssl.create_default_context(cafile=str(secret / "ca.crt"))
    context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
    with httpx.Client(verify=context, timeout=60) as client:
        sni = {"sni_hostname": NAME}
        return client.get(f"https://{address}/metrics", extensions=sni).raise_for_status().text


def test_probes_need_no_certificate_and_calls_do(authority: Authority, tiny_model: Path) -> None:
    with pods_of(services_of("cpu+mtls"), authority.directory) as pods:
        held = secrets(render("cpu+mtls"), authority)
        start(pods, held, tiny_model)
        address = pods["router"].address(50051)
        assert pageferry("status", "--address", address).returncode != 0
        client = authority.issue_for("client", [f"URI:spiffe://{NAME}/client/test"])
        shown = options(authority.secret(authority.directory / "client", client))
        done = pageferry("generate", "--address", address, *shown, "--max-tokens", "4", "Hello")
        assert done.returncode == 0, done.stderr
        for pod in pods.values():
            text = scraped(pod.metrics, held["pageferry-prometheus-tls"])
            assert "pageferry_requests_total" in text


async def test_the_edge_ends_tls_and_shows_routers_a_certificate(authority: Authority, tiny_model: Path) -> None:
    objects = render("cpu+edge+mtls")
    (edge,) = [workload for workload in workloads("cpu+edge+mtls") if workload.role == "edge"]
    held = secrets(objects, authority)
    with pods_of(services_of("cpu+edge+mtls"), authority.directory) as pods:
        start(pods, held, tiny_model)
        grpc_port, http_port = (pods["router"].ports[port] for port in (50051, 8080))
        places = edge_places([f"127.0.0.1:{grpc_port}"], [f"127.0.0.1:{http_port}"])
        with Envoy("edge-mtls", {**places, **place_tls(held["pageferry-edge-tls"])}) as envoy:
            envoy.wait_healthy("routers-grpc", 1)
            envoy.wait_healthy("routers-http", 1)
            for _, probe in edge.probes:
                assert as_kubelet(probe["httpGet"], envoy.address("edge")) == 200
            ca = authority.cert.read_bytes()
            name = (("grpc.ssl_target_name_override", "pageferry-edge"),)
            credentials = grpc.ssl_channel_credentials(ca)
            async with grpc.aio.secure_channel(envoy.address("edge"), credentials, options=name) as opened:
                answer = await generate(InferenceServiceStub(opened), greedy([5] * 100, 4))
                assert len(answer.token_ids) == 4
            context = ssl.create_default_context(cafile=str(authority.cert))
            async with httpx.AsyncClient(verify=context, timeout=60) as client:
                url, sni = f"https://{envoy.address('edge')}/v1/completions", {"sni_hostname": "pageferry-edge"}
                assert (await client.post(url, json=BODY, extensions=sni)).status_code == 200


def as_kubelet(probe: Manifest, address: str) -> int:
    """The status that it gets; it checks no certificate."""
    assert probe["scheme"] == "HTTPS"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(f"https://{address}{probe['path']}", context=context, timeout=60) as answer:
        return int(answer.status)


async def test_a_gateway_with_its_certificate_asks_the_picker_and_calls_what_was_picked(
    authority: Authority, tiny_model: Path
) -> None:
    objects = kustomized("cpu", PICKING)
    held = secrets(objects, authority)
    found = {"prefill": ("prefill", 0), "decode": ("decode", 0), "beside": ("decode", 1), "picker": ("picker", 0)}
    containers = {
        name: Workload(named(objects, "Deployment", f"pageferry-{role}"), objects, number)
        for name, (role, number) in found.items()
    }
    with pods_of(containers, authority.directory) as pods:
        start(pods, held, tiny_model)
        places = {
            "0.0.0.0:8080": ANY_PORT,
            "pageferry-decode:8080": f"127.0.0.1:{pods['beside'].ports[8080]}",
            "pageferry-pickers:50051": f"127.0.0.1:{pods['picker'].ports[50051]}",
        }
        shown = with_certificates(place_tls(held["pageferry-gateway-tls"]))
        with Envoy("picker", places, change=shown) as gateway:
            gateway.wait_healthy("decode-routers", 1)
            gateway.wait_healthy("picker", 1)
            async with httpx.AsyncClient(base_url=f"http://{gateway.address('gateway')}", timeout=60) as client:
                response = await client.post("/v1/completions", json=BODY)
                assert response.status_code == 200, response.text
        metrics = {name: scraped(pod.metrics, held["pageferry-prometheus-tls"]) for name, pod in pods.items()}
        assert 'pageferry_picks_total{outcome="picked"} 1.0' in metrics["picker"]
        assert 'pageferry_requests_total{outcome="length"} 1.0' in metrics["beside"]
        picker = pods["picker"].address(50051)
        done = pageferry("status", "--address", picker, *options(held["pageferry-picker-tls"]))
        assert done.returncode == 0, done.stderr
        async with channel(picker, held["pageferry-prometheus-tls"]) as opened:
            call: Any = ExternalProcessorStub(opened).Process()
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


def with_certificates(places: Places) -> Change:
    """As docs/endpoint-picker.md says: what edge-mtls.yaml has for its clusters, in those of picker.yaml.

    And as much time to pick as a busy machine may need.
    """
    of = {one["name"]: one for one in shipped("edge-mtls")["static_resources"]["clusters"]}

    def change(document: Manifest) -> None:
        clusters = document["static_resources"]["clusters"]
        for cluster, like in zip(clusters, ("routers-http", "routers-grpc"), strict=True):
            cluster["transport_socket"] = placed(of[like]["transport_socket"], places)
        (listener,) = document["static_resources"]["listeners"]
        filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
        filters[1]["typed_config"]["message_timeout"] = "60s"

    return change


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("mtls", "edge"),
        ("mtls", "monitoring"),
        ("mtls", "gateway-picker"),
        ("tenants", "gateway-picker"),
        ("otel", "gateway-picker"),
    ],
)
def test_components_that_would_miss_one_are_refused(early: str, late: str) -> None:
    paths = ("../otel" if name == "otel" else f"components/{name}" for name in (early, late))
    with pytest.raises(AssertionError, match=f"list the component {early} after the component {late}"):
        kustomized("cpu", tuple(paths))
