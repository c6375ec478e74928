"""Calls a server with Triton's own clients and prints each call's result by its name.

    python -m tests.engines.triton_clients_script HTTP_ADDRESS GRPC_ADDRESS [mixed]

With `mixed` it prints the result of the function `mixed` instead. Addresses are `host:port`. The
output is the same for any server with the models of `triton_server.py`, real or not: ids are given
and times left out. It is a process of its own, because gevent, gRPC's threads and asyncio conflict
with a test's.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import queue
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.grpc.service_pb2 as messages
import tritonclient.grpc.service_pb2_grpc as service
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.live.stack import until

DECOUPLED, WHOLE, ECHO, KEPT = "tiny", "tiny_whole", "echo", "kept"
HEALTH = "/grpc.health.v1.Health/Check"
NOTHING = "/inference.GRPCInferenceService/Nothing"
WAIT_S = 30.0  # for what a server does
LARGE = 9 << 17  # elements: more bytes than gRPC's default limit
WORDS, LONG = 5, 2_000  # of answers, each of which takes 5 ms
ARRAYS: Mapping[str, np.ndarray[Any, Any]] = {
    "BYTES": np.array([["é".encode(), b"\0\xff"], [b"", b"x" * 70_000]], dtype=np.object_),
    "FP16": np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3),
    "BF16": np.array([[1.5, -2.0, 0.25]], dtype=ml_dtypes.bfloat16),
    "FP32": np.array([[np.pi, -0.0], [np.inf, 1e-45]], dtype=np.float32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], dtype=np.int64),
    "BOOL": np.array([[True, False]]),
}
Results = list[tuple[str, Any]]


@dataclass(slots=True)
class Tried:
    """One client library and the results of its calls. Lifetime: program."""

    name: str
    module: ModuleType
    client: Any
    json: Mapping[str, Any] = field(default_factory=dict)  # wishes JSON of calls
    results: Results = field(default_factory=list)

    @property
    def is_http(self) -> bool:
        return "http" in self.name

    async def ask(self, what: str, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Call a function, record its result or error, and return it."""
        found = await outcome(call, *given, **more)
        self.note(what, found)
        return found

    def note(self, what: str, found: Any) -> None:
        """Record the result of a call under its name."""
        self.results.append((f"{self.name}: {what}", plain(found)))

    def given(self, name: str, values: np.ndarray[Any, Any], kind: str, **more: Any) -> Any:
        """Return an input tensor with these values."""
        one = self.module.InferInput(name, list(values.shape), kind)
        return one.set_data_from_numpy(values, **more)

    def text(self, prompt: str, most: int = WORDS, stream: bool = False) -> list[Any]:
        """Return the input tensors of the text models."""
        return [
            self.given("text_input", np.array([prompt.encode()], dtype=np.object_), "BYTES"),
            self.given("max_tokens", np.array([most], dtype=np.int32), "INT32"),
            self.given("stream", np.array([stream]), "BOOL"),
        ]

    def echoed(self, kind: str = "FP32") -> list[Any]:
        """Return the input tensor of the model that returns its input."""
        return [self.given(f"IN_{kind}", ARRAYS[kind], kind)]

    def coded(self, coding: str | None) -> dict[str, Any]:
        """Return the client's arguments that compress a call with this coding."""
        if not self.is_http:
            return {"compression_algorithm": coding}
        return {f"{way}_compression_algorithm": coding for way in ("request", "response")}


