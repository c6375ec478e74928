"""Sends a bounded load to servers, and measures service times with it. The load is a closed loop: a
fixed number of requests run at a time, and each is followed by the next. It is sent only to
loopback and to hosts that the operator allowed by name.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from engine.wire.events import WireError
from router.doctor.clients import counted
from router.doctor.evidence import SizeTime, sizes_between
from router.doctor.readings import ExaminedServer, Reading, Tensor, TritonModelConfig
from router.doctor.report import DoctorError
from router.engines.adapter import fetch

MAX_ANSWER_BYTES = 16 << 20
WARM_UP = 2  # requests that are not measured: a Python model's first take ten times as long
STAGE_ROUNDS = 6  # requests that each concurrent client sends in a stage
_FREE_DIMENSION = 16  # size that is used for a dimension of variable size
_OUTPUT_TOKENS = 16
_PROMPT = "What makes a batch?"
_FLOATS, _STRING, _BOOL = ("TYPE_FP32", "TYPE_FP64"), "TYPE_STRING", "TYPE_BOOL"


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The limits of the load that the doctor sends to one server."""

    requests: int = 500
    concurrency: int = 8
    seconds: float = 30.0
    hosts: tuple[str, ...] = ()  # besides loopback
    model: str | None = None
    body: bytes | None = None  # instead of one made of the model's inputs


@dataclass(slots=True)
class StageResult:
    """The results of the requests that the probe sent at one concurrency. Lifetime: one stage of
    the probe.
    """

    answered: int = 0
    failed: int = 0
    seconds: float = 0.0  # of all answers
    errors: dict[str, int] = field(default_factory=dict)


def check_allowed(url: str, hosts: tuple[str, ...]) -> None:
    """Raise DoctorError if no load may be sent to this server."""
    host = urlsplit(url).hostname or ""
    try:
        own = ip_address(host).is_loopback
    except ValueError:
        own = host == "localhost"
    if not own and host not in hosts:
        raise DoctorError(
            f"--probe sends load, and {host} is another machine: --allow-host {host} allows it"
        )


