"""Tests of arbitrary answers of an engine: the engine is recognized, or rejected with a reason, and
a load that is read is valid.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.events import WireError
from router.engines.adapter import UnrecognizedError
from router.engines.worker_spec import parse_worker_spec
from router.fleet.recognize import recognize
from tests.effort import examples
from tests.router import sglang_pages, triton_pages, vllm_pages
from tests.router.engines import trtllm_pages
from tests.router.engines.engine_pages import Pages, engine

SGLANG = sglang_pages.SGLANG
KV_EVENTS = {**sglang_pages.INFO, "kv_events": sglang_pages.EVENTS}
ENGINES: list[Pages] = [
    {**vllm_pages.VLLM, "/kv_event_sources": vllm_pages.SOURCES},
    {**SGLANG, "/server_info": KV_EVENTS},
    {**SGLANG, "/v1/loads": 404, "/get_load": [{"num_reqs": 5, "num_waiting_reqs": 2}]},
    {**SGLANG, "/v1/loads": 404, "/metrics": sglang_pages.METRICS},
    trtllm_pages.NEW,
    {**trtllm_pages.OLD, "/metrics": [trtllm_pages.iteration(2, 1)]},
    {**triton_pages.TRITON, "/metrics": triton_pages.NEWER},
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**30, -0.5, 1e300, "", "x", "16", [], {}]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["0", "1", "5000", "data"]), st.integers(), max_size=2),
)


@st.composite
def changed_engine(draw: st.DrawFn) -> Pages:
    """Draw an engine of which one page is changed: a value in its JSON, or its bytes."""
    pages = dict(draw(st.sampled_from(ENGINES)))
    path = draw(st.sampled_from(sorted(pages)))
    page = pages[path]
    if not isinstance(page, str | bytes | int) and draw(st.booleans()):
        pages[path] = msgspec.json.encode(_changed(draw, page))
        return pages
    text = page if isinstance(page, str) else msgspec.json.encode(page).decode()
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(begin + 20, len(text))))
    other = draw(st.sampled_from(["", "-", "9", "e9", "NaN", '"', "}", "\n", "\x00", "é"]))
    pages[path] = (text[:begin] + other + text[end:]).encode()
    return pages


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """Draw `value` with a random other value in one place."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        return [_changed(draw, value[0]), *value[1:]]
    return draw(ODD)


async def check_recognition(pages: Pages) -> None:
    async with engine(pages) as url, aiohttp.ClientSession() as http:
        try:
            one = await recognize(http, parse_worker_spec(url), 5.0)
        except (UnrecognizedError, WireError):
            return
        facts = one.facts
        assert 1 <= facts.block_size <= 4_096
        assert math.isnan(facts.kv_capacity_tokens) or 0 < facts.kv_capacity_tokens < 1e16
        if one.loads is None:
            return
        try:
            loads = await one.loads.read(http, aiohttp.ClientTimeout(total=5.0))
        except WireError:
            return
        for rank, load in loads.items():
            assert 0 <= rank < 4_096
            assert 0 <= load.running <= 1e18
            assert 0 <= load.waiting <= 1e18
            assert math.isnan(load.kv_used_tokens) or 0 <= load.kv_used_tokens < math.inf
            assert math.isnan(load.kv_usage) or 0 <= load.kv_usage <= 1


@settings(max_examples=examples(100), deadline=None)
@given(changed_engine())
def test_an_engine_with_one_bad_page_is_recognized_or_refused_with_a_reason(pages: Pages) -> None:
    asyncio.run(check_recognition(pages))
