"""Lists the 39 causes of a pool that does not batch, in order, and judges which of them hold. The
first causes are about where requests wait: in Triton's own scheduler, in a step before the engine,
or in the engine's memory or budget. Then come errors, then clients and the pool, and last what
needs no change. If several causes hold, the one whose removal would admit the most requests is
reported first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from router.doctor import engine_causes as engine
from router.doctor import model_causes as model
from router.doctor.evidence import EngineEvidence, Evidence, ModelEvidence, ServerEvidence
from router.doctor.readings import TritonModelConfig
from router.doctor.report import Change, Diagnosis, Finding, number

_POLICIES = ("max_utilization", "guaranteed_no_evict")
_HEADROOM = 0.8  # of a device's memory


def unfilled(e: Evidence, server: ServerEvidence) -> Diagnosis | None:
    """Diagnose cause 19: parameters are still unfilled templates, or a default replaces them."""
    changes = []
    for config in server.server.configs.values():
        for name, value in sorted(config.parameters.items()):
            where = f"{config.name}: parameters.{name}"
            if "${" in value.string_value:
                changes.append(Change(where, value.string_value, "a value, or absent"))
            elif name == "batch_scheduler_policy" and value.string_value not in _POLICIES:
                changes.append(Change(where, value.string_value, " or ".join(_POLICIES)))
    if not changes:
        return None
    return Diagnosis(
        f"{len(changes)} parameters have no effect: the backend takes its defaults without a word",
        tuple(changes),
    )


def batch_dimension(e: Evidence, server: ServerEvidence) -> Diagnosis | None:
    """Diagnose cause 21: clients send requests with several prompts to an in-flight batcher."""
    count = e.facts.texts.get("batch_dimension", 0)
    if not count:
        return None
    told = f"{count} requests failed: `Expected batch dimension to be 1 for each request`"
    change = Change(
        "first dimension of requests", "several prompts", "1, a request for each prompt"
    )
    return Diagnosis(told, (change,), count / server.seconds)


def out_of_memory(e: Evidence, server: ServerEvidence) -> Diagnosis | None:
    """Diagnose cause 33: each Python instance holds its own copy of the weights."""
    configs = server.server.configs.values()
    if any(c.backend in ("tensorrtllm", "vllm") for c in configs):
        return None  # these engines take most of the free memory by design
    many = [c for c in configs if c.backend == "python" and c.instances > 1]
    told_so = e.facts.texts.get("out_of_memory", 0)
    if not many or not (server.device_share > _HEADROOM or told_so):
        return None
    worst = max(many, key=lambda c: c.instances)
    fewer = worst.instances - 1
    if server.device_share > 0:
        fewer = max(1, min(fewer, int(worst.instances * _HEADROOM / server.device_share)))
    told = (
        f"{worst.instances} instances of {worst.name}, each a process with all weights: the "
        f"device's memory is {number(100 * server.device_share)} % full, {told_so} errors of memory"
    )
    name = f"{worst.name}: instance_group.count"
    return Diagnosis(told, (Change(name, str(worst.instances), str(fewer)),))


def shared_memory(e: Evidence, server: ServerEvidence) -> Diagnosis | None:
    """Diagnose cause 34: the container's shared memory is too small."""
    count = e.facts.texts.get("shared_memory", 0)
    if not count:
        return None
    changes = (
        Change("/dev/shm of the container", "too small (often 64 MB)", "--shm-size=1g or more"),
        Change("--backend-config", "default", "python,shm-default-byte-size=BYTES"),
    )
    told = f"{count} times `Failed to increase the shared memory pool`"
    return Diagnosis(told, changes, count / server.seconds)


def _mains(e: Evidence) -> list[ModelEvidence]:
    """Return for each server the model that clients call, if it had requests."""
    return [s.main for s in e.servers if s.main is not None]


def _load(server: ServerEvidence) -> float:
    """Return the mean number of requests in a server."""
    own = sum(x.active for x in server.engines if x.moving)
    main = server.main
    return max(own, main.in_flight if main else 0.0)


def spread_thin(e: Evidence) -> Diagnosis | None:
    """Diagnose cause 27: each worker has too few requests to form a batch."""
    mains = _mains(e)
    if len(mains) < 2 or len(mains) < len(e.servers):
        return None
    if any(m.mean_batch > model.SINGLE or m.config.max_batch_size <= 1 for m in mains):
        return None
    if any(not m.batches or m.utilisation >= 0.5 or m.growth > 0.5 for m in mains):
        return None
    rate, service_s = sum(m.executed_rate for m in mains), max(m.service_s for m in mains)
    work = rate * service_s
    if not 1 <= work < 2 * len(mains) or any(m.queue_s >= m.service_s for m in mains):
        return None
    to = max(1, math.ceil(work / 2))
    told = (
        f"{len(mains)} workers, each with {number(work / len(mains))} executions under way and "
        f"batches of 1: {number(rate)} requests a second of {model.ms(service_s)} in all"
    )
    return Diagnosis(
        told, (Change("workers that get requests", str(len(mains)), str(to)),), work - 1
    )


