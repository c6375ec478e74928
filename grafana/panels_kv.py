"""Panels of KV events and the prefix index, of tokenizing, and of replicas that share state."""

from __future__ import annotations

from grafana.drawing import Panel, Row, per_worker, rate, selected
from grafana.limits import limit

FLOW = ("batches", "stored_blocks", "removed_blocks")
SYNC = (
    *("gaps", "replays", "snapshots", "failed_syncs", "failed_polls"),
    *("disconnects", "restarts", "clears"),
)
LOST = (
    *("malformed_frames", "skipped_events", "dropped_batches", "dropped_frames"),
    *("overflows", "orphans", "duplicates"),
)


_KNOWN = selected("warmroute_worker_kv_known", 'worker=~"$worker"')
_MODE = selected("warmroute_worker_hit_mode", 'worker=~"$worker"')
_CONFIDENCE = selected("warmroute_worker_hit_confidence", 'worker=~"$worker"')


def kv_events(kinds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return a query for the events of these kinds per second, of all workers together."""
    kind = f'kind=~"{"|".join(kinds)}"'
    return ((rate("warmroute_kv_events_total", kind, "kind"), "{{kind}}"),)


KV = Row(
    "KV events and known caches",
    (
        Panel(
            "KV state",
            "Known: the router knows the worker's whole cache. Unknown: KV events of the worker "
            "are missing, so expected hits are a lower bound, or the worker has no KV events. "
            "Workers in state unknown come first.",
            "short",
            ((f"bottomk($top, {_KNOWN})", "worker {{worker}}"),),
            kind="state-timeline",
            alert="WarmrouteKvUnknown",
            limits=(limit("WarmrouteKvUnknown", "== "),),
            says=("known", "unknown"),
        ),
        Panel(
            "Exactness of expected hits",
            "Workers by mode and cause. exact: the expected hit equals the engine's hit. "
            "degraded: the expected hit is a bound. approximate: the expected hit is a guess, for "
            "example without KV events or a tokenizer. GET /workers shows each worker's cause and "
            "the remedy.",
            "short",
            ((f"sum by (mode, cause) ({_MODE})", "{{mode}} {{cause}}"),),
        ),
        Panel(
            "Gaps and how they were closed",
            "gaps: missed KV events. replays, snapshots: recovered KV events. failed_syncs: "
            "failed attempts to recover KV events. failed_polls: polls for KV events that the "
            "worker did not answer. disconnects: lost connections to a publisher. restarts: "
            "restarts of an engine. clears: events that clear a cache.",
            "suffix: per s",
            kv_events(SYNC),
            names=SYNC,
        ),
        Panel(
            "Unusable and dropped KV events",
            "malformed_frames: messages that cannot be read. skipped_events: events that the "
            "router cannot use. dropped_batches, dropped_frames: events beyond "
            "limits.events_backlog_batches. overflows: events reported more blocks than fit into "
            "the cache. orphans: blocks that waited for their parent. duplicates: batches that "
            "the router knew already, which is harmless.",
            "suffix: per s",
            kv_events(LOST),
            names=LOST,
        ),
        Panel(
            "Skipped KV events by reason",
            "KV events that changed nothing; the other events of their batches count. bad_tokens: "
            "tokens that are not plain ids. unknown_names: no tokens, and names of blocks that "
            "the router does not know, as from an offloading tier. other_block_size: blocks of "
            "another size than the worker's.",
            "suffix: per s",
            ((rate("warmroute_worker_events_skipped_total", by="reason"), "{{reason}}"),),
        ),
        Panel(
            "Waiting KV events",
            "Waiting: batches that wait for missing earlier batches. Parked: stored blocks that "
            "wait for their parent block. Both are near 0 if no KV event is missing.",
            "short",
            (
                (f"sum({selected('warmroute_worker_kv_backlog_batches')})", "waiting"),
                (f"sum({selected('warmroute_worker_kv_parked_blocks')})", "parked"),
            ),
        ),
        Panel(
            "Age of events",
            "Age of the worker's latest KV events on arrival, by the worker's time stamp and the "
            "router's clock. A negative age means that the clocks differ.",
            "s",
            per_worker("warmroute_worker_event_lag_seconds"),
            alert="WarmrouteKvEventsOld",
            limits=(limit("WarmrouteKvEventsOld", "> "),),
        ),
        Panel(
            "Event flow",
            "Batches of KV events, and the blocks that workers stored and removed.",
            "suffix: per s",
            kv_events(FLOW),
            names=FLOW,
        ),
        Panel(
            "Known blocks",
            "Distinct: blocks in the prefix index; limits.index_entries limits them. gpu, host, "
            "disk: blocks in the workers' caches by tier; a block counts once for each worker. "
            "Mirrored: blocks in the estimated caches of workers without KV events.",
            "suffix: blocks",
            (
                (selected("warmroute_index_blocks"), "distinct"),
                (selected("warmroute_index_held_blocks"), "{{tier}}"),
                (selected("warmroute_mirrored_blocks"), "mirrored"),
            ),
            5,
            names=("distinct", "gpu", "host", "disk", "mirrored"),
        ),
        Panel(
            "Memory",
            "Memory of the prefix index (limits.index_bytes), of the engines' names of blocks, of "
            "estimated caches (mirrors), of remembered token ids (limits.token_memo_bytes) and of "
            "remembered rendered prompts.",
            "bytes",
            (
                (selected("warmroute_index_bytes"), "index"),
                (selected("warmroute_kv_names_bytes"), "names"),
                (selected("warmroute_mirror_bytes"), "mirrors"),
                (selected("warmroute_token_memo_bytes"), "token ids"),
                (selected("warmroute_render_memo_bytes"), "rendered"),
            ),
            5,
            stacked=True,
        ),
        Panel(
            "Index evictions",
            "Blocks that the prefix index dropped because it is full. If the rate stays above 0, "
            "raise limits.index_entries.",
            "suffix: blocks/s",
            ((rate("warmroute_index_evicted_blocks_total"), "evicted"),),
            5,
            alert="WarmrouteIndexTooSmall",
            limits=(limit("WarmrouteIndexTooSmall", "> "),),
        ),
        Panel(
            "Corrections of estimated caches",
            "Answers that found fewer or more cached blocks than the router estimated for a "
            "worker without KV events. Many corrections mean that the configured KV capacity is "
            "wrong, or that other clients use the worker.",
            "suffix: answers/s",
            ((rate("warmroute_mirror_corrections_total", by="found"), "{{found}}"),),
            5,
            names=("fewer", "more"),
        ),
        Panel(
            "Hit confidence",
            "Share of the worker's expected hits that the router counts: 1, or less if the "
            "worker's answers report fewer cached tokens than its KV events promise. The workers "
            "with the lowest share come first.",
            "percentunit",
            ((f"bottomk($top, {_CONFIDENCE})", "worker {{worker}}"),),
            4,
            maximum=1.0,
        ),
    ),
)

TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Exact prompts by model",
            "1: the router matches the model's prompts by tokens. 0: the router matches the "
            "prompts as text, because the workers count other tokens than the router.",
            "short",
            ((selected("warmroute_tokenizer_exact"), "{{model}}"),),
            kind="state-timeline",
            alert="WarmrouteTokenizerDiffers",
            limits=(limit("WarmrouteTokenizerDiffers", "== "),),
            says=("exact", "as text"),
        ),
        Panel(
            "Prompts whose tokens differ",
            "Prompts and probes whose tokens differ between router and worker. Above 0, the "
            "router's tokenizer or template options do not match the worker's.",
            "suffix: per s",
            ((rate("warmroute_tokenizer_mismatch_total", by="model"), "{{model}}"),),
        ),
        Panel(
            "Tokenized and reused characters",
            "Encoded: characters of prompts that the router tokenized. Reused: characters of "
            "prompts whose token ids the router remembered.",
            "suffix: chars/s",
            ((rate("warmroute_tokenized_characters_total", by="result"), "{{result}}"),),
            names=("encoded", "reused"),
            stacked=True,
        ),
        Panel(
            "Prompts by source of their token ids",
            "Prompts whose token ids the router could not make itself. renderer: a renderer made "
            "the ids. memo: the router remembered the ids. beginning: the router remembered the "
            "ids of the prompt's beginning. text: no ids came in time, so the router matched the "
            "prompt approximately.",
            "suffix: per s",
            ((rate("warmroute_rendered_prompts_total", by="source"), "{{source}}"),),
            names=("renderer", "memo", "beginning", "text"),
            stacked=True,
        ),
        Panel(
            "Calls to renderers",
            "Many late, failed or busy calls mean that the renderers are too slow or too few. "
            "Able now: renderers that can make token ids now.",
            "suffix: per s",
            (
                (rate("warmroute_render_calls_total", by="result"), "{{result}}"),
                (selected("warmroute_renderers", 'status="able"'), "able now"),
            ),
        ),
    ),
)


REPLICAS = Row(
    "Replicas (where `state` is set)",
    (
        Panel(
            "Link to Redis",
            "1: the link is up. 0: the link is down, and this router continues with its last "
            "knowledge of the other routers.",
            "short",
            ((selected("warmroute_replicas_link_up"), "link"),),
            kind="state-timeline",
            alert="WarmrouteReplicaStale",
            limits=(limit("WarmrouteReplicaStale", "== "),),
            says=("up", "down"),
        ),
        Panel(
            "Time without link, and silence of peers",
            "Stale: time since the link to Redis failed. Peer: time since the latest message of "
            "the peer (another router), which sends a message at least twice a second.",
            "s",
            (
                (selected("warmroute_replicas_stale_seconds"), "stale"),
                (selected("warmroute_replicas_peer_silent_seconds"), "peer {{peer}}"),
            ),
            alert="WarmrouteReplicaStale",
        ),
        Panel(
            "Peers and leases",
            "Peers: other live routers of the fleet. Leases: leases with which this "
            "router reads KV events for all routers.",
            "short",
            (
                (selected("warmroute_replicas_peers"), "peers"),
                (selected("warmroute_replicas_leases"), "leases"),
            ),
        ),
        Panel(
            "Requests of peers",
            "Unfinished requests of each peer at workers that this router knows.",
            "short",
            ((selected("warmroute_replicas_peer_requests"), "peer {{peer}}"),),
            stacked=True,
        ),
        Panel(
            "Peers in sync",
            "1: this router knows all requests of the peer. 0: this router missed messages of the "
            "peer and has requested them.",
            "short",
            ((selected("warmroute_replicas_peer_in_sync"), "peer {{peer}}"),),
            kind="state-timeline",
            alert="WarmrouteReplicaOutOfStep",
            limits=(limit("WarmrouteReplicaOutOfStep", "== "),),
            says=("in sync", "behind"),
        ),
        Panel(
            "Differing configuration keys",
            "Keys of the configuration that must be equal on all routers and that differ on the "
            "peer. Above 0, the routers decide differently.",
            "short",
            ((selected("warmroute_replicas_disagreements"), "peer {{peer}}"),),
            alert="WarmrouteReplicasDiffer",
            limits=(limit("WarmrouteReplicasDiffer", "> "),),
        ),
        Panel(
            "Messages",
            "Messages between routers: sent by this router, and received from peers.",
            "suffix: per s",
            ((rate("warmroute_replicas_messages_total", by="direction"), "{{direction}}"),),
            names=("sent", "received"),
        ),
        Panel(
            "Bytes of messages",
            "Size of the messages between routers: sent by this router, and received from peers.",
            "Bps",
            ((rate("warmroute_replicas_bytes_total", by="direction"), "{{direction}}"),),
            names=("sent", "received"),
        ),
        Panel(
            "Workers whose KV events one router reads",
            "Workers whose KV events only one router can read. read: this router reads the "
            "events. heard: a peer sends the events to this router. unheard: this router gets no "
            "events.",
            "short",
            ((selected("warmroute_replicas_kv_sources"), "{{from}}"),),
            8,
        ),
        Panel(
            "KV events between routers",
            "Batches of KV events that this router sent to peers or received from peers. Copies: "
            "copies of a worker's whole cache.",
            "suffix: per s",
            (
                (rate("warmroute_replicas_kv_batches_total", by="direction"), "{{direction}}"),
                (
                    rate("warmroute_replicas_kv_snapshots_total", by="direction"),
                    "copies {{direction}}",
                ),
            ),
            8,
        ),
        Panel(
            "Missed KV events between routers",
            "gap: missed batches, which this router has requested again. jump: changes that need "
            "a copy of the cache. refused_snapshot: copies that this router refused.",
            "suffix: per s",
            ((rate("warmroute_replicas_kv_errors_total", by="reason"), "{{reason}}"),),
            8,
        ),
        Panel(
            "Errors between routers",
            "gap: missed messages. miscounted: wrong numbers of requests. unknown_worker: "
            "requests at workers that this router does not know. beyond_bound: more requests than "
            "this router keeps for a peer. malformed: messages that cannot be read. Lapses: times "
            "that a live router's entry (own or peer) was missing in Redis. Lost: messages that "
            "this router must send again. Foreign: foreign data under the fleet's keys. Connects: "
            "connections that this router made to Redis.",
            "suffix: per s",
            (
                (rate("warmroute_replicas_message_errors_total", by="reason"), "{{reason}}"),
                (rate("warmroute_replicas_lapses_total", by="whose"), "lapses: {{whose}}"),
                (rate("warmroute_replicas_dropped_messages_total"), "lost"),
                (rate("warmroute_replicas_malformed_total"), "foreign"),
                (rate("warmroute_replicas_connects_total"), "connects"),
            ),
            24,
            names=(
                "gap",
                "miscounted",
                "unknown_worker",
                "beyond_bound",
                "malformed",
                "lost",
                "foreign",
            ),
            alert="WarmrouteReplicaOutOfStep",
        ),
    ),
    width=6,
)
