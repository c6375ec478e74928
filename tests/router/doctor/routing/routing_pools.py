"""Facts of a healthy pool, and each known cause of low hits as the same pool with that cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from router.doctor.routing.facts import (
    BestRow,
    DecisionRow,
    EngineFacts,
    ExaminedWorker,
    GroupRow,
    PolicyRow,
    PoolFacts,
    WorkerRow,
)
from router.doctor.routing.prompts import GivenPrompts
from router.doctor.routing.tokens import ComparedTokens

HEARD = {"batches": 40.0, "snapshots": 1.0, "stored_blocks": 400.0, "removed_blocks": 20.0}
ROW = WorkerRow(
    0,
    "http://gpu1:8000",
    state="ready",
    kind="vllm",
    models=["m"],
    block_size=16,
    told_block_size=16,
    kv_capacity_tokens=400_000.0,
    events="tcp://gpu1:5557",
    events_from="read here",
    resident_blocks=380,
    kv_known=True,
    hit_confidence=1.0,
    working_set_tokens=9_000.0,
)
ENGINE = EngineFacts(
    settings={"enable_prefix_caching": "True", "block_size": "16"},
    endpoints={0: "tcp://gpu1:5557"},
    query_tokens=10_000.0,
    hit_tokens=8_000.0,
    finished=12.0,
)


def worker(number: int = 0, engine: Any = None, **fields: Any) -> ExaminedWorker:
    """Return a worker; `fields` change its row in `/workers`, `engine` is what the engine itself
    reports.
    """
    row = msgspec.structs.replace(ROW, id=number, url=f"http://gpu{number + 1}:8000", **fields)
    if row.events == ROW.events:
        row = msgspec.structs.replace(row, events=f"tcp://gpu{number + 1}:5557")
    endpoint = {0: f"tcp://gpu{number + 1}:5557"}
    own = replace(ENGINE, **({"endpoints": endpoint} | (engine or {})))
    return ExaminedWorker(row, own, HEARD, answered=12.0)


def decisions(count: int = 24, workers: int = 2, **fields: Any) -> tuple[DecisionRow, ...]:
    """Return `count` decisions on requests of 440 tokens, which were sent to the workers
    in turn.
    """
    row = DecisionRow(0, 0, 0.0, "m", 400, 440, False, 400)
    rows = (msgspec.structs.replace(row, request=n, worker=n % workers) for n in range(count))
    return tuple(msgspec.structs.replace(one, **fields) for one in rows)


COLD = decisions(expected_hit_tokens=0, cached_tokens=0)
GOOD = PoolFacts(
    "http://router:8081",
    (worker(0), worker(1)),
    decisions(),
    policy=PolicyRow("warmset?gate=1.0", "warmset?gate=1.0", None),
    tokenizer_exact={"m": 1.0},
    given=GivenPrompts(24, 0, 0, 1_600, 0),
)


class RoutingCase(NamedTuple):
    """One cause of low hits: its name, the text that its evidence must have, what to change, and a
    pool with the cause.
    """

    cause: str
    says: str
    change: str
    sick: PoolFacts


def two_workers(**fields: Any) -> tuple[ExaminedWorker, ...]:
    """Return two equal workers."""
    return worker(0, **fields), worker(1, **fields)


def pool_without_hits(**fields: Any) -> PoolFacts:
    """Return the facts of a healthy pool, but without hits."""
    return replace(GOOD, **({"decisions": COLD} | fields))


def with_event_counts(
    workers: tuple[ExaminedWorker, ...], **counts: float
) -> tuple[ExaminedWorker, ...]:
    """Return the same workers with these counts of events."""
    return tuple(replace(one, events=HEARD | counts) for one in workers)


OFF: dict[str, Any] = {"events": None, "resident_blocks": 0, "kv_known": False}
LOST = [BestRow(0, 0), BestRow(1, 400)]
LORA = decisions(model="lora", expected_hit_tokens=0)
CASES = (
    RoutingCase(
        "prefix-caching-off",
        "enable_prefix_caching False",
        "--no-enable-prefix-caching",
        pool_without_hits(
            workers=two_workers(
                **OFF, engine={"settings": {"enable_prefix_caching": "False"}, "endpoints": None}
            )
        ),
    ),
    RoutingCase(
        "prefix-caching-off",
        "disable_radix_cache True",
        "--disable-radix-cache",
        pool_without_hits(
            workers=two_workers(kind="sglang", engine={"settings": {"disable_radix_cache": "True"}})
        ),
    ),
    RoutingCase(
        "events-off",
        "publishers that the engine names: 0",
        "--kv-events-config",
        pool_without_hits(workers=two_workers(**OFF, engine={"endpoints": None})),
    ),
    RoutingCase(
        "events-not-read",
        "publishes at tcp://gpu1:5557",
        "events=none",
        pool_without_hits(workers=two_workers(**OFF)),
    ),
    RoutingCase(
        "events-not-read",
        "not its own host",
        "event_hosts",
        pool_without_hits(
            workers=two_workers(
                **OFF, advice="it names 'x' for its KV events, not its own host: no"
            )
        ),
    ),
    RoutingCase(
        "events-elsewhere",
        "listens at tcp://gpu1:9",
        "events=tcp://gpu1:5557",
        pool_without_hits(
            workers=with_event_counts(two_workers(events="tcp://gpu1:9"), batches=1.0)
        ),
    ),
    RoutingCase(
        "events-elsewhere",
        "by themselves: 0",
        "open the port",
        pool_without_hits(
            workers=with_event_counts(two_workers(), batches=0.0, snapshots=0.0, stored_blocks=0.0)
        ),
    ),
    RoutingCase(
        "events-elsewhere",
        "events_from: connection lost",
        "open the port",
        pool_without_hits(workers=two_workers(events_from="connection lost")),
    ),
    RoutingCase(
        "block-sizes",
        "block_size 16",
        "block_size=",
        pool_without_hits(workers=two_workers(told_block_size=32)),
    ),
    RoutingCase(
        "block-sizes",
        "skipped for their block size: 7",
        "block_size=",
        pool_without_hits(
            workers=two_workers(events_skipped={"other_block_size": 7}, mirrored="sizes")
        ),
    ),
    RoutingCase(
        "no-tokenizer",
        "100 % of prompt tokens",
        "--tokenizer DIR",
        pool_without_hits(
            tokenizer_exact={},
            decisions=decisions(approximate=True, expected_hit_tokens=0, cached_tokens=0),
        ),
    ),
    RoutingCase(
        "tokenizer-differs",
        "4 of 4 texts differ",
        "--tokenizer DIR",
        pool_without_hits(tokenizer_exact={"m": 0.0}, tokens=ComparedTokens(4, 4, 6, 6)),
    ),
    RoutingCase(
        "template-differs",
        "6 of 6 chats differ",
        "chat_template.jinja",
        pool_without_hits(tokenizer_exact={"m": 0.0}, tokens=ComparedTokens(4, 0, 6, 6)),
    ),
    RoutingCase(
        "tokens-differ",
        "9 prompts differed",
        "--tokenizer DIR",
        pool_without_hits(
            tokenizer_exact={"m": 0.0},
            mismatches={"m": 9.0},
            decisions=decisions(approximate=True, expected_hit_tokens=0),
        ),
    ),
    RoutingCase(
        "template-refuses",
        "24 prompts",
        "chat_template",
        pool_without_hits(
            template_refusals=24.0,
            decisions=decisions(approximate=True, expected_hit_tokens=0, cached_tokens=0),
        ),
    ),
    RoutingCase(
        "lora-names",
        "found 9,600",
        "--lora-modules",
        pool_without_hits(
            decisions=LORA, workers=two_workers(engine={"adapters": frozenset({"lora"})})
        ),
    ),
    RoutingCase(
        "salts",
        "24 salts in 24 requests",
        "cache_salt",
        pool_without_hits(given=GivenPrompts(24, 24, 24, 1600)),
    ),
    RoutingCase(
        "attribution-changes",
        "it changed in 20 of 22 requests",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        pool_without_hits(same_attributions=2.0, changed_attributions=20.0),
    ),
    RoutingCase(
        "heads-differ",
        "part after 31 bytes, and then share 1,600",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        pool_without_hits(given=GivenPrompts(24, 0, 0, 31, 1_600, "cch=5f1e;")),
    ),
    RoutingCase(
        "short-prompts",
        "blocks have 512 tokens",
        "--block-size",
        pool_without_hits(
            workers=two_workers(block_size=512, told_block_size=512, engine={"settings": {}})
        ),
    ),
    RoutingCase(
        "policy-blind",
        "policy round_robin",
        "--policy warmset",
        pool_without_hits(
            policy=PolicyRow("round_robin", "round_robin"),
            decisions=decisions(best=LOST, expected_hit_tokens=0, cached_tokens=0),
        ),
    ),
    RoutingCase(
        "policy-blind",
        "90.9 % of prompt tokens",
        "last_fault",
        pool_without_hits(
            policy=PolicyRow("mine", "least_requests?temperature=0.0", 3.0),
            decisions=decisions(best=LOST, expected_hit_tokens=0, cached_tokens=0),
        ),
    ),
    RoutingCase(
        "index-too-small",
        "900 in all",
        "limits.index_entries",
        pool_without_hits(index_evicted=900.0, workers=two_workers(kv_evicted_blocks=450)),
    ),
    RoutingCase(
        "routers-apart",
        "http://r2:8081: 2 of these workers",
        "--state redis://",
        pool_without_hits(
            others={"http://r2:8081": frozenset({"http://gpu1:8000", "http://gpu2:8000"})}
        ),
    ),
    RoutingCase(
        "passed-by",
        "60 requests of others beside 24",
        "the base URL",
        pool_without_hits(workers=two_workers(engine={"finished": 42.0})),
    ),
    RoutingCase(
        "cache-too-small",
        "390 of 400 blocks",
        "--gpu-memory-utilization",
        pool_without_hits(
            workers=with_event_counts(
                two_workers(working_set_tokens=900_000.0), removed_blocks=390.0
            )
        ),
    ),
    RoutingCase(
        "states-dropped",
        "prefix_cache_retention_interval 0",
        "--prefix-cache-retention-interval None",
        pool_without_hits(
            workers=two_workers(
                cache_groups=[GroupRow("full"), GroupRow("window")],
                engine={"settings": {"prefix_cache_retention_interval": "0"}},
            )
        ),
    ),
    RoutingCase(
        "events-missed",
        "gaps 3",
        "replay_endpoint",
        pool_without_hits(workers=with_event_counts(two_workers(kv_known=False), gaps=3.0)),
    ),
    RoutingCase(
        "refuted",
        "expected 4,800 tokens, found 0",
        "events=",
        pool_without_hits(
            workers=two_workers(hit_confidence=0.2), decisions=decisions(cached_tokens=0)
        ),
    ),
    RoutingCase(
        "hits-not-reported",
        "0 of 12",
        "--enable-prompt-tokens-details",
        replace(GOOD, decisions=decisions(cached_tokens=None)),
    ),
    RoutingCase(
        "nothing-shared", "0 tokens expected or found in 24", "--requests", pool_without_hits()
    ),
)