async def outcome(call: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call a function; return its result or its error."""
    try:
        found = call(*given, **more)
        return await found if inspect.isawaitable(found) else found
    except InferenceServerException as error:
        return error


def plain(value: Any) -> Any:
    """Return the value as JSON types."""
    if isinstance(value, InferenceServerException):
        return [str(value.status()), value.message()]
    if hasattr(value, "get_response"):  # an answer and its tensors
        response = value.get_response()
        told = response if isinstance(response, dict) else told_by(response)
        names = [one["name"] for one in told.get("outputs", [])]
        return [told, {name: plain(value.as_numpy(name)) for name in names}]
    if isinstance(value, np.ndarray):
        data = value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def told_by(message: Any) -> Any:
    """Return a message as JSON types, without its tensors' raw bytes, which are recorded
    as arrays.
    """
    told = MessageToDict(message, preserving_proto_field_name=True)
    told.pop("raw_output_contents", None)
    return told


async def about_server(tried: Tried) -> None:
    """Call everything except inference: health, metadata, repository and so on."""
    client, ask = tried.client, tried.ask
    await ask("live", client.is_server_live)
    await ask("ready", client.is_server_ready)
    for model, version in ((ECHO, ""), (ECHO, "1"), (ECHO, "9"), ("absent", "")):
        of = f"{model} {version}"
        await ask(f"ready {of}", client.is_model_ready, model, version)
        await ask(f"metadata {of}", client.get_model_metadata, model, version, **tried.json)
        await ask(f"config {of}", client.get_model_config, model, version, **tried.json)
    await ask("config of text", client.get_model_config, DECOUPLED, **tried.json)
    await ask("no statistics", client.get_inference_statistics, "absent", **tried.json)
    index = await outcome(client.get_model_repository_index, **tried.json)
    rows = index["models"] if isinstance(index, dict) else index
    tried.note("index", sorted(rows, key=lambda row: row["name"]))
    server = await outcome(client.get_server_metadata, **tried.json)
    tried.note("metadata", sorted(server))


async def statistics(tried: Tried) -> None:
    """Record how many requests the server counted between two readings; servers take a moment to
    count.
    """
    before = (await counted(tried))[0]
    for _ in range(3):
        await outcome(tried.client.infer, ECHO, tried.echoed())

    async def all_are() -> bool:
        return (await counted(tried))[0] >= before + 3

    await until(all_are, "three requests to be counted")
    now = await counted(tried)
    tried.note("statistics", [now[0] - before, now[1:]])


async def counted(tried: Tried) -> tuple[int, list[str], list[str]]:
    """Return the number of answered requests and the names of the fields in the server's
    statistics.
    """
    told = await outcome(tried.client.get_inference_statistics, ECHO, "1", **tried.json)
    (row,) = told["model_stats"]
    stats, names = row["inference_stats"], sorted(name for name in row if row[name])
    return int(stats["success"].get("count", 0)), names, sorted(stats)


async def tensors(tried: Tried) -> None:
    """Send tensors of each type: whole, compressed, and larger than a default limit."""
    infer, output = tried.client.infer, tried.module.InferRequestedOutput
    for kind in ARRAYS:
        more = {"request_id": "7", "outputs": [output(f"OUT_{kind}")]}
        await tried.ask(f"echo {kind}", infer, ECHO, tried.echoed(kind), **more)
    every = [one for kind in ARRAYS for one in tried.echoed(kind)]
    for coding in (None, "gzip", "deflate"):
        await tried.ask(f"echo all, {coding}", infer, ECHO, every, "1", **tried.coded(coding))
    large = np.arange(LARGE, dtype=np.float32).reshape(3, -1)
    await tried.ask("large", infer, ECHO, [tried.given("IN_FP32", large, "FP32")])
    classes = [output("OUT_FP32", class_count=2)]
    await tried.ask("classes", infer, ECHO, tried.echoed(), outputs=classes)
    told = {"priority": 1, "timeout": 10_000_000, "parameters": {"a": 1, "b": "c", "d": True}}
    await tried.ask("parameters", infer, WHOLE, tried.text("What is it?"), **told)
    await tried.ask("no outputs", infer, ECHO, [])
    if tried.is_http:
        for kind in ("FP32", "INT64", "BOOL"):
            values = np.ones_like(ARRAYS[kind])
            one = [tried.given(f"IN_{kind}", values, kind, binary_data=False)]
            wanted = [output(f"OUT_{kind}", binary_data=False)]
            await tried.ask(f"JSON {kind}", infer, ECHO, one, outputs=wanted)


async def errors(tried: Tried) -> None:
    """Send invalid requests; each error must be the server's own."""
    infer, ask, text = tried.client.infer, tried.ask, tried.text("x")
    wrong = tried.given("text_input", np.array([1], dtype=np.int32), "INT32")
    flat = tried.given("IN_FP32", np.zeros(3, dtype=np.float32), "FP32")
    await ask("error: decoupled", infer, DECOUPLED, text)
    await ask("error: unknown model", infer, "absent", text)
    await ask("error: unknown version", infer, WHOLE, text, "9")
    await ask("error: no input", infer, WHOLE, [])
    await ask("error: another type", infer, WHOLE, [wrong, *text[1:]])
    await ask("error: another rank", infer, ECHO, [flat])
    await ask("error: unknown input", infer, WHOLE, [*text, *tried.echoed()])
    nothing = [tried.module.InferRequestedOutput("nothing")]
    await ask("error: unknown output", infer, WHOLE, text, outputs=nothing)


async def sequences(tried: Tried) -> None:
    """Send sequences whose sums only one server can know; each client uses its own sequence ids."""
    for id in (int(hashlib.sha256(tried.name.encode()).hexdigest()[:8], 16), f"of {tried.name}"):
        kind, sums = type(id).__name__, []
        for number, (values, flags) in enumerate(numbers(tried)):
            sums.append(await outcome(tried.client.infer, KEPT, values, sequence_id=id, **flags))
            tried.note(f"sequence {kind} {number}", sums[-1])
        assert all(not isinstance(one, InferenceServerException) for one in sums), sums
        assert [int(one.as_numpy("SUM")[0][0]) for one in sums] == [0, 1, 3, 6]
    values, _ = next(iter(numbers(tried)))
    await tried.ask("sequence without id", tried.client.infer, KEPT, values)


def numbers(tried: Tried) -> Iterable[tuple[list[Any], dict[str, bool]]]:
    """Yield the inputs and flags of one sequence's requests."""
    for number in range(4):
        values = [tried.given("VALUE", np.array([[number]], dtype=np.int32), "INT32")]
        yield values, {"sequence_start": number == 0, "sequence_end": number == 3}


STEPS: tuple[Callable[[Tried], Awaitable[None]], ...] = (
    about_server,
    tensors,
    errors,
    sequences,
    statistics,
)


class Streamed:
    """A stream of Triton's threaded gRPC client. Lifetime: one `with`."""

    def __init__(self, tried: Tried, **more: Any) -> None:
        self._tried, self._more = tried, more
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __enter__(self) -> Streamed:
        def callback(result: Any, error: Any) -> None:
            self._answers.put((result, error))

        self._tried.client.start_stream(callback, **self._more)
        return self

    def __exit__(self, *_: object) -> None:
        self._tried.client.stop_stream()

    def send(self, model: str, inputs: list[Any], id: str, **more: Any) -> None:
        """Send a request on the stream."""
        self._tried.client.async_stream_infer(model, inputs, request_id=id, **more)

    def take(self) -> Any:
        """Return the next answer or error."""
        result, error = self._answers.get(timeout=WAIT_S)
        return result if error is None else error

    def until(self, wanted: Callable[[Any], bool], count: int = 1) -> list[Any]:
        """Return all answers up to the `count`-th one for which `wanted` is true."""
        found: list[Any] = []
        while sum(map(wanted, found)) < count:
            found.append(self.take())
        return found


def is_final(answer: Any) -> bool:
    """Return whether the answer is the last one of its request."""
    if isinstance(answer, InferenceServerException):
        return True
    parameters = answer.get_response().parameters
    return bool(parameters["triton_final_response"].bool_param)


def is_error(answer: Any) -> bool:
    """Return whether the answer is an error."""
    return isinstance(answer, InferenceServerException)


def by_request(answers: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the answers of each request, in order."""
    found: dict[str, list[Any]] = {}
    for one in answers:
        told = plain(one)
        id = "" if is_error(one) else told[0].get("id", "")
        found.setdefault(id, []).append(told)
    return dict(sorted(found.items()))


def streams(tried: Tried) -> None:
    """Run streams: decoupled answers, many requests at once, sequences, and errors that do not end
    a stream.

    Decoupled and other models get separate streams: with both on one stream Triton 2.51 loses
    answers or crashes.
    """
    wanting = {"enable_empty_final_response": True}
    with Streamed(tried) as stream:
        stream.send(DECOUPLED, tried.text("One word after the other", stream=True), "a", **wanting)
        tried.note("stream", stream.until(is_final))
        stream.send(DECOUPLED, tried.text("All words at once"), "b", **wanting)
        tried.note("stream, one answer", stream.until(is_final))
        stream.send(DECOUPLED, tried.text("And its end untold", stream=True), "c")
        tried.note("stream, no empty final", [stream.take() for _ in range(WORDS)])
    with Streamed(tried, compression_algorithm="gzip") as stream:
        for serial in range(12):
            words = tried.text(f"Prompt {serial}", serial + 1, stream=True)
            stream.send(DECOUPLED, words, f"{serial:02}", **wanting)
        tried.note("stream, many at once", by_request(stream.until(is_final, 12)))
    with Streamed(tried) as stream:
        stream.send(ECHO, tried.echoed("BYTES"), "d")
        tried.note("stream, not decoupled", stream.until(is_final))
        stream.send("absent", tried.echoed(), "e")
        tried.note("stream, unknown model", stream.take())
        stream.send(WHOLE, [], "f")
        tried.note("stream, no input", stream.take())
        stream.send(ECHO, tried.echoed(), "")
        tried.note("stream, no id", stream.until(is_final))
        for serial in range(12):
            stream.send(WHOLE, tried.text(f"Prompt {serial}"), f"whole {serial:02}")
        tried.note("stream, whole at once", by_request(stream.until(is_final, 12)))
        for values, flags in numbers(tried):  # no request waits for the one before
            stream.send(KEPT, values, "sequence", sequence_id=77, **flags)
        tried.note("stream, sequence", stream.until(is_final, 4))
    half_closed(tried)
    ended(tried)


def half_closed(tried: Tried) -> None:
    """Check that requests sent before the client half-closes its stream are answered."""
    stub = service.GRPCInferenceServiceStub(tried.client._channel)
    asked = typed(DECOUPLED)
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    answers = list(stub.ModelStreamInfer(iter([asked]), timeout=WAIT_S))
    tried.note("stream, half closed", [MessageToDict(one) for one in answers])


def ended(tried: Tried) -> None:
    """Run streams that the client ends before their answers do."""
    long = tried.text("For long", LONG, stream=True)
    with Streamed(tried, stream_timeout=1.0) as stream:
        stream.send(DECOUPLED, long, "g")
        *said, error = stream.until(is_error)
        tried.note("stream, out of time", [bool(said), str(error.status())])
    with Streamed(tried) as stream:
        stream.send(DECOUPLED, long, "h")
        tried.note("stream, cancelled", stream.take())
        tried.client.stop_stream(cancel_requests=True)
    with Streamed(tried, headers={"triton_grpc_error": "true"}) as stream:
        stream.send("absent", tried.echoed(), "i")
        stream.send(ECHO, tried.echoed(), "j")
        tried.note("stream, refusals are no status", [stream.take(), stream.take()])
    wrong = tried.given("text_input", np.array([b"\xff"], dtype=np.object_), "BYTES")
    for headers in ({}, {"triton_grpc_error": "true"}):
        with Streamed(tried, headers=headers) as stream:
            stream.send(WHOLE, [wrong], "k")  # the error names a file of the server
            tried.note(f"stream, model's error {len(headers)}", str(stream.take().status()))


async def aio_streams(tried: Tried) -> None:
    """Run the same streams with the asyncio client."""

    async def asking() -> AsyncIterator[dict[str, Any]]:
        for serial in range(4):
            inputs = tried.text(f"Prompt {serial}")
            yield {"model_name": WHOLE, "inputs": inputs, "request_id": str(serial)}
        yield {"model_name": "absent", "inputs": tried.echoed(), "request_id": "4"}

    found = []
    async for result, error in tried.client.stream_infer(asking()):
        found.append(result if error is None else error)
    tried.note("stream", by_request(found))


def typed(model: str) -> Any:
    """Return a request with typed tensor contents in place of raw bytes, as clients other than
    Triton's write it.
    """
    request = messages.ModelInferRequest(model_name=model, id="typed")
    one = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    one.contents.bytes_contents.append(b"What is it?")
    most = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
    most.contents.int_contents.append(WORDS)
    return request


async def by_hand(tried: Tried) -> None:
    """Send requests that Triton's client never sends, built without it."""
    stub = service.GRPCInferenceServiceStub(tried.client._channel)

    def call(ask: Callable[..., Any], message: Any) -> Any:
        try:
            answer = ask(message, timeout=WAIT_S)
        except grpc.RpcError as error:
            return [str(error.code()), error.details()]
        return answer.hex() if isinstance(answer, bytes) else MessageToDict(answer)

    tried.note("typed", call(stub.ModelInfer, typed(WHOLE)))
    both = typed(WHOLE)
    both.raw_input_contents.append(b"x")
    tried.note("typed and raw", call(stub.ModelInfer, both))
    empty = messages.ModelInferRequest()
    tried.note("no model", call(stub.ModelInfer, empty))
    tried.note("version x", call(stub.ModelInfer, typed_version()))
    for rpc in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        for name, version in (("", ""), (ECHO, "x"), ("absent", "x")):
            if (rpc, name) != ("ModelStatistics", ""):
                message = getattr(messages, f"{rpc}Request")(name=name, version=version)
                tried.note(f"{rpc} {name} {version}", call(getattr(stub, rpc), message))
    index = messages.RepositoryIndexRequest(repository_name="x")
    tried.note("named repository", call(stub.RepositoryIndex, index))
    tried.note("health", call(tried.client._channel.unary_unary(HEALTH), b""))
    nothing = call(tried.client._channel.unary_unary(NOTHING), b"")
    tried.note("unknown method", nothing[0])


def typed_version() -> Any:
    """Return a request with an invalid model version."""
    request = typed(WHOLE)
    request.model_version = "x"
    return request


async def at_once(tried: Tried) -> None:
    """Run asynchronous calls of the clients that use threads or greenlets."""
    answers: queue.Queue[Any] = queue.Queue()
    asked = []
    for serial in range(6):
        given = (WHOLE, tried.text(f"Prompt {serial}"))
        if tried.is_http:
            asked.append(tried.client.async_infer(*given, request_id=str(serial)))
        else:
            callback = _put(answers)
            asked.append(tried.client.async_infer(*given, callback, request_id=str(serial)))
    if tried.is_http:
        found = [one.get_result() for one in asked]
    else:
        found = [answers.get(timeout=WAIT_S) for _ in asked]
    tried.note("at once", by_request(found))


def _put(answers: queue.Queue[Any]) -> Callable[[Any, Any], None]:
    return lambda result, error: answers.put(result if error is None else error)


def mixed(grpc_address: str) -> dict[str, list[Any]]:
    """Send requests of decoupled and other models on one stream; return their answers by id.

    This works only through the router: see `streams`.
    """
    with over_grpc.InferenceServerClient(grpc_address) as client:
        tried = Tried("grpc", over_grpc, client)
        with Streamed(tried) as stream:
            for serial in range(12):
                text = tried.text(f"Prompt {serial}", serial + 1, stream=True)
                stream.send(DECOUPLED, text, f"{serial:02}", enable_empty_final_response=True)
                stream.send(WHOLE, tried.text(f"Prompt {serial}"), f"whole {serial:02}")
            return by_request(stream.until(is_final, 24))


async def tried_all(http: str, grpc_address: str) -> Results:
    """Return the results of the calls of all clients."""
    results: Results = []
    as_json = {"as_json": True}
    for name, module, address, more in (
        ("http", over_http, http, {}),
        ("grpc", over_grpc, grpc_address, as_json),
        ("http aio", over_http_aio, http, {}),
        ("grpc aio", over_grpc_aio, grpc_address, as_json),
    ):
        client = module.InferenceServerClient(address)
        tried = Tried(name, module, client, more, results)
        for step in STEPS:
            await step(tried)
        if name in ("http", "grpc"):
            await at_once(tried)
        if name == "grpc":
            await by_hand(tried)
            streams(tried)
        if name == "grpc aio":
            await aio_streams(tried)
        closed = client.close()
        if inspect.isawaitable(closed):
            await closed
    return results


if __name__ == "__main__":
    http_address, grpc_at, *more = sys.argv[1:]
    got: Any = (
        list(mixed(grpc_at).items()) if more else asyncio.run(tried_all(http_address, grpc_at))
    )
    print(json.dumps(got))
