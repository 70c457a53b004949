"""Nothing that comes from a file or a peer is run as code: the sources have no call that could."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("src/pageferry", "router", "prefill_svc", "decode_svc", "kernels", "bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "runpy",
    "code",
}
# Of multiprocessing, all but a connection's bytes are pickled.
MODULES |= {"multiprocessing.pool", "multiprocessing.queues", "multiprocessing.managers"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
PICKLED = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
}
SWITCHES = {"trust_remote_code", "allow_pickle", "shell"}


# A benchmark's server talks to a process of its own making.
ALLOWED = {
    "bench/peers/openvino_server.py": {
        f"calls {name}.recv, which unpickles" for name in ("connection", "self._connection", "ours")
    }
}


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {name.name}" for name in names if is_banned(name.name))
            case ast.ImportFrom(module=str(module), names=names):
                modules = {module, *(f"{module}.{name.name}" for name in names)}
                yield from (f"imports {name}" for name in modules if is_banned(name))
            case ast.Call():
                yield from call_findings(node)


def is_banned(module: str) -> bool:
    return module in MODULES or module.partition(".")[0] in MODULES


def call_findings(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in BUILTINS or name.removeprefix("builtins.") in BUILTINS:
        yield f"calls {name}"
    if name in PICKLED:
        wanted, value = PICKLED[name]
        given = keywords.get(wanted)
        if not (isinstance(given, ast.Constant) and given.value is value):
            yield f"calls {name} without {wanted}={value}"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "recv" and not call.args:
        yield f"calls {name}, which unpickles"
    for switch in SWITCHES & keywords.keys():
        value = keywords[switch]
        if not (isinstance(value, ast.Constant) and value.value is False):
            yield f"calls {name} with {switch}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path: Path) -> None:
    found = set(findings(path.read_text(encoding="utf-8")))
    assert found - ALLOWED.get(str(path.relative_to(ROOT)), set()) == set()


def test_all_sources_are_looked_at() -> None:
    seen = {path.resolve().relative_to(ROOT).parts[0] for path in SOURCES}
    assert seen >= {"src", "router", "prefill_svc", "decode_svc", "kernels", "bench"}
    assert len(SOURCES) > 150


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "from multiprocessing import managers",
        "from torch.package import x; torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "builtins.exec(text)",
        "compile(text, '', 'exec')",
        "connection.recv()",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_a_planted_call_is_found(planted: str) -> None:
    assert list(findings(planted))


@pytest.mark.parametrize(
    "fine", ["re.compile(text)", "torch.load(path, weights_only=True)", "socket.recv(1)", "load(1)"]
)
def test_what_only_looks_alike_is_not(fine: str) -> None:
    assert list(findings(fine)) == []
