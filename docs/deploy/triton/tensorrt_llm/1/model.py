"""A model for Triton's Python backend that forwards requests to warmroute-engine, with the tensors
and metrics of TensorRT-LLM's backend (docs/triton.md).

At most `max_inflight_requests` requests are in flight, each with a thread that streams the answer
from the engine. At this limit `execute` waits, so that more requests stay in Triton's queue, which
Triton bounds and counts. If a client disconnects, the model ends the request in the engine within
`cancellation_check_period_ms`. The model needs only the standard library and numpy.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import triton_python_backend_utils as pb_utils

START_S = 60.0  # longest wait for the engine to start
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SAMPLING = (
    ("temperature", "temperature"),
    ("runtime_top_k", "top_k"),
    ("runtime_top_p", "top_p"),
    ("random_seed", "seed"),
)
GAUGES = (
    ("nv_trt_llm_request_metrics", "request_type"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"),
    ("nv_trt_llm_general_metrics", "general_type"),
)


class EngineError(Exception):
    """The engine refused or did not answer a request; `code` is one of Triton's error codes."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    """An HTTP client of one warmroute-engine. Lifetime: model."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"engine_url {url!r}: expected http://HOST:PORT")
        self.url = url
        self._address = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection, for one request."""
        return http.client.HTTPConnection(*self._address, timeout=self._timeout_s)

    def get(self, path: str) -> Any:
        """Return the decoded JSON that the engine answers at a path."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def model(self) -> str:
        """Return the name of the engine's model. Wait up to `START_S` for the engine to start."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return self.get("/v1/models")["data"][0]["id"]
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > deadline_s:
                    message = f"no warmroute-engine at {self.url} after {START_S:g} s: {error}"
                    raise pb_utils.TritonModelException(message) from error
            time.sleep(0.2)


class Call:
    """One request at the engine. Lifetime: request; `end` is called once, as the last method."""

    def __init__(self, engine: Engine, sender: Any) -> None:
        self.cancelled = False
        self._sender = sender
        self._ended = False
        # Triton crashes if `is_cancelled` is called for a request after its last response.
        self._lock = threading.Lock()
        self._engine = engine
        self._connection = engine.connect()

    def send(self, part: Any) -> None:
        """Send a part of the answer to the client."""
        self._sender.send(part)

    def end(self, error: EngineError | None = None) -> None:
        """Send the last response to the client: an error response if `error` is not None."""
        with self._lock:
            self._ended = True
            if error is None:
                self._sender.send(flags=FINAL)
            else:
                fail(self._sender, error)

    def has_left(self) -> bool:
        """Return whether the client cancelled the request before its last response."""
        with self._lock:
            return not self._ended and self._sender.is_cancelled()

    def cancel(self) -> None:
        """Close the connection to the engine, which then cancels the request."""
        self.cancelled = True
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of the engine's stream. Raises EngineError."""
        try:
            self._connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            if self.cancelled:  # the cancellation came before the socket existed
                raise ConnectionAbortedError("the client has left")
            reply = self._connection.getresponse()
            if reply.status != 200:
                raise refusal(reply.status, reply.read())
            for line in reply:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"warmroute-engine at {self._engine.url}: {error}"
            raise EngineError(message, pb_utils.TritonError.UNAVAILABLE) from error
        finally:
            self._connection.close()
        message = f"warmroute-engine at {self._engine.url} ended the answer early"
        raise EngineError(message, pb_utils.TritonError.UNAVAILABLE)


