"""What the router knows of the caches, by KV events and by mirrors, and of the tokens."""

from __future__ import annotations

from grafana.panel import Panel, Row, per_worker, rate, selected

FLOW = ("batches", "stored_blocks", "removed_blocks")
SYNC = ("gaps", "replays", "snapshots", "failed_syncs", "failed_polls", "restarts", "clears")
LOST = (
    *("malformed_frames", "skipped_events", "dropped_batches", "dropped_frames"),
    *("overflows", "orphans", "duplicates"),
)


_KNOWN = selected("warmroute_worker_kv_known", 'worker=~"$worker"')


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
        ),
        Panel(
            "Gaps and how they were closed",
            "A gap is followed by a replay or a snapshot; failed_syncs: neither could be had. "
            "failed_polls: a worker that is asked for its events did not answer. "
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
            6,
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
            ),
            6,
            stacked=True,
        ),
        Panel(
            "Index, evictions",
            "Blocks forgotten because the index is full. Above 0 for long: raise "
            "limits.index_entries.",
            "suffix: blocks/s",
            ((rate("warmroute_index_evicted_blocks_total"), "evicted"),),
            6,
        ),
        Panel(
            "Mirrors proved wrong",
            "Answers that found fewer or more blocks than the mirror of a worker without events "
            "believed in. Many: its KV capacity is not what was told, or others use it too.",
            "suffix: answers/s",
            ((rate("warmroute_mirror_corrections_total", by="found"), "{{found}}"),),
            6,
            names=("fewer", "more"),
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
            maximum=1.0,
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
    ),
)
