"""Diagnoses causes that lie in the batch of an LLM engine: KV memory, budgets and policies. Each
function is pure: it takes evidence and returns a diagnosis, or None. A request needs as many tokens
of KV as its prompt and its longest possible output have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from router.doctor.evidence import EngineEvidence, Evidence, ServerEvidence
from router.doctor.report import Change, Diagnosis, number

KV_FULL = 0.8  # share in use from which memory is the limit
AT_LIMIT = 0.95  # share of the largest batch from which a batch counts as full
WAITING = 0.2  # share of the active requests: fewer only wait for their first step
SOME = 0.5  # mean number of requests below which there are practically none
LONG_PROMPT = 1024  # tokens whose prefill delays other requests noticeably
_GUARANTEED, _UTMOST = "guaranteed_no_evict", "max_utilization"

# The name of each setting, by kind of engine.
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "triton": {
            "kv": "parameters.max_tokens_in_paged_kv_cache",
            "share": "parameters.kv_cache_free_gpu_mem_fraction",
            "batch": "max_batch_size of the engine's build",
            "budget": "max_num_tokens of the engine's build",
            "policy": "parameters.batch_scheduler_policy",
            "reuse": "parameters.enable_kv_cache_reuse",
            "chunks": "parameters.enable_chunked_context",
        },
        "vllm": {
            "kv": "--num-gpu-blocks-override",
            "share": "--gpu-memory-utilization",
            "batch": "--max-num-seqs",
            "budget": "--max-num-batched-tokens",
            "policy": "--max-num-seqs",
            "reuse": "--enable-prefix-caching",
            "chunks": "--enable-chunked-prefill",
        },
        "sglang": {
            "kv": "--max-total-tokens",
            "share": "--mem-fraction-static",
            "batch": "--max-running-requests",
            "budget": "--max-prefill-tokens",
            "policy": "--schedule-conservativeness",
            "reuse": "--disable-radix-cache",
            "chunks": "--chunked-prefill-size",
        },
        "warmroute": {
            "kv": "--kv-tokens",
            "share": "--kv-cache-free-gpu-mem-fraction",
            "batch": "--max-batch-size",
            "budget": "--max-num-tokens",
            "policy": "--batch-scheduler-policy",
            "reuse": "prefix caching",
            "chunks": "chunked prefill",
        },
    }
)


def _name(server: ServerEvidence, what: str) -> str:
    return _NAMES.get(server.server.kind, _NAMES["triton"])[what]


def _length(e: Evidence, x: EngineEvidence) -> float:
    """Return the tokens of KV that a request needs. The number is the one that the operator gave or
    that was counted, else the mean number of tokens that running requests hold.
    """
    prompt = x.input_tokens if e.facts.input_tokens is None else e.facts.input_tokens
    output = x.output_tokens if e.facts.max_tokens is None else e.facts.max_tokens
    if math.isfinite(prompt + output):
        return prompt + output
    held = x.kv_share * x.kv_tokens
    return held / x.scheduled if x.scheduled > 0 and held > 0 else math.nan


def _waits(x: EngineEvidence) -> bool:
    """Return whether active requests wait for longer than one step of the engine. Every new request
    waits until the next step begins, so a few requests always wait if answers are short.
    """
    return x.moving and x.waiting >= max(1.0, WAITING * x.active)


def _short(x: EngineEvidence) -> bool:
    """Return whether requests wait although the batch has room for more requests."""
    return _waits(x) and not x.scheduled >= AT_LIMIT * x.most


def _because(x: EngineEvidence, *reasons: str) -> bool:
    """Return whether the engine's main reason for letting requests wait is one of `reasons`. Return
    True if the engine gives no reason.
    """
    return x.main_reason is None or x.main_reason in reasons


def _thrashes(server: ServerEvidence, x: EngineEvidence) -> bool:
    """Return whether running requests are preempted again and again."""
    return x.paused >= SOME or x.preemptions >= max(1.0, 0.1 * server.seconds)


def _batch(x: EngineEvidence) -> str:
    most = f" of at most {number(x.most)}" if math.isfinite(x.most) else ""
    return f"{number(x.active)} active, {number(x.scheduled)} scheduled{most}"


def _taken_in(x: EngineEvidence) -> float:
    room = x.most - x.scheduled if math.isfinite(x.most) else math.inf
    return max(min(x.waiting, room), 0.0)


def _policy(x: EngineEvidence) -> str:
    given = x.config.text("batch_scheduler_policy")
    return given if given in (_UTMOST, _GUARANTEED) else _GUARANTEED


def _larger_kv(server: ServerEvidence, x: EngineEvidence, need: float) -> tuple[Change, ...]:
    """Return the change of the configuration that gives the KV cache room for all active
    requests.
    """
    wanted = math.ceil(need * max(x.active, 2.0))
    given = x.config.text("max_tokens_in_paged_kv_cache")
    if given is not None or server.server.kind == "warmroute":
        now = given or str(int(x.kv_tokens))
        other = "" if given is None else "absent (all that is free), or "
        return (Change(_name(server, "kv"), now, f"{other}{wanted} or more"),)
    share = x.config.text("kv_cache_free_gpu_mem_fraction") or "its default"
    return (
        Change(
            _name(server, "share"),
            share,
            f"more: the cache holds {int(x.kv_tokens)} tokens, {wanted} are needed",
        ),
    )


def one_fits(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 13: the KV cache holds only one request."""
    need = _length(e, x)
    if not _short(x) or not 0 < x.kv_tokens < 2 * need:
        return None
    if _thrashes(server, x) or not _because(x, "kv_blocks", "priority", "reserve_policy"):
        return None
    told = (
        f"{_batch(x)}; the KV cache holds {number(x.kv_tokens)} tokens and a request needs "
        f"{number(need)}: room for {int(x.kv_tokens // need)}"
    )
    return Diagnosis(told, _larger_kv(server, x, need), _taken_in(x))