def _skew(e: Evidence) -> tuple[ServerEvidence, list[float]] | None:
    """Return the server that has most of the load, and the loads of all servers. Return None if the
    load is even.
    """
    loads = [_load(s) for s in e.servers]
    if len(loads) < 2 or max(loads) < 2:
        return None
    full = e.servers[loads.index(max(loads))]
    others = math.fsum(loads) - max(loads)
    if others / (len(loads) - 1) > 0.25 * max(loads):
        return None
    waits = any(m.requests and m.queue_s >= m.service_s for m in full.models.values())
    waits = waits or any(x.waiting >= engine.SOME for x in full.engines)
    return (full, loads) if waits else None


def hot_spot(e: Evidence) -> Diagnosis | None:
    """Diagnose cause 37: a router sends all requests to one worker, because it chooses by affinity
    and ignores load.
    """
    skew = _skew(e)
    if skew is None or one_connection(e):
        return None
    full, loads = skew
    hits = e.facts.router.hit_share if e.facts.router else math.nan
    told = (
        f"{full.server.url} has {number(max(loads))} requests on average, the {len(loads) - 1} "
        f"others {number(math.fsum(loads) - max(loads))} together"
    )
    if math.isfinite(hits):
        told += f"; {number(100 * hits)} % of prompt tokens were expected in the cache"
    changes = (
        Change(
            "routing rule", "affinity alone", "one with a load term, such as warmroute's default"
        ),
        Change("max_requests of a worker", "none", number(math.ceil(math.fsum(loads) / 2))),
    )
    return Diagnosis(told, changes, max(loads) - math.fsum(loads) / len(loads))


def one_connection(e: Evidence) -> Diagnosis | None:
    """Diagnose cause 39: the load balancer balances connections, not requests, and clients use only
    one connection.
    """
    skew = _skew(e)
    if skew is None:
        return None
    full, loads = skew
    idle = [s for s in e.servers if s is not full]
    connections = e.facts.connections
    if connections is None and e.facts.router is not None:
        return None  # our router balances requests
    if (connections or 1) > 1 or any(s.loaded for s in idle):
        return None
    told = (
        f"{full.server.url} has all the load ({number(max(loads))} requests on average), the "
        f"{len(idle)} others had none: as if one long connection were balanced as a whole"
    )
    change = Change("what is balanced", "connections (L4)", "requests (this router)")
    return Diagnosis(told, (change,), max(loads) - max(loads) / len(loads))


def drift(e: Evidence) -> Diagnosis | None:
    """Diagnose cause 38: workers of one model have different configurations."""
    changes: list[Change] = []
    first = e.servers[0].server
    for other in (s.server for s in e.servers[1:]):
        if other.kind != first.kind:
            continue
        if other.version != first.version:
            changes.append(Change(f"{other.url}: version", other.version, first.version))
        for name in sorted(first.configs.keys() & other.configs.keys()):
            for field in TritonModelConfig.__struct_fields__:
                now, to = (getattr(s.configs[name], field) for s in (other, first))
                if now != to:
                    where = f"{other.url} {name}: {field}"
                    changes.append(Change(where, _brief(now), f"{_brief(to)} as at {first.url}"))
    if not changes:
        return None
    told = f"{len(changes)} settings differ between workers that serve the same models"
    return Diagnosis(told, tuple(changes[:16]))


def _brief(value: object) -> str:
    return str(value)[:120]


_OfModel = Callable[[Evidence, ServerEvidence, ModelEvidence], Diagnosis | None]
_OfEngine = Callable[[Evidence, ServerEvidence, EngineEvidence], Diagnosis | None]
_OfServer = Callable[[Evidence, ServerEvidence], Diagnosis | None]
_OfPool = Callable[[Evidence], Diagnosis | None]


class Cause(NamedTuple):
    """A row of the catalogue of causes. One of the last four fields is the function that diagnoses
    the cause.
    """

    number: int
    name: str
    source: str
    of_model: _OfModel | None = None
    of_engine: _OfEngine | None = None
    of_server: _OfServer | None = None
    of_pool: _OfPool | None = None


