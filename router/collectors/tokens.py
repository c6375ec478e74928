"""The collector of token ids that renderers make for the router."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from router.metrics.exposition import counters, gauge, gauges
from router.tokens.render_calls import RESULTS
from router.tokens.rendered_prompts import SOURCES, RenderedPrompts
from router.tokens.renderers import Renderers


def render_metrics(renderers: Renderers, rendered: RenderedPrompts) -> Iterator[Metric]:
    """Return the counts of renderers, of calls to them, and of prompts by the source of ids."""
    yield gauges(
        "warmroute_renderers",
        "Servers that could make token ids of requests, by status: `new`, `able`, "
        "`refused` (started without the flag) or `failing`",
        "status",
        dict(renderers.shown()),
    )
    yield counters(
        "warmroute_render_calls",
        "Calls to renderers by result: `rendered`, `refused` by the renderer, `late`, "
        "`failed`, or `busy` (more than `limits.render_calls` at a time)",
        "result",
        {result: renderers.calls.results[result] for result in RESULTS},
    )
    yield counters(
        "warmroute_rendered_prompts",
        "Prompts that needed a renderer, by the source of their token ids: the `renderer`, the "
        "`memo` of rendered prompts, the memo for the `beginning` of the prompt only, or no "
        "source (`text`)",
        "source",
        {source: rendered.sources[source] for source in SOURCES},
    )
    yield gauge(
        "warmroute_render_memo_bytes", "Memory of remembered rendered prompts", rendered.memo_bytes
    )