def reserved(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 14: the engine reserves KV for the whole output in advance, so the cache
    counts as full although most of it is empty.
    """
    need = _length(e, x)
    if not _short(x) or _policy(x) != _GUARANTEED or x.kv_share >= KV_FULL:
        return None
    if x.kv_tokens < 2 * need or not _because(x, "reserve_policy") or _budget_full(e, x):
        return None
    # If the length of outputs is unknown, requests that wait beside free memory are the sign.
    if e.facts.max_tokens is not None and x.active * need <= x.kv_tokens:
        return None
    if server.server.kind in ("vllm", "sglang"):
        return None  # these reserve no output
    told = (
        f"{_batch(x)} with {number(100 * x.kv_share)} % of the KV cache in use: {_GUARANTEED} "
        f"reserves each request's longest output"
    )
    if math.isfinite(need) and e.facts.max_tokens is not None:
        told += f", {number(need)} tokens of {number(x.kv_tokens)}"
    given = "absent" if e.facts.max_tokens is None else number(e.facts.max_tokens)
    now = x.config.text("batch_scheduler_policy") or f"{_GUARANTEED} (default)"
    changes = (
        Change("max_tokens of requests", given, "what answers need"),
        Change(f"or {_name(server, 'policy')}", now, f"{_UTMOST}, watching for paused requests"),
    )
    return Diagnosis(told, changes, _taken_in(x))


def thrashing(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 15: the engine pauses running requests and computes them again."""
    paused = x.paused if math.isfinite(x.paused) else 0.0
    if not x.moving or not _thrashes(server, x) or x.kv_share < KV_FULL:
        return None
    if server.server.kind == "triton" and _policy(x) != _UTMOST:
        return None
    told = (
        f"{number(paused)} requests paused on average, {number(x.preemptions)} preemptions, the KV "
        f"cache {number(100 * x.kv_share)} % full; {_batch(x)}"
    )
    if server.server.kind in ("triton", "warmroute"):
        change = Change(_name(server, "policy"), _UTMOST, f"{_GUARANTEED}, or fewer in flight")
    else:
        fewer = str(max(1, int(0.8 * x.scheduled)))
        change = Change(_name(server, "policy"), "its present value", f"{fewer}, or more KV memory")
    return Diagnosis(told, (change,), max(paused, x.preemptions / server.seconds, x.waiting))


def small_batch(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 16: the largest batch that the engine is configured for is small."""
    if not _waits(x) or x.kv_share >= KV_FULL or not _because(x, "max_batch_size"):
        return None
    most = x.most
    if math.isnan(most):
        least, most = x.scheduled_range
        if server.server.kind != "vllm" or least != most or most < 1:
            return None  # vLLM does not report it: a batch that never changes is at its limit
    elif x.scheduled < AT_LIMIT * most:
        return None
    room = most / x.kv_share if x.kv_share > 0.01 else math.inf
    to = int(min(math.ceil(x.active), room))
    told = (
        f"{number(x.scheduled)} scheduled all the time of at most {number(most)}, "
        f"{number(x.waiting)} wait, {number(100 * (1 - x.kv_share))} % of the KV cache is free"
    )
    change = Change(_name(server, "batch"), number(most), f"{max(to, int(most) + 1)} or more")
    return Diagnosis(told, (change,), min(x.waiting, room - most))


def _budget_full(e: Evidence, x: EngineEvidence) -> bool:
    """Return whether steps use at least 90 % of their token budget."""
    budget = x.step_tokens if e.facts.max_num_tokens is None else e.facts.max_num_tokens
    return x.context_tokens >= 0.9 * budget


def token_budget(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 17: prefill uses up the token budget of a step."""
    if not _short(x) or x.kv_share >= KV_FULL:
        return None
    ours = x.main_reason == "token_budget"
    if not ours and (not _because(x) or not _budget_full(e, x)):
        return None
    budget = x.step_tokens if e.facts.max_num_tokens is None else e.facts.max_num_tokens
    if not 0 < budget < math.inf:
        return None
    told = (
        f"{_batch(x)}, {number(x.waiting)} wait with {number(100 * (1 - x.kv_share))} % of the KV "
        f"cache free: steps prefill {number(x.context_tokens)} of {number(budget)} tokens"
    )
    changes = [
        Change(_name(server, "budget"), number(budget), f"{int(2 * budget)}, or a worker more")
    ]
    if x.config.text("enable_chunked_context") == "false":
        changes.append(Change(_name(server, "chunks"), "false", "true"))
    return Diagnosis(told, tuple(changes), _taken_in(x))


def static_batches(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 18: all requests of a batch begin and end together (static batching)."""
    if not x.static or not x.moving:
        return None
    given = x.config.text("gpt_model_type") or "V1"
    told = f"the metrics of static batching (nv_trt_llm_v1_metrics) are there; {_batch(x)}"
    change = Change("parameters.gpt_model_type", given, "inflight_fused_batching")
    return Diagnosis(told, (change,), _taken_in(x))


def kv_off(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 20: the engine has no KV cache."""
    if not x.moving or x.kv_tokens > 0 or math.isnan(x.kv_tokens) or x.active < SOME:
        return None
    told = f"{_batch(x)}; the KV cache has 0 blocks while the engine steps"
    change = Change("paged KV cache of the engine's build", "off", "on (--kv_cache_type paged)")
    return Diagnosis(told, (change,), max(x.active - x.scheduled, 0.0))


def copies(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 22: several copies of an engine share a device's memory."""
    count, devices = x.config.instances, x.config.devices
    if server.server.kind != "triton" or not x.moving or count <= devices:
        return None
    where = "one device" if devices == 1 else f"{devices} devices"
    told = (
        f"{count} instances of {x.model} on {where}: each is a whole engine, and its KV cache "
        f"a share of what the others left ({number(x.kv_tokens)} tokens, "
        f"{number(100 * x.kv_share)} % in use); {_batch(x)}"
    )
    now = max(group.count for group in x.config.instance_group)
    change = Change(f"{x.model}: instance_group.count", str(now), "1")
    more = min(x.waiting, x.scheduled * (count - 1)) if x.kv_share >= KV_FULL else 0.0
    return Diagnosis(told, (change,), more)


def reuse_off(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 23: the engine does not reuse cached prompts, so it computes them again."""
    if not x.moving:
        return None
    told = x.config.text("enable_kv_cache_reuse")
    off = told is not None and told.lower() in ("false", "0")
    shared = e.facts.router.hit_share if e.facts.router else math.nan
    flat = x.reused == 0 and shared >= 0.2  # prompts repeat, and none was found in the cache
    if server.server.kind == "sglang":
        off = server.server.settings.get("disable_radix_cache", "").lower() == "true"
    if not (off or flat) or shared < 0.05:
        return None
    now = (told or "off") if off else "not set, which older versions take for false"
    repeats = "" if math.isnan(shared) else f", {number(100 * shared)} % of prompt tokens repeat"
    found = 0.0 if math.isnan(x.reused) else x.reused
    to = "absent" if server.server.kind == "sglang" else "true, with paged context in the build"
    return Diagnosis(
        f"KV reuse is {'off' if off else 'without effect'}: {number(found)} found in the cache "
        f"meanwhile{repeats}",
        (Change(_name(server, "reuse"), now, to),),
    )


def unchunked(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 24: the prefill of a long prompt stops all other requests."""
    off = (x.config.text("enable_chunked_context") or "").lower() in ("false", "0")
    if server.server.kind == "sglang":
        off = server.server.settings.get("chunked_prefill_size", "") in ("-1", "0")
    prompt = x.input_tokens if e.facts.input_tokens is None else e.facts.input_tokens
    prefills = x.context > 0 or x.context_tokens > 0 or math.isnan(x.context)
    if not off or not x.moving or not prompt >= LONG_PROMPT or not prefills or x.scheduled < 1:
        return None
    told = (
        f"prompts of {number(prompt)} tokens are prefilled whole, {number(x.context)} at a time on "
        f"average, while {number(x.generation)} others generate"
    )
    now = "-1" if server.server.kind == "sglang" else "false"
    to = "2048" if server.server.kind == "sglang" else "true"
    return Diagnosis(told, (Change(_name(server, "chunks"), now, to),))


def beyond_memory(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 25: the KV cache cannot hold all concurrent requests, so some requests wait
    without any message.
    """
    need = _length(e, x)
    planned = max(x.active, float(e.facts.concurrency or 0))
    if not _short(x) or not 2 * need <= x.kv_tokens < planned * need or x.kv_share < KV_FULL:
        return None
    if _thrashes(server, x) or not _because(x, "kv_blocks", "priority", "reserve_policy"):
        return None
    fit = int(x.kv_tokens // need)
    told = (
        f"{_batch(x)}, the KV cache {number(100 * x.kv_share)} % full: {number(planned)} requests "
        f"of {number(need)} tokens need {number(planned * need)}, it holds {number(x.kv_tokens)}, "
        f"that is {fit} requests"
    )
    changes = (
        Change("requests at once (max_requests of the worker)", number(planned), str(fit)),
        *_larger_kv(server, x, need),
    )
    return Diagnosis(told, changes, _taken_in(x))


def left_behind(e: Evidence, server: ServerEvidence, x: EngineEvidence) -> Diagnosis | None:
    """Diagnose cause 31: requests continue to run after their clients have left."""
    router = e.facts.router
    looks = router.by_url.get(server.server.url, ()) if router else ()
    ways = [c.name for c in server.server.configs.values() if c.steps or "bls" in c.name.lower()]
    if not x.moving or not looks or not ways:
        return None
    least = x.active_range[0] - max(looks)
    if not least >= 1:
        return None
    told = (
        f"{number(x.active_range[0])} or more active at {x.model} all the time, the router has "
        f"{number(max(looks))} or fewer there: a cancel does not pass through {', '.join(ways)}"
    )
    changes = (
        Change("model that clients call", ways[0], f"{x.model} itself, where cancels arrive"),
        Change("or max_tokens of requests", "unbounded", "what answers need"),
    )
    return Diagnosis(told, changes, least)
