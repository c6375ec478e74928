"""Panels of what the router knows of the caches and tokens, and of what replicas share."""

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
    """Events of these kinds, of all workers together."""
    kind = f'kind=~"{"|".join(kinds)}"'
    return ((rate("warmroute_kv_events_total", kind, "kind"), "{{kind}}"),)


KV = Row(
    "What the router knows of the caches",
    (
        Panel(
            "KV state",
            "Known: no KV event of the worker is missing. Unknown: its hits are a lower bound. A "
            "worker without KV events stays unknown. The unknown ones come first.",
            "short",
            ((f"bottomk($top, {_KNOWN})", "worker {{worker}}"),),
            kind="state-timeline",
            alert="WarmrouteKvUnknown",
            limits=(limit("WarmrouteKvUnknown", "== "),),
            says=("known", "unknown"),
        ),
        Panel(
            "How exact expected hits are",
            "Workers by mode. exact: hits are known. degraded: they are a bound. approximate: they "
            "are guessed, as without KV events or a tokenizer. /workers says why, and what would "
            "lift it.",
            "short",
            ((f"sum by (mode, cause) ({_MODE})", "{{mode}} {{cause}}"),),
        ),
        Panel(
            "Gaps and how they were closed",
            "A gap is followed by a replay or a snapshot; failed_syncs: neither could be had. "
            "failed_polls: a worker that is asked for its events did not answer. disconnects: "
            "connections to a publisher that were lost. "
            "restarts: the worker's stream began anew. clears: its cache was reset.",
            "suffix: per s",
            kv_events(SYNC),
            names=SYNC,
        ),
        Panel(
            "Events that told nothing",
            "malformed_frames: bytes that are no event. skipped_events: of no use here. "
            "dropped_batches, dropped_frames, overflows: beyond a bound. orphans: blocks that "
            "waited for their parent. duplicates: known already, harmless.",
            "suffix: per s",
            kv_events(LOST),
            names=LOST,
        ),
        Panel(
            "Events left out, by reason",
            "KV events that changed nothing, one by one; all others of their batches count. "
            "bad_tokens: not plain ids. unknown_names: blocks without tokens that nothing told "
            "of before, as an offloading tier has them. other_block_size: not the worker's.",
            "suffix: per s",
            ((rate("warmroute_worker_events_skipped_total", by="reason"), "{{reason}}"),),
        ),
        Panel(
            "Events that wait",
            "Batches that wait for missing ones before them, and stored blocks whose parent never "
            "came. Both are near 0 when all is known.",
            "short",
            (
                (f"sum({selected('warmroute_worker_kv_backlog_batches')})", "waiting"),
                (f"sum({selected('warmroute_worker_kv_parked_blocks')})", "parked"),
            ),
        ),
        Panel(
            "Age of events",
            "How old the latest KV events were when they came: the worker's time stamp against "
            "the router's clock. Negative: the clocks differ.",
            "s",
            per_worker("warmroute_worker_event_lag_seconds"),
            alert="WarmrouteKvEventsOld",
            limits=(limit("WarmrouteKvEventsOld", "> "),),
        ),
        Panel(
            "Event flow",
            "Batches of KV events, and the blocks that workers stored and evicted.",
            "suffix: per s",
            kv_events(FLOW),
            names=FLOW,
        ),
        Panel(
            "Blocks that are known of",
            "Blocks in the prefix index: distinct ones, bound by limits.index_entries, and each "
            "worker's counted, by tier. Mirrored: believed to be in caches that publish no events.",
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
            "Of the prefix index (limits.index_bytes), of the engines' names of blocks, of the "
            "mirrors and of known token ids (limits.token_memo_bytes).",
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
            "Index, evictions",
            "Blocks forgotten because the index is full. Above 0 for long: raise "
            "limits.index_entries.",
            "suffix: blocks/s",
            ((rate("warmroute_index_evicted_blocks_total"), "evicted"),),
            5,
            alert="WarmrouteIndexTooSmall",
            limits=(limit("WarmrouteIndexTooSmall", "> "),),
        ),
        Panel(
            "Mirrors proved wrong",
            "Answers that found fewer or more blocks than the mirror of a worker without events "
            "believed in. Many: its KV capacity is not what was told, or others use it too.",
            "suffix: answers/s",
            ((rate("warmroute_mirror_corrections_total", by="found"), "{{found}}"),),
            5,
            names=("fewer", "more"),
        ),
        Panel(
            "Hits that count",
            "Share of the hits by a worker's KV events that counts: 1, but where its answers keep "
            "finding less than its events promise. The least believed come first.",
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
            "1: the model's prompts are placed by their tokens. 0: its workers count otherwise "
            "than the router, so they are placed by text.",
            "short",
            ((selected("warmroute_tokenizer_exact"), "{{model}}"),),
            kind="state-timeline",
            alert="WarmrouteTokenizerDiffers",
            limits=(limit("WarmrouteTokenizerDiffers", "== "),),
            says=("exact", "as text"),
        ),
        Panel(
            "Prompts whose tokens differ",
            "Prompts and probes that a worker tokenized otherwise. Any: the router's tokenizer or "
            "template options are not the worker's.",
            "suffix: per s",
            ((rate("warmroute_tokenizer_mismatch_total", by="model"), "{{model}}"),),
        ),
        Panel(
            "Tokenizing, and what is saved",
            "Characters of prompts: encoded, or reused because their ids were known.",
            "suffix: chars/s",
            ((rate("warmroute_tokenized_characters_total", by="result"), "{{result}}"),),
            names=("encoded", "reused"),
            stacked=True,
        ),
        Panel(
            "Prompts by renderers",
            "Where token ids came from that the router could not make itself. Text: no renderer "
            "gave them in time, so the prompt was matched approximately.",
            "suffix: per s",
            ((rate("warmroute_rendered_prompts_total", by="source"), "{{source}}"),),
            names=("renderer", "memo", "beginning", "text"),
            stacked=True,
        ),
        Panel(
            "Calls of renderers",
            "Late, failed or busy for long: the renderer is too slow, or too few.",
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
            "1: it is up. 0: this router goes on with what it knew of the others.",
            "short",
            ((selected("warmroute_replicas_link_up"), "link"),),
            kind="state-timeline",
            alert="WarmrouteReplicaStale",
            limits=(limit("WarmrouteReplicaStale", "== "),),
            says=("up", "down"),
        ),
        Panel(
            "Stale for, and silence of peers",
            "Stale: how long the link has been down. Peers: time since another router's latest "
            "message; each says something twice a second.",
            "s",
            (
                (selected("warmroute_replicas_stale_seconds"), "stale"),
                (selected("warmroute_replicas_peer_silent_seconds"), "peer {{peer}}"),
            ),
            alert="WarmrouteReplicaStale",
        ),
        Panel(
            "Other routers, leases",
            "Routers of the fleet besides this one, and leases that this one has, to read for all.",
            "short",
            (
                (selected("warmroute_replicas_peers"), "peers"),
                (selected("warmroute_replicas_leases"), "leases"),
            ),
        ),
        Panel(
            "Requests of others",
            "Unfinished requests of each other router at workers that this one knows.",
            "short",
            ((selected("warmroute_replicas_peer_requests"), "peer {{peer}}"),),
            stacked=True,
        ),
        Panel(
            "In step",
            "1: all that another router has at workers is known here. 0: something is missing and "
            "was asked for.",
            "short",
            ((selected("warmroute_replicas_peer_in_sync"), "peer {{peer}}"),),
            kind="state-timeline",
            alert="WarmrouteReplicaOutOfStep",
            limits=(limit("WarmrouteReplicaOutOfStep", "== "),),
            says=("in step", "behind"),
        ),
        Panel(
            "Keys in which others differ",
            "Of the configuration's keys that must be alike. Any: the routers do not decide alike.",
            "short",
            ((selected("warmroute_replicas_disagreements"), "peer {{peer}}"),),
            alert="WarmrouteReplicasDiffer",
            limits=(limit("WarmrouteReplicasDiffer", "> "),),
        ),
        Panel(
            "Messages",
            "Between routers: told by this one, heard of others.",
            "suffix: per s",
            ((rate("warmroute_replicas_messages_total", by="direction"), "{{direction}}"),),
            names=("sent", "received"),
        ),
        Panel(
            "Bytes of messages",
            "Between routers: told by this one, heard of others.",
            "Bps",
            ((rate("warmroute_replicas_bytes_total", by="direction"), "{{direction}}"),),
            names=("sent", "received"),
        ),
        Panel(
            "Events of one reader",
            "Workers whose KV events one router alone can read: read here, heard of it, unheard.",
            "short",
            ((selected("warmroute_replicas_kv_sources"), "{{from}}"),),
            8,
        ),
        Panel(
            "Batches of these",
            "Between routers; copies: all that is known of a worker's cache.",
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
            "What was missed of these",
            "gaps: missed, and asked for; jumps: changes that only a copy tells; refused copies.",
            "suffix: per s",
            ((rate("warmroute_replicas_kv_errors_total", by="reason"), "{{reason}}"),),
            8,
        ),
        Panel(
            "What went wrong",
            "gaps in messages, miscounted requests, those at strange workers or beyond the bound, "
            "malformed messages; lapses: a live router that was missing (own, peer). Lost: own "
            "messages. Foreign: entries under our keys. Connects: times the link was up anew.",
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