class LoadProbe:
    """Sends load to one server. Lifetime: one examination."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        server: ExaminedServer,
        limits: ProbeLimits,
        clock: Callable[[], float],
    ) -> None:
        """Prepare the request to send. Raises DoctorError if no load may be sent to this server, or
        if the doctor has no request for the model.
        """
        check_allowed(server.url, limits.hosts)
        self.model = limits.model or _entry(server)
        self.config = server.configs.get(self.model, TritonModelConfig(name=self.model))
        if limits.model is not None and limits.model not in (*server.configs, *server.models):
            raise DoctorError(f"{server.url} has no model {limits.model!r}")
        path, body = _request(server, self.config)
        self._url = server.url + path
        self._body = body if limits.body is None else limits.body
        if not self._body:
            raise DoctorError(
                f"no request can be made up for {self.model} of {server.url}: --probe-body FILE"
            )
        self._http, self._clock = http, clock
        self._limits, self._left = limits, limits.requests
        self._end_s = clock() + limits.seconds
        self.latencies: dict[int, float] = {}  # mean of an answer by concurrency
        self.total = StageResult()

    async def measure(self, read: Callable[[], Awaitable[Reading]]) -> dict[str, Any]:
        """Measure how long batches of each size take, at concurrency 1, 2, 4 and so on. Use half of
        the allowed requests, so that half are left for `load`. Raises DoctorError if the server
        fails.
        """
        kept = self._limits.requests // 2
        await self.stage(1, WARM_UP)
        sums: dict[int, tuple[int, float]] = {}
        before, concurrency = await read(), 1
        while self._left > kept and concurrency <= self._limits.concurrency:
            most = min(STAGE_ROUNDS * concurrency, self._left - kept)
            sent = await self.stage(concurrency, most)
            after = await read()
            for one in _between(before, after, self.model):
                count, seconds = sums.get(one.batch, (0, 0.0))
                sums[one.batch] = count + one.count, seconds + one.count * one.seconds
            if sent.answered:
                self.latencies[concurrency] = sent.seconds / sent.answered
            before, concurrency = after, 2 * concurrency
        sizes = [
            {"batch": batch, "count": count, "seconds": seconds / count}
            for batch, (count, seconds) in sorted(sums.items())
        ]
        config = self.config
        return {
            "model": self.model,
            "max_batch_size": config.max_batch_size,
            "instances": config.instances,
            "sizes": sizes,
        }

    async def load(self) -> None:
        """Send all remaining requests, until a limit is reached or the task is cancelled."""
        await self.stage(self._limits.concurrency, self._left)

    async def stage(self, concurrency: int, requests: int) -> StageResult:
        """Send `requests` requests, `concurrency` at a time. Send fewer if a limit is reached."""
        sent = StageResult()
        budget = [min(requests, self._left)]

        async def client() -> None:
            while budget[0] > 0 and self._left > 0 and self._clock() < self._end_s:
                budget[0] -= 1
                self._left -= 1
                await self._one(sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return sent

    async def _one(self, sent: StageResult) -> None:
        begun_s = self._clock()
        timeout = aiohttp.ClientTimeout(total=max(self._end_s - begun_s, 0.1))
        try:
            reply = await fetch(
                self._http, self._url, timeout, MAX_ANSWER_BYTES, "POST", self._body
            )
            said = "" if reply.status == 200 else reply.body.decode("utf-8", "replace")
            good = reply.status == 200
        except (WireError, aiohttp.ClientError, TimeoutError, OSError) as error:
            said, good = str(error), False
        for some in (sent, self.total):
            if good:
                some.answered += 1
                some.seconds += self._clock() - begun_s
            else:
                some.failed += 1
                for key, count in (counted([said]) or {"other": 1}).items():
                    some.errors[key] = some.errors.get(key, 0) + count

    def shown(self) -> Mapping[str, Any]:
        """Return the results of the probe for the report."""
        total = self.total
        return {
            "url": self._url,
            "answered": total.answered,
            "failed": total.failed,
            "errors": dict(total.errors),
            "latency_ms": {str(k): round(v * 1e3, 3) for k, v in self.latencies.items()},
        }


def _between(before: Reading, after: Reading, model: str) -> tuple[SizeTime, ...]:
    if model not in before.stats or model not in after.stats:
        return ()
    return sizes_between(before.stats[model], after.stats[model])


def _entry(server: ExaminedServer) -> str:
    """Return the model that clients call: a model that is no step of another model, preferably an
    ensemble.
    """
    steps = {step for config in server.configs.values() for step in config.steps}
    whole = [name for name in server.configs if name not in steps]
    first = [name for name in whole if server.configs[name].steps]
    for name in (*first, *whole, *server.models):
        return name
    raise DoctorError(f"{server.url} has no model to probe; give --probe-model")


def _request(server: ExaminedServer, config: TritonModelConfig) -> tuple[str, bytes]:
    """Return the path and body of one request for the model; the body is empty if the doctor has no
    request for it.
    """
    if server.kind != "triton":
        body = {"model": config.name, "prompt": _PROMPT, "max_tokens": _OUTPUT_TOKENS}
        return "/v1/completions", msgspec.json.encode(body)
    path = f"/v2/models/{quote(config.name, safe='')}"
    steps = [server.configs[step] for step in config.steps if step in server.configs]
    streams = any(one.model_transaction_policy.decoupled for one in (config, *steps))
    wanted = [tensor for tensor in config.input if not tensor.optional]
    values = {tensor.name: _values(tensor) for tensor in wanted}
    if any(value is None for value in values.values()):
        return f"{path}/infer", b""
    if streams:
        flat = {name: v[0] if v and len(v) == 1 else v for name, v in values.items()}
        return f"{path}/generate_stream", msgspec.json.encode(flat)
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.data_type.removeprefix("TYPE_").replace("STRING", "BYTES"),
            "shape": [1] * (config.max_batch_size > 0) + _shape(tensor),
            "data": values[tensor.name],
        }
        for tensor in wanted
    ]
    return f"{path}/infer", msgspec.json.encode({"inputs": inputs})


def _shape(tensor: Tensor) -> list[int]:
    return [_FREE_DIMENSION if size < 0 else size for size in tensor.dims]


def _values(tensor: Tensor) -> list[Any] | None:
    """Return the values of an input tensor as a flat list, or None if JSON cannot hold its type or
    there would be too many values.
    """
    size, kind = math.prod(_shape(tensor)), tensor.data_type
    if size > 1 << 16 or kind in ("TYPE_FP16", "TYPE_BF16", ""):
        return None
    if kind == _STRING:
        return [_PROMPT] * size
    if kind == _BOOL:
        return [False] * size
    if kind in _FLOATS:
        return [0.5] * size
    long = tensor.name in ("max_tokens", "request_output_len", "sampling_param_max_tokens")
    return [_OUTPUT_TOKENS if long else 1] * size
