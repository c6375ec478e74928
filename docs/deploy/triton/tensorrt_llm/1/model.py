"""Triton's side of warmroute-engine, in the shape of TensorRT-LLM's backend (docs/triton.md).

A request takes a place, of which there are `max_inflight_requests`, and a thread that streams its
answer from the engine. Where no place is free `execute` waits, so that the rest stays in Triton's
queue, which is bounded and counted. A request whose client left is ended in the engine within
`cancellation_check_period_ms`. Only the standard library and numpy are needed.
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

START_S = 60.0  # for the engine to be there
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
    """The engine refused a request, or did not answer it; `code` is Triton's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    """warmroute-engine at an address. Lifetime: model."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"engine_url {url!r}: expected http://HOST:PORT")
        self.url = url
        self._address = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s

    def connect(self) -> http.client.HTTPConnection:
        """A connection of one request's own."""
        return http.client.HTTPConnection(*self._address, timeout=self._timeout_s)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def model(self) -> str:
        """The name of its model, as soon as it has started."""
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
    """One request at the engine. Lifetime: request; `end` once, and nothing after it."""

    def __init__(self, engine: Engine, sender: Any) -> None:
        self.cancelled = False
        self._sender = sender
        self._ended = False
        # Triton crashes if it is asked about a request that has just had its last response.
        self._lock = threading.Lock()
        self._engine = engine
        self._connection = engine.connect()

    def send(self, part: Any) -> None:
        """Sends a part of the answer."""
        self._sender.send(part)

    def end(self, error: EngineError | None = None) -> None:
        """Sends the end, with the error that there was."""
        with self._lock:
            self._ended = True
            if error is None:
                self._sender.send(flags=FINAL)
            else:
                fail(self._sender, error)

    def has_left(self) -> bool:
        """Whether its client was the first to end it."""
        with self._lock:
            return not self._ended and self._sender.is_cancelled()

    def cancel(self) -> None:
        """Ends it: the engine sees its client leave."""
        self.cancelled = True
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What the engine streams. Raises EngineError."""
        try:
            self._connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            if self.cancelled:  # before there was a socket to end
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
    """What Triton calls. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Finds the engine, and starts to look after cancelled requests and gauges."""
        config = json.loads(args["model_config"])
        told = {name: one["string_value"] for name, one in config["parameters"].items()}
        url = os.environ.get("WARMROUTE_ENGINE_URL") or told["engine_url"]
        self._engine = Engine(url, float(told["engine_timeout_s"]))
        self._model = self._engine.model()
        self._places = threading.BoundedSemaphore(int(told["max_inflight_requests"]))
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._gauges = Gauges(args["model_name"], args["model_version"])
        for work, period in (
            (self._look_after_cancels, "cancellation_check_period_ms"),
            (self._look_after_gauges, "stats_check_period_ms"),
        ):
            period_s = float(told[period]) / 1e3
            threading.Thread(target=work, args=(period_s,), daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Begins to answer each; waits for a place where all are taken."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                body, wants = asked(request, self._model)
            except EngineError as error:
                fail(sender, error)
                continue
            self._places.acquire()
            call = Call(self._engine, sender)
            with self._lock:
                self._calls.add(call)
            # A thread that is still at it when Triton ends must not keep it.
            threading.Thread(target=self._answer, args=(call, body, wants), daemon=True).start()

    def finalize(self) -> None:
        """Gives up what is in flight."""
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
            # An engine that is gone leaves its last figures, as a frozen one does.
            with suppress(OSError, http.client.HTTPException, ValueError, LookupError):
                self._gauges.show(self._engine.get(path)["model_stats"][0]["scheduler"])
            if self._ended.wait(period_s):
                return


class Gauges:
    """The engine's figures under the names of TensorRT-LLM's backend. Lifetime: model."""

    def __init__(self, model: str, version: str) -> None:
        gauge = pb_utils.MetricFamily.GAUGE
        self._families = [pb_utils.MetricFamily(name, name, gauge) for name, _ in GAUGES]
        self._labels = {"model": model, "version": version}
        self._metrics: dict[tuple[int, str], Any] = {}
        self.tokens_per = 1

    def show(self, scheduler: dict[str, Any]) -> None:
        """What the engine says of its scheduler."""
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


def asked(request: Any, model: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """The engine's body for a request, and what is wanted of the answer. Raises EngineError."""
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
    """An input, flat; None: it is not there."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy().reshape(-1)


def one(request: Any, name: str, default: Any = None) -> Any:
    """The only value of an input. Raises EngineError."""
    found = values(request, name)
    if found is None:
        return default
    if len(found) != 1:
        raise invalid(f"{name} must have one value, got {len(found)}")
    return found[0].item()


def response(
    texts: list[str], ids: list[int], usage: dict[str, Any] | None = None, tokens_per: int = 1
) -> Any:
    """A part of an answer, or all of it."""
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
    """What the engine says of a request that it does not take."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"warmroute-engine answered {status}"
    error = pb_utils.TritonError
    codes = {400: error.INVALID_ARG, 404: error.NOT_FOUND, 503: error.UNAVAILABLE}
    return EngineError(message, codes.get(status, error.INTERNAL))


def invalid(message: str) -> EngineError:
    """The request is wrong."""
    return EngineError(message, pb_utils.TritonError.INVALID_ARG)


def fail(sender: Any, error: EngineError) -> None:
    """Ends a request with an error."""
    told = pb_utils.TritonError(str(error), error.code)
    sender.send(pb_utils.InferenceResponse(error=told), flags=FINAL)
