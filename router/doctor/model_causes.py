"""Diagnoses causes that lie in one model of a Triton server: its batcher, its instances, its
clients. Each function is pure: it takes evidence and returns a diagnosis, or None. B is the mean
batch, q the mean wait of a request, s the mean time of an execution, and u the share of time in
which the instances are busy.
"""

from __future__ import annotations

import math

from router.doctor.evidence import Evidence, ModelEvidence, ServerEvidence
from router.doctor.report import Change, Diagnosis, number

MIN_REQUESTS = 3  # with fewer requests nothing can be judged
LONG_WAIT = 2.0  # executions that a request waits for; joining the next batch takes a wait of one
FULL = 0.9  # share of the largest batch from which a batch counts as full
BUSY, CALM = 0.8, 0.7  # shares of the instances' time
SINGLE = 1.1  # mean batch size up to which requests count as not batched
_MOSTLY, _ALL = 0.5, 1.1  # of an execution's time, which a model that it asks takes
_LLM_BACKENDS = ("tensorrtllm", "vllm")  # backends that schedule requests themselves
_FIRST_BATCH = 8  # batch size to begin with if none is known


def busy_model(m: ModelEvidence) -> bool:
    """Return whether enough requests ran to judge the model."""
    return m.executed >= MIN_REQUESTS and m.executions > 0


