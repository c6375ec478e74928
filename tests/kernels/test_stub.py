"""Tests that the committed stub, the built module and the Python versions have the same
signatures.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np

import kvkernels
from kvkernels import _native
from tests.oracles import columns as column_twins
from tests.oracles import index as twins
from tests.oracles import media as media_twin
from tests.oracles import mirror as mirror_twin
from tests.oracles import prefix_owners as prefix_owners_twin
from tests.oracles import trunks as trunks_twin
from tests.oracles import virtual_worker as virtual
from tests.oracles import worker_blocks as blocks_file_twin
from tests.oracles import worker_blocks as event_twins

FOLDER = Path(kvkernels.__file__).parent
STUB = ast.parse((FOLDER / "_native.pyi").read_text())
RELAY = ast.parse((FOLDER / "_native_relay.pyi").read_text())  # its twin is the router's relay

# These have no twin here. `router.body.scan` and `router.http.parser` check the first two lines,
# `policies.warmset` and numpy (`tests/router/core/sessions/test_session_weights.py`) the two after
# them, and functions in `tests/oracles/answers.py` the last line.
NO_TWIN = {
    *("plain_head", "reply_head", "scan_request", "PlainHead", "PromptText"),
    *("body_fields", "json_items", "json_text", "token_ids"),
    "SessionWeights",
    "WarmsetCosts",
    *("AnswerDue", "AnswerJudge", "late_failure"),
}

Scope = ast.Module | ast.ClassDef


def twin_of(name: str) -> Any:
    """Return the plain-Python class of the same name; for the virtual worker, it drives the
    engine's scheduler.
    """
    others = {
        "VirtualWorker": virtual,
        "Mirror": mirror_twin,
        "PrefixOwners": prefix_owners_twin,
        "Trunk": trunks_twin,
        "Trunks": trunks_twin,
        "EventBatch": event_twins,
        "FrozenBlocks": blocks_file_twin,
        "HybridWorkers": event_twins,
        "WorkerBlocks": event_twins,
        "drain_queues": column_twins,
        "media_chain_hashes": media_twin,
        "missing_tokens": column_twins,
        "cheapest": column_twins,
        "hit_tokens": column_twins,
        "load_tokens": column_twins,
        **dict.fromkeys(("leading", "median_product", "sum_of", "sum_of_least"), column_twins),
    }
    return getattr(others.get(name, twins), name)


def made(owner: Any) -> Any:
    """Return an instance of `owner`, as small as possible."""
    if owner.__name__ == "EventBatch":
        return owner(bytes.fromhex("920190"))
    if owner.__name__ == "WorkerBlocks":
        index = twins if owner is event_twins.WorkerBlocks else _native
        return owner(index.PrefixIndex(1), 0, 16, "m")
    if owner.__name__ == "Trunk":  # two prompts that share a head make a trunk
        trunks = trunks_twin.Trunks() if owner is trunks_twin.Trunk else _native.Trunks()
        trunks.arrival(np.arange(16, dtype=np.uint64), 16, 256, 16, 16, 0.0)
        return trunks.table()[0]
    return owner(1)


def functions(scope: Scope) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}


def classes(*stubs: ast.Module) -> list[ast.ClassDef]:
    bodies = [stub.body for stub in stubs or (STUB,)]
    return [node for body in bodies for node in body if isinstance(node, ast.ClassDef)]


def twinned() -> list[ast.ClassDef]:
    return [node for node in classes() if node.name not in NO_TWIN]


def is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) == "property" for mark in function.decorator_list)


def public_names(owner: Any) -> set[str]:
    own = {"__init__", "__len__"} if inspect.isclass(owner) else set()
    if inspect.isclass(owner) and not hasattr(owner.__init__, "__nb_signature__"):
        own.remove("__init__")  # only other code makes instances
    return {name for name in vars(owner) if name in own or not name.startswith("_")}


def native_signature(member: Any) -> str:
    """Return the signature that the build gave to nanobind, with the spacing of `ast`."""
    return ast.unparse(ast.parse(f"{member.__nb_signature__[0][0]}: ..."))


def stub_signature(function: ast.FunctionDef) -> str:
    return ast.unparse(function).removeprefix("@staticmethod\n")


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def stub_parameters(function: ast.FunctionDef) -> list[tuple[str, Any]]:
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    missing = [inspect.Parameter.empty] * (len(names) - len(defaults))
    by_keyword = [
        (argument.arg, inspect.Parameter.empty if default is None else ast.literal_eval(default))
        for argument, default in zip(
            function.args.kwonlyargs, function.args.kw_defaults, strict=True
        )
    ]
    return [*zip(names, missing + defaults, strict=True), *by_keyword]


def test_the_stub_has_the_same_names_as_the_module() -> None:
    stubbed = set(functions(STUB)) | {node.name for node in classes(STUB, RELAY)}
    assert public_names(_native) == stubbed
    for node in classes():
        assert public_names(getattr(_native, node.name)) == set(functions(node))


def test_the_stub_has_the_same_signatures_as_the_module() -> None:
    pairs: list[tuple[Scope, Any]] = [(STUB, _native)]
    for scope, owner in [
        *pairs,
        *((c, getattr(_native, c.name)) for c in classes()),
    ]:
        for name, function in functions(scope).items():
            if name == "__len__" or is_property(function):
                continue  # nanobind writes these two by itself, without our types' names
            assert native_signature(getattr(owner, name)) == stub_signature(function)


def test_the_stub_has_the_same_parameters_as_the_python_version() -> None:
    pairs: list[tuple[Scope, Any]] = [(STUB, twins)]
    for scope, owner in [*pairs, *((c, twin_of(c.name)) for c in twinned())]:
        for name, function in functions(scope).items():
            if not is_property(function) and name not in NO_TWIN:
                twin = twin_of(name) if owner is twins else getattr(owner, name)
                assert parameters(twin) == stub_parameters(function), name


def test_the_python_version_has_the_same_properties() -> None:
    for node in twinned():
        if not any(is_property(function) for function in functions(node).values()):
            continue
        twin, native = made(twin_of(node.name)), made(getattr(_native, node.name))
        for name, function in functions(node).items():
            if is_property(function):
                wanted = {"int": int, "float": float, "bool": bool}[
                    ast.unparse(function.returns or STUB)
                ]
                assert type(getattr(twin, name)) is type(getattr(native, name)) is wanted