class TritonPythonModel:
    """The class that Triton's Python backend instantiates. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Find the engine, and start the threads that check cancellations and update gauges."""
        config = json.loads(args["model_config"])
        parameters = {name: one["string_value"] for name, one in config["parameters"].items()}
        url = os.environ.get("WARMROUTE_ENGINE_URL") or parameters["engine_url"]
        self._engine = Engine(url, float(parameters["engine_timeout_s"]))
        self._model = self._engine.model()
        self._places = threading.BoundedSemaphore(int(parameters["max_inflight_requests"]))
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._gauges = Gauges(args["model_name"], args["model_version"])
        for work, period in (
            (self._look_after_cancels, "cancellation_check_period_ms"),
            (self._look_after_gauges, "stats_check_period_ms"),
        ):
            period_s = float(parameters[period]) / 1e3
            threading.Thread(target=work, args=(period_s,), daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request. Wait while `max_inflight_requests` are in flight."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                body, wants = engine_body(request, self._model)
            except EngineError as error:
                fail(sender, error)
                continue
            self._places.acquire()
            call = Call(self._engine, sender)
            with self._lock:
                self._calls.add(call)
            # A thread that is still running when Triton stops must not block the stop.
            threading.Thread(target=self._answer, args=(call, body, wants), daemon=True).start()

    def finalize(self) -> None:
        """Cancel all requests in flight."""
        self._ended.set()
        for call in self._in_flight():
            call.cancel()

    def _in_flight(self) -> list[Call]:
        with self._lock:
            return list(self._calls)

    def _answer(self, call: Call, body: dict[str, Any], wants: dict[str, bool]) -> None:
        try:
            self._stream(call, body, wants)
        except (EngineError, LookupError, TypeError) as raised:
            error = raised
            if not isinstance(error, EngineError):
                message = f"warmroute-engine's answer cannot be read: {raised!r}"
                error = EngineError(message, pb_utils.TritonError.INTERNAL)
            call.end(None if call.cancelled else error)
        finally:
            with self._lock:
                self._calls.discard(call)
            self._places.release()

    def _stream(self, call: Call, body: dict[str, Any], wants: dict[str, bool]) -> None:
        texts: list[str] = []
        ids: list[int] = []
        usage: dict[str, Any] = {}
        for event in call.events(body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts.append(choice["text"])
                ids += choice["token_ids"]
            if wants["stream"] and ids:
                call.send(response(texts, ids))
                texts, ids = [], []
        if wants["metrics"]:
            call.send(response(texts, ids, usage, self._gauges.tokens_per))
        elif not wants["stream"]:
            call.send(response(texts, ids))
        call.end()

    def _look_after_cancels(self, period_s: float) -> None:
        while not self._ended.wait(period_s):
            for call in self._in_flight():
                if not call.cancelled and call.has_left():
                    call.cancel()

    def _look_after_gauges(self, period_s: float) -> None:
        path = f"/v2/models/{quote(self._model, safe='')}/stats"
        while True:
            # While the engine does not answer, the gauges keep their last values.
            with suppress(OSError, http.client.HTTPException, ValueError, LookupError):
                self._gauges.show(self._engine.get(path)["model_stats"][0]["scheduler"])
            if self._ended.wait(period_s):
                return


class Gauges:
    """The engine's figures as gauges with the names of TensorRT-LLM's backend. Lifetime: model."""

    def __init__(self, model: str, version: str) -> None:
        gauge = pb_utils.MetricFamily.GAUGE
        self._families = [pb_utils.MetricFamily(name, name, gauge) for name, _ in GAUGES]
        self._labels = {"model": model, "version": version}
        self._metrics: dict[tuple[int, str], Any] = {}
        self.tokens_per = 1

    def show(self, scheduler: dict[str, Any]) -> None:
        """Set the gauges to the scheduler statistics that the engine reports."""
        blocks = scheduler["kv_blocks"]
        self.tokens_per = blocks["tokens_per"]
        active, scheduled = scheduler["active"], scheduler["scheduled"]
        requests = {"active": active, "scheduled": scheduled, "max": scheduler["max"]}
        requests["waiting"] = max(0, active - scheduled)
        shown = blocks | {"fraction": blocks["used"] / blocks["max"]}
        steps = {"iteration_counter": scheduler["iteration_counter"]}
        for family, values in enumerate((requests, shown, steps)):
            for kind, value in values.items():
                self._metric(family, kind).set(value)

    def _metric(self, family: int, kind: str) -> Any:
        found = self._metrics.get((family, kind))
        if found is None:
            labels = self._labels | {GAUGES[family][1]: kind}
            found = self._metrics[family, kind] = self._families[family].Metric(labels)
        return found


def engine_body(request: Any, model: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the body of the engine's API for a request, and the options `stream` and `metrics` of
    the answer. Raises EngineError.
    """
    ids, text = values(request, "input_ids"), values(request, "text_input")
    if (ids is None) == (text is None):
        raise invalid("give either text_input or input_ids")
    if text is not None and len(text) != 1:
        raise invalid("text_input must be one text")
    prompt = ids.tolist() if text is None else text[0].decode(errors="replace")
    body = {"model": model, "prompt": prompt, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    limit = one(request, "max_tokens", one(request, "request_output_len"))
    if limit is not None:
        body["max_tokens"] = limit
    for name, field in SAMPLING:
        if (value := one(request, name)) is not None:
            body[field] = value
    if (stops := values(request, "stop_words")) is not None and len(stops):
        body["stop"] = [stop.decode(errors="replace") for stop in stops]
    stream = one(request, "stream", one(request, "streaming", False))
    return body, {"stream": stream, "metrics": one(request, "return_perf_metrics", False)}


def values(request: Any, name: str) -> Any:
    """Return the values of an input tensor as a flat array, or None if the request lacks it."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy().reshape(-1)


def one(request: Any, name: str, default: Any = None) -> Any:
    """Return the single value of an input tensor. Raises EngineError if it has several values."""
    found = values(request, name)
    if found is None:
        return default
    if len(found) != 1:
        raise invalid(f"{name} must have one value, got {len(found)}")
    return found[0].item()


def response(
    texts: list[str], ids: list[int], usage: dict[str, Any] | None = None, tokens_per: int = 1
) -> Any:
    """Return a response with a part of an answer, or with the complete answer."""
    tensors = [
        pb_utils.Tensor("text_output", np.array([["".join(texts).encode()]], dtype=np.object_)),
        pb_utils.Tensor("output_ids", np.array([ids], dtype=np.int32)),
        pb_utils.Tensor("sequence_length", np.array([[len(ids)]], dtype=np.int32)),
    ]
    if usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        for name, value in (
            ("kv_cache_reused_blocks", cached // tokens_per),
            ("num_input_tokens", usage["prompt_tokens"]),
            ("num_output_tokens", usage["completion_tokens"]),
        ):
            tensors.append(pb_utils.Tensor(name, np.array([[value]], dtype=np.int32)))
    return pb_utils.InferenceResponse(tensors)


def refusal(status: int, body: bytes) -> EngineError:
    """Return the error for a request that the engine refused."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"warmroute-engine answered {status}"
    error = pb_utils.TritonError
    codes = {400: error.INVALID_ARG, 404: error.NOT_FOUND, 503: error.UNAVAILABLE}
    return EngineError(message, codes.get(status, error.INTERNAL))


def invalid(message: str) -> EngineError:
    """Return the error for an invalid request."""
    return EngineError(message, pb_utils.TritonError.INVALID_ARG)


def fail(sender: Any, error: EngineError) -> None:
    """Send an error as the last response of a request."""
    failure = pb_utils.TritonError(str(error), error.code)
    sender.send(pb_utils.InferenceResponse(error=failure), flags=FINAL)