def is_llm(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether the model is an LLM engine that schedules by itself, so that Triton's batch
    sizes do not describe it.
    """
    return m.config.backend in _LLM_BACKENDS or any(
        e.model == m.config.name for e in server.engines
    )


def queues(m: ModelEvidence, times: float = LONG_WAIT) -> bool:
    """Return whether requests wait at least `times` times as long as an execution takes."""
    return busy_model(m) and (m.queue_s >= times * m.service_s or m.pending >= times)


def ms(seconds: float) -> str:
    """Return a time in milliseconds as text."""
    return f"{number(seconds * 1e3)} ms"


def _wait(m: ModelEvidence) -> str:
    return (
        f"mean batch {number(m.mean_batch)} of {m.config.max_batch_size}, requests wait "
        f"{ms(m.queue_s)} for executions of {ms(m.service_s)}, {number(m.waiting)} wait on average"
    )


def _joinable(m: ModelEvidence) -> float:
    """Return the number of waiting requests for which fuller batches would have room."""
    room = (m.config.max_batch_size - m.mean_batch) * m.config.instances
    return max(min(m.waiting, room), 0.0)


def _plain(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether Triton itself schedules the model, request by request or with its dynamic
    batcher.
    """
    config = m.config
    return not (is_llm(server, m) or config.steps or config.sequence_batching)


def batcher_off(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 1: the model's configuration has no `dynamic_batching`."""
    config = m.config
    if not _plain(server, m) or config.dynamic_batching or config.max_batch_size <= 1:
        return None
    if not queues(m) or m.mean_batch > SINGLE or _is_pipeline(server, m):
        return None
    if bls_serial(e, server, m):  # a fuller batch of its would be passed on one by one, too
        return None
    change = Change("dynamic_batching", "absent", "dynamic_batching { }")
    return Diagnosis(_wait(m), (change,), _joinable(m))


def no_batch_dimension(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 2: `max_batch_size` is 0, for which Triton logs no warning."""
    config = m.config
    if not _plain(server, m) or config.dynamic_batching is None or config.max_batch_size > 1:
        return None
    if not queues(m):
        return None
    told = (
        f"dynamic_batching is there, but max_batch_size is {config.max_batch_size}: requests wait "
        f"{ms(m.queue_s)} for executions of {ms(m.service_s)}, one at a time"
    )
    to = f"{_FIRST_BATCH} or more, with a batch dimension in the model"
    return Diagnosis(
        told,
        (Change("max_batch_size", str(config.max_batch_size), to),),
        min(m.waiting, _FIRST_BATCH - 1),
    )


def _not_joined(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether batches stay small although requests wait as long as several
    executions take.
    """
    small = _has_room(m)
    return _plain(server, m) and m.batches and queues(m) and small and m.utilisation >= CALM


def _has_room(m: ModelEvidence) -> bool:
    """Return whether the mean batch is below 60 % of the largest possible batch."""
    return m.mean_batch < 0.6 * m.config.max_batch_size


def shapes_differ(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 3: the shapes of requests differ, and Triton joins only adjacent requests of
    equal shape.
    """
    free = [t.name for t in m.config.input if -1 in t.dims and not t.allow_ragged_batch]
    if not _not_joined(server, m) or not free or e.facts.shapes == 1:
        return None
    if e.facts.shapes is None and (e.facts.input_sets or 1) > 1:
        return None
    seen = f", {e.facts.shapes} shapes among requests" if e.facts.shapes else ""
    names = ", ".join(free)
    told = f"{_wait(m)}; {names} may have any length and only equal shapes join{seen}"
    change = Change(
        f"input {free[0]}: allow_ragged_batch", "false", "true, or pad requests to one shape"
    )
    return Diagnosis(told, (change,), _joinable(m))


def inputs_differ(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 4: Triton does not join requests whose optional inputs differ."""
    optional = [t.name for t in m.config.input if t.optional]
    if not _not_joined(server, m) or not optional or e.facts.input_sets == 1:
        return None
    free = any(-1 in t.dims and not t.allow_ragged_batch for t in m.config.input)
    if free and e.facts.input_sets is None:
        return None  # cause 3 is likelier; --requests distinguishes them
    seen = f", {e.facts.input_sets} sets among requests" if e.facts.input_sets else ""
    told = f"{_wait(m)}; {', '.join(optional)} are optional and only equal sets join{seen}"
    change = Change("inputs of requests", "some leave out optional ones", "all of them, always")
    return Diagnosis(told, (change,), _joinable(m))


def too_many_instances(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 5: there are so many instances that an idle one takes each request alone."""
    config = m.config
    if not (_plain(server, m) and m.batches and busy_model(m) and config.instances > 1):
        return None
    flying = m.in_flight
    if m.singles < 0.5 or flying < 2 or m.queue_s >= m.service_s or m.growth > 0.5:
        return None
    fewer = max(1, config.instances // 2)
    told = (
        f"{config.instances} instances, {number(100 * m.singles)} % of executions had a batch of 1 "
        f"(mean {number(m.mean_batch)}) with {number(flying)} requests in flight"
    )
    delay = str(max(1, round(m.service_s * 0.25 * 1e6)))
    batcher = config.dynamic_batching
    now = str(batcher.max_queue_delay_microseconds) if batcher else "0"
    changes = (
        Change("instance_group.count", str(config.instances), str(fewer)),
        Change("or dynamic_batching.max_queue_delay_microseconds", now, delay),
    )
    return Diagnosis(told, changes, max(min(flying, config.max_batch_size) - m.mean_batch, 0.0))


def queue_delay_without_batch(
    e: Evidence, server: ServerEvidence, m: ModelEvidence
) -> Diagnosis | None:
    """Diagnose cause 6: a single request waits for others, which do not arrive, before it is
    executed.
    """
    batcher = m.config.dynamic_batching
    if batcher is None or not _plain(server, m) or not busy_model(m):
        return None
    delay = batcher.max_queue_delay_microseconds / 1e6
    lone = m.executed_rate * m.service_s < 1
    if delay < 0.2 * m.service_s or m.queue_s < 0.5 * delay or m.mean_batch > 1.5 or not lone:
        return None
    if m.queue_s > 2 * delay:
        return None  # something else holds them
    told = (
        f"requests come alone (mean batch {number(m.mean_batch)}, {number(m.executed_rate)} a "
        f"second) and take {ms(m.latency_s)}: {ms(m.queue_s)} of it is the delay of {ms(delay)}"
    )
    now = str(batcher.max_queue_delay_microseconds)
    changes = [Change("dynamic_batching.max_queue_delay_microseconds", now, "0")]
    if batcher.preferred_batch_size:
        sizes = str(batcher.preferred_batch_size)
        changes.append(Change("dynamic_batching.preferred_batch_size", sizes, "absent"))
    return Diagnosis(told, tuple(changes), m.waiting)


def too_little_load(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 7: there are too few concurrent requests to join into batches."""
    if not (_plain(server, m) and m.batches and busy_model(m)) or m.mean_batch > SINGLE:
        return None
    waits = m.queue_s >= m.service_s
    uncached = m.rate * m.service_s  # in flight, if the response cache had answered no request
    if max(m.in_flight, uncached) >= 2 or m.utilisation >= 0.3 or waits:
        return None
    if _called_by_another_model(server, m):  # which alone says how much there is
        return None
    told = (
        f"{number(m.executed_rate)} requests a second of {ms(m.service_s)} overlap seldom: "
        f"{number(m.in_flight)} in flight on average, {number(100 * m.utilisation)} % busy"
    )
    return Diagnosis(told)


def queue_full(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 8: a bounded queue rejects requests, which Triton does not count."""
    batcher, router = m.config.dynamic_batching, e.facts.router
    bound = max((p.max_queue_size for p in batcher.policies), default=0) if batcher else 0
    refused = router.refused.get(server.server.url, 0.0) if router else 0.0
    refused += e.facts.texts.get("queue_full", 0)
    if not bound or not refused:
        return None
    told = (
        f"max_queue_size is {bound}, and {number(refused)} requests were refused (503) meanwhile; "
        f"Triton itself counts {m.failed} failures"
    )
    to = f"{max(2 * bound, bound + math.ceil(refused))} or more, or more capacity"
    name = "dynamic_batching.default_queue_policy.max_queue_size"
    return Diagnosis(told, (Change(name, str(bound), to),), refused / server.seconds * m.latency_s)


def queue_timeout(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 9: requests wait longer than the queue's timeout."""
    batcher = m.config.dynamic_batching
    limits = [p.default_timeout_microseconds for p in batcher.policies] if batcher else []
    limit = max(limits, default=0)
    texts = e.facts.texts.get("queue_timeout", 0) if limit else 0
    count = max(m.rejected, texts)
    if not count:
        return None
    told = (
        f"{count} requests were rejected for their wait (failure reason REJECTED); timeout "
        f"{ms(limit / 1e6) if limit else 'of the requests themselves'}, mean wait {ms(m.queue_s)}"
    )
    now = str(limit) if limit else "from requests"
    to = str(max(2 * limit, round(2e6 * m.queue_s), 1)) if limit else "a longer `timeout`"
    name = "dynamic_batching.default_queue_policy.default_timeout_microseconds"
    changes = (
        Change(name, now, f"{to}, or timeout_action DELAY"),
        Change("clients and routers", "400 blamed on the client", "another worker, as for 503"),
    )
    return Diagnosis(told, changes, count / server.seconds * max(m.latency_s, m.service_s, 0.0))


def rate_limited(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 10: instances are idle while requests wait for the rate limiter's
    resources.
    """
    limiters = [g.rate_limiter for g in m.config.instance_group if g.rate_limiter]
    if not limiters or is_llm(server, m) or not queues(m) or m.utilisation >= CALM:
        return None
    told = (
        f"{number(m.waiting)} wait on average ({ms(m.queue_s)} each) while {m.config.instances} "
        f"instances are {number(100 * m.utilisation)} % busy: they wait for {_resources(limiters)}"
    )
    idle = (1 - m.utilisation) * m.config.instances
    change = Change("instance_group.rate_limiter", _resources(limiters), "fewer, or none")
    return Diagnosis(told, (change,), min(m.waiting, idle * max(m.config.max_batch_size, 1)))


def _resources(limiters: list[dict[str, object]]) -> str:
    found = [r for one in limiters for r in _listed(one.get("resources")) if isinstance(r, dict)]
    named = [f"{r.get('name')} x {r.get('count', 1)}" for r in found]
    return ", ".join(named) or "resources"


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def sequences_held(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 11: sequences that clients never ended hold all slots."""
    batching = m.config.sequence_batching
    if batching is None or m.utilisation >= CALM or not (queues(m) or m.pending >= 1):
        return None
    slots = m.config.instances * max(m.config.max_batch_size, 1)
    if batching.oldest:
        slots = batching.oldest.max_candidate_sequences * m.config.instances or slots
    idle = batching.max_sequence_idle_microseconds
    told = (
        f"{number(m.waiting)} wait on average while the model is {number(100 * m.utilisation)} % "
        f"busy: its {slots} slots are held until a sequence ends or is idle for {ms(idle / 1e6)}"
    )
    changes = [
        Change("sequences of clients", "not ended", "sequence_end with the last request"),
        Change(
            "sequence_batching.max_sequence_idle_microseconds", str(idle), str(max(idle // 10, 1))
        ),
    ]
    if batching.oldest is None:
        changes.append(Change("sequence_batching strategy", "direct", "oldest"))
    return Diagnosis(told, tuple(changes), m.waiting)


def cached(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 12: the response cache answers the requests, so they are not executed."""
    if not m.requests or m.cache_hits < 0.2 * m.requests:
        return None
    return Diagnosis(
        f"{m.cache_hits} of {m.requests} requests were answered by the response cache and "
        f"executed nothing; {m.executions} executions"
    )


def _is_pipeline(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether the model is a Python step before or after an engine. More instances make such
    a step faster.
    """
    return m.config.backend == "python" and bool(m.steps_of)


def _others(server: ServerEvidence, m: ModelEvidence) -> list[ModelEvidence]:
    """Return the models that this model may call by BLS, which are all models that are in no
    ensemble with it.
    """
    found = [
        o for o in server.models.values() if o is not m and not set(o.steps_of) & {*m.steps_of}
    ]
    return [o for o in found if m.config.name not in o.config.steps]


def _waits_for_others(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether the model's executions may spend their time waiting for other models. They may
    if the model's Python code can call the other models (BLS), and if these have requests for as
    long as an execution runs.
    """
    if m.config.backend != "python" or not m.busy:
        return False
    others = _others(server, m)
    # If an answer comes in pieces, Triton counts only its beginning.
    if any(o.config.model_transaction_policy.decoupled and _as_many(o, m) for o in others):
        return True
    asked = [o.in_flight for o in others]
    asked.append(sum(o.in_flight for o in others if _as_many(o, m)))
    asked += [x.active for x in server.engines if x.moving and x.model != m.config.name]
    return max(asked, default=0.0) >= _MOSTLY * m.busy


def _as_many(o: ModelEvidence, m: ModelEvidence) -> bool:
    """Return whether model `o` had a whole number of requests for each request of model `m`."""
    each = max(round(o.requests / max(m.requests, 1)), 1)
    most_off = 0.05 * m.requests + max(m.config.max_batch_size, 1)
    return o.requests > 0 and abs(o.requests - each * m.requests) <= each * most_off


def _model_called_in_turn(server: ServerEvidence, m: ModelEvidence) -> ModelEvidence | None:
    """Return the model that each execution calls for one request after another, waiting each time;
    None if there is none. The called model has one request for each concurrent execution, and the
    same number of requests for each request of this model.
    """
    if not _plain(server, m) or m.config.backend != "python" or m.steps_of or not m.busy:
        return None
    for o in _others(server, m):
        if busy_model(o) and _as_many(o, m) and _MOSTLY <= o.in_flight / m.busy <= _ALL:
            return o
    return None


def _called_by_another_model(server: ServerEvidence, m: ModelEvidence) -> bool:
    """Return whether the model's requests come from a Python model, not from clients."""
    return any(_model_called_in_turn(server, o) is m for o in server.models.values())


def bls_serial(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 26: a BLS model runs one request per instance in front of a model that could
    take more.
    """
    if m.config.backend != "python" or m.steps_of or is_llm(server, m):
        return None
    if not queues(m, 1.0) or m.utilisation < CALM:
        return None
    count = m.config.instances
    engine = next((x for x in server.engines if x.moving and x.model != m.config.name), None)
    if engine is not None:
        active, most = engine.active, engine.most
        limited = engine.active_range[1] <= count * max(m.config.max_batch_size, 1)
        seen = f"{engine.model} never has more than {number(engine.active_range[1])} active"
    elif (inner := _model_called_in_turn(server, m)) is not None:
        active, most = inner.in_flight, float(inner.config.max_batch_size * inner.config.instances)
        limited = inner.batches and _has_room(inner) and not queues(inner, 1.0)
        seen = f"{inner.config.name} has {number(active)} at a time"
    else:
        return None
    if not (limited and active < FULL * most):  # of an engine that tells no most, NaN
        return None
    told = (
        f"{number(m.waiting)} wait on average at {m.config.name} ({ms(m.queue_s)} each), whose "
        f"{count} instances run one each; {seen} of {int(most)}"
    )
    change = Change(f"{m.config.name}: instance_group.count", str(count), str(int(most)))
    return Diagnosis(told, (change,), min(m.waiting, most - active))


def slow_step(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 28: tokenizing in one process is the bottleneck of an ensemble."""
    if not _is_pipeline(server, m) or is_llm(server, m):
        return None
    if not queues(m) or m.utilisation < BUSY:
        return None
    others = [o for o in server.models.values() if set(o.steps_of) & set(m.steps_of)]
    if m.waiting < max(o.waiting for o in others):
        return None
    count = m.config.instances
    to = max(2 * count, min(count + math.ceil(m.waiting), 8 * count))
    told = (
        f"{number(m.waiting)} of the ensemble's requests wait on average at {m.config.name} "
        f"({ms(m.queue_s)} each, executions of {ms(m.service_s)}); its {count} instances are "
        f"{number(100 * m.utilisation)} % busy"
    )
    changes = [Change(f"{m.config.name}: instance_group.count", str(count), str(to))]
    if m.config.max_batch_size > 1 and m.config.dynamic_batching is None:
        changes.append(Change(f"{m.config.name}: dynamic_batching", "absent", "{ }"))
    return Diagnosis(told, tuple(changes), m.waiting)


def python_serial(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 29: one Python process takes one request at a time."""
    config = m.config
    if config.backend != "python" or not _plain(server, m) or m.steps_of:
        return None
    decoupled = config.model_transaction_policy.decoupled
    batchable = config.max_batch_size > 1 or config.dynamic_batching is not None
    if decoupled or batchable or config.instances > 1 or bls_serial(e, server, m):
        return None
    if not queues(m) or m.utilisation < BUSY:
        return None
    told = (
        f"one instance runs one request at a time, {number(100 * m.utilisation)} % busy; "
        f"{number(m.waiting)} wait on average ({ms(m.queue_s)} each, executions of "
        f"{ms(m.service_s)})"
    )
    changes = (
        Change("instance_group.count", "1", str(min(1 + math.ceil(m.waiting), _FIRST_BATCH))),
        Change("or max_batch_size", "0", f"{_FIRST_BATCH} with dynamic_batching {{ }}"),
    )
    return Diagnosis(told, changes, m.waiting)


def not_decoupled(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 30: clients want a stream from a model that answers once."""
    config = m.config
    if config.model_transaction_policy.decoupled or config.steps:
        return None
    parameter = config.parameters.get("decoupled")
    streams = any(t.name in ("stream", "streaming") for t in config.input)
    chain = [o for o in server.models.values() if set(o.steps_of) & set(m.steps_of)]
    others = [o.config.name for o in chain if o.config.model_transaction_policy.decoupled]
    refused = e.facts.texts.get("decoupled", 0) if streams else 0
    field = "model_transaction_policy.decoupled"
    if parameter is not None and parameter.string_value.lower() in ("true", "1", "yes"):
        told = "`decoupled` stands among the parameters, where it has no effect"
        return Diagnosis(told, (Change(field, "false", "true"),))
    if streams and (refused or (others and m.requests)):
        why = f"{', '.join(others)} of the same ensemble is" if others else "clients want streams"
        told = f"{config.name} is not decoupled and {why}; {refused} requests were refused for it"
        return Diagnosis(told, (Change(f"{config.name}: {field}", "false", "true"),))
    return None


def threads_pile_up(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 32: `execute` returns before its requests are computed, and nothing limits the
    number of running requests.
    """
    config, facts = m.config, e.facts
    decoupled = config.model_transaction_policy.decoupled
    if config.backend != "python" or not decoupled or is_llm(server, m):
        return None
    room = config.instances * max(config.max_batch_size, 1)
    looks = facts.router.by_url.get(server.server.url, ()) if facts.router else ()
    most = max(looks, default=0.0)
    grew = len(looks) > 1 and looks[-1] >= 1.2 * max(looks[0], 1.0)
    told = f"{number(most)} requests run in a model of {room} (instances x batch), and more come"
    if len(facts.latencies) > 1:
        low, high = min(facts.latencies), max(facts.latencies)
        most = max(most, float(high))
        times = facts.latencies[high] / max(facts.latencies[low], 1e-9)
        grew = grew or times >= 0.6 * high / low
        told = (
            f"{high} requests at once take {ms(facts.latencies[high])} each, {low} take "
            f"{ms(facts.latencies[low])}: {number(times)} times as long, in a model of {room} "
            "(instances x batch)"
        )
    if most < 4 * room or not grew:
        return None
    changes = (
        Change("requests running in model.py", "unlimited", f"a semaphore of {room} to {4 * room}"),
        Change("max_requests of the worker at the router", "none", str(2 * room)),
    )
    return Diagnosis(told, changes, most - room)


def one_at_a_time(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 35: clients wait for each answer before they send the next request."""
    if not (_plain(server, m) and m.batches and busy_model(m)) or queues(m, 1.0):
        return None
    if _called_by_another_model(server, m):
        return None
    room, router = m.config.max_batch_size * m.config.instances, e.facts.router
    clients = e.facts.connections
    if clients is None and router is not None and router.connections >= 1:
        clients = round(router.connections)
    flying = m.in_flight if router is None else max(router.in_flight, m.in_flight)
    if not clients:
        # One client that never rests keeps one instance busy and no more.
        if not (m.mean_batch <= SINGLE and m.busy >= 0.6 and flying < 1.3):
            return None
        clients = 1
    most = flying if router is None else router.most_in_flight
    if max(clients, flying) >= room or most > clients + 0.5 or flying < 0.6 * clients:
        return None
    told = (
        f"{number(flying)} requests in flight on average, never more than one for each of "
        f"{clients} client connections; mean batch {number(m.mean_batch)} of "
        f"{m.config.max_batch_size}, one instance {number(100 * min(m.busy, 1))} % busy"
    )
    change = Change("connections of clients (`concurrency`)", str(clients), f"{2 * room}, or async")
    return Diagnosis(told, (change,), room - flying)


def compute_bound(e: Evidence, server: ServerEvidence, m: ModelEvidence) -> Diagnosis | None:
    """Diagnose cause 36: batches are full, and a batch of twice the size takes twice the time."""
    most = m.config.max_batch_size
    if not _plain(server, m) or most <= 1 or not queues(m, 1.0) or m.utilisation < BUSY:
        return None
    if _waits_for_others(server, m):  # and computes almost nothing itself
        return None
    whole = m.requests > 0 and m.rows / m.requests >= FULL * most
    if m.mean_batch < FULL * most or not (m.growth >= 0.8 or whole):
        return None
    why = (
        f"clients send batches of {number(m.rows / m.requests)} already"
        if whole
        else f"a batch of {m.sizes[-1].batch} takes {ms(m.sizes[-1].seconds)}, one of "
        f"{m.sizes[0].batch} {ms(m.sizes[0].seconds)}"
    )
    return Diagnosis(
        f"batches are full ({number(m.mean_batch)} of {most}) and {why}: batching gains nothing "
        f"more, {number(100 * m.utilisation)} % busy; more workers would"
    )