_M, _B, _T = "triton-inference-server/server", "tensorrtllm_backend", "NVIDIA/TensorRT-LLM"
_DOCS = f"{_M} docs, model_configuration.md"
_SEEN = "measured on tritonserver 2.51"
CAUSES: tuple[Cause, ...] = (
    Cause(2, "max_batch_size is 0: no batch is possible", _SEEN, model.no_batch_dimension),
    Cause(1, "the dynamic batcher is not on", _DOCS, model.batcher_off),
    Cause(3, "requests of different shapes do not join", _DOCS, model.shapes_differ),
    Cause(4, "requests with different inputs do not join", _SEEN, model.inputs_differ),
    Cause(10, "the rate limiter holds requests", _DOCS, model.rate_limited),
    Cause(11, "sequences hold their slots", _DOCS, model.sequences_held),
    Cause(5, "idle instances take single requests", f"{_M}#4387, #5579", model.too_many_instances),
    Cause(6, "the queue delay waits for nobody", _SEEN, model.queue_delay_without_batch),
    Cause(26, "BLS runs one request per instance", f"{_B}#230, #416, #535", model.bls_serial),
    Cause(28, "a step of the ensemble is too slow", f"{_M}#6422, #7214, #8740", model.slow_step),
    Cause(29, "one Python instance, one request", f"{_M}#6681, #7271", model.python_serial),
    Cause(
        32,
        "nothing limits what a decoupled model runs",
        "triton python_backend docs, decoupled models",
        model.threads_pile_up,
    ),
    Cause(18, "static batching", f"{_B} docs, model_config.md", of_engine=engine.static_batches),
    Cause(20, "the engine has no KV cache", f"{_M}#7790", of_engine=engine.kv_off),
    Cause(16, "the engine's batch is small", f"{_B}#189, #442", of_engine=engine.small_batch),
    Cause(13, "the KV cache holds one request", f"{_M}#7676, {_B}#609", of_engine=engine.one_fits),
    Cause(
        25,
        "more at once than the KV cache holds",
        f"aiconfigurator#652, {_T}#3169",
        of_engine=engine.beyond_memory,
    ),
    Cause(14, "outputs are reserved whole", f"{_T}#1012, #2866, #9412", of_engine=engine.reserved),
    Cause(15, "requests are paused and computed again", f"{_T}#16827", of_engine=engine.thrashing),
    Cause(22, "copies of an engine share its memory", f"{_B} docs", of_engine=engine.copies),
    Cause(17, "the step's token budget is full", "dynamo#10093", of_engine=engine.token_budget),
    Cause(19, "settings without effect", f"{_B}#667", of_server=unfilled),
    Cause(23, "KV reuse is off", f"{_B} docs, kv cache reuse", of_engine=engine.reuse_off),
    Cause(24, "long prompts are not chunked", f"{_T} docs", of_engine=engine.unchunked),
    Cause(8, "the bounded queue refuses", _SEEN, model.queue_full),
    Cause(9, "requests time out in the queue", _SEEN, model.queue_timeout),
    Cause(21, "several prompts in one request", f"{_B}#45, #163, #319", of_server=batch_dimension),
    Cause(30, "streams of a model that is not decoupled", f"{_B} docs", model.not_decoupled),
    Cause(33, "instances fill the memory", "triton python_backend docs", of_server=out_of_memory),
    Cause(34, "shared memory is too small", "triton python_backend docs", of_server=shared_memory),
    Cause(35, "clients ask one at a time", f"{_M}#4129, #5205, #6251", model.one_at_a_time),
    Cause(37, "one worker has all the load", "affinity without a load term", of_pool=hot_spot),
    Cause(39, "one connection, one busy server", "L4 balancing", of_pool=one_connection),
    Cause(27, "load is spread too thin", "arithmetic: rate x service time", of_pool=spread_thin),
    Cause(
        31, "abandoned requests run on", f"triton core#263, {_M}#6739", of_engine=engine.left_behind
    ),
    Cause(38, "workers differ", "comparison of /config and /v2", of_pool=drift),
    Cause(
        36, "batches are full and compute is the limit", f"{_M}#5721, #7205", model.compute_bound
    ),
    Cause(12, "the response cache answers", _DOCS, model.cached),
    Cause(7, "too little load to batch", _SEEN, model.too_little_load),
)


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the causes that hold, the costliest first. Return none if no server has load."""
    if not evidence.loaded:
        return ()
    found = [one for cause in CAUSES for one in _holds(cause, evidence)]
    numbers = {one.number for one in found}
    if numbers & {27, 35, 37, 39}:  # which explain it
        found = [one for one in found if one.number != 7]
    return tuple(sorted(found, key=lambda one: (one.harmless, -round(one.found.admits, 1))))


def _holds(cause: Cause, e: Evidence) -> Iterator[Finding]:
    if cause.of_pool is not None:
        yield from _finding(cause, f"{len(e.servers)} servers", cause.of_pool(e))
        return
    for server in e.servers:
        if not server.loaded:
            continue
        url = server.server.url
        if cause.of_server is not None:
            yield from _finding(cause, url, cause.of_server(e, server))
        for one in server.models.values() if cause.of_model is not None else ():
            assert cause.of_model is not None
            yield from _finding(cause, f"{url} {one.config.name}", cause.of_model(e, server, one))
        for batch in server.engines if cause.of_engine is not None else ():
            assert cause.of_engine is not None
            where = f"{url} {batch.model}"
            yield from _finding(cause, where, cause.of_engine(e, server, batch))


def _finding(cause: Cause, where: str, found: Diagnosis | None) -> Iterator[Finding]:
    if found is not None:
        yield Finding(cause.number, cause.name, where, found, cause.source)
