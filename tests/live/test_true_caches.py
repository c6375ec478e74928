"""Tests that the router's view equals the engines' caches block for block, whatever happens to
events.

Engines with small caches serve a load that shares prefixes. Meanwhile their event streams lose
batches, hang and break; replays and snapshots come late, in part or never; engines and router are
killed and restarted. Whenever the load pauses, the view is compared with each engine's own
snapshot. Blocks in the view must exist in the engine, also while the view is a lower bound, and the
index holds exactly the blocks that events reported. An engine that answers with its snapshot,
however late and seldom, is known exactly after at most `TOUCHES_EXACT` further batches. An engine
whose replays are complete is known exactly, too, unless a replay got no answer while the engine was
killed or frozen. Any other engine is known within one turnover of its cache, once the replay
request after its latest connection was answered or given up; blocks that hits kept in the cache all
that while may be missing.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
import pytest

from router.admin.kv_view import Chains, KvView
from tests.effort import QUICK
from tests.live.cache_pool import KV_BLOCKS, TOUCHED_BLOCKS, Pool, differences, pool
from tests.live.event_relay import CALM, Faults
from tests.live.shared_load import SALTS, TRUNKS, Load, trunk_prompt
from tests.live.stack import MODEL, until
from tests.told_decision import decision_in

SHORT_ROUNDS = 6  # rounds: one for each of the worst faults
FULL_S = 600.0  # seconds of rounds, however many these are
ROUND_S = 3.0 if QUICK else 5.0  # of load between two comparisons; programs are killed in it
ROUTER = [
    *("--intervals-health-s", "0.1", "--timeouts-probe-s", "1"),
    *("--timeouts-speculative-s", "1", "--intervals-kv-state-s", "1"),
    *("--ejection-recover-s", "0.2"),  # the same engine may be killed in every round
]
TOUCHES_TURNOVER = KV_BLOCKS // TOUCHED_BLOCKS + 2
TOUCHES_EXACT = 3
HEARD_S = 1.0  # to hear of events in flight; else the last batch was lost, and another shows that
EXACT_S = 60.0  # no measure of anything; it allows for busy machines


async def trouble(pool: Pool, number: int) -> None:
    """Run a round of faults: faults of relays all the time, and one or two worse ones."""
    rng = pool.rng
    worse = [
        *(pool.kill_engine, pool.kill_router, pool.reset_cache, pool.freeze_engine),
        *(pool.freeze_router, pool.kill_both),
    ]
    pool.set_faults(Faults(twice=rng.choice([0.0, 0.0, 0.002])))
    until_s = time.monotonic() + ROUND_S
    for harm in (None, worse[number % len(worse)], rng.choice([None, *worse])):
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        if harm is not None:
            pool.done[harm.__name__] += 1
            await harm()
    await asyncio.sleep(max(until_s - time.monotonic(), 0.5))


async def settled(pool: Pool, number: int) -> str:
    """Wait until the router knows an engine's cache; return the remaining difference, or "".

    While the engine's cache is not known exactly, the view may lack blocks, but must not have any
    that the engine lacks.
    """
    engine = pool.engines[number]
    touches = 0
    deadline_s = time.monotonic() + EXACT_S
    while True:
        due = engine.exact_due
        patience_s = EXACT_S if due and touches else HEARD_S
        seq, view, held = await received_state(pool, number, due, patience_s)
        if held is not None:
            missing, extra = differences(view, held)
            if extra or (missing and view.exact):
                return f"{missing} missing, {extra} too many of {len(held)}: {shown(view)}"
            if not view.index_agrees:
                return f"the index has other blocks than the events told of: {shown(view)}"
            how = "exact" if view.exact else "turned over" if view.known else "a lower bound"
            pool.done[f"{engine.name}: {how}"] += 1
            if view.exact or (view.known and not due):
                engine.compared(view.exact)
                return ""
        if touches >= (TOUCHES_EXACT if due else TOUCHES_TURNOVER):
            what = f"not {'exact' if due else 'known'} after {touches} batches"
            return f"{what}, the engine's last being {seq}: {shown(view)}"
        touches += view.heard or time.monotonic() > deadline_s
        await pool.touch(number)


async def received_state(
    pool: Pool, number: int, exact: bool, patience_s: float
) -> tuple[int, KvView, Chains | None]:
    """Return (number of the engine's last batch, the router's view, the engine's blocks), with None
    for the blocks if the view does not reach that batch in time.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        seq, held = await pool.truth(number)
        view = await pool.view(number)
        same = view.next_seq == seq + 1 and not view.resyncing
        if same and (view.exact or not exact):
            return seq, view, held
        if time.monotonic() > deadline_s:
            return seq, view, held if same else None
        await asyncio.sleep(0.01)


def shown(view: KvView) -> str:
    return str(msgspec.structs.replace(view, tiers=[]))


async def compare(pool: Pool, load: Load) -> list[str]:
    """Pause the load, stop all faults, and return the differences between views and caches."""
    load.pause()

    async def idle() -> bool:
        return load.idle

    await until(idle, "the last requests")
    pool.set_faults(CALM)
    await pool.until_ready()
    found = []
    for number, engine in enumerate(pool.engines):
        wrong = await settled(pool, number)
        if wrong:
            found.append(f"{engine.name}: {wrong}")
    if not found and (wrong := await probed(pool)):
        found.append(wrong)
    return found


async def probed(pool: Pool) -> str:
    """Send a request and return how its cached tokens differ from the router's expectation, or "".

    Expectations of requests that clients gave up last for a while, so it may send more than one.
    """
    prompt = [*trunk_prompt(pool.rng.randrange(TRUNKS)), 31_000]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    if salt := pool.rng.choice(SALTS):
        body["cache_salt"] = salt
    said = ""

    async def right() -> bool:
        nonlocal said
        headers = {"x-warmroute-explain": "1"}
        url = f"{pool.url}/v1/completions"
        async with pool.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            explained = decision_in(reply.headers["x-warmroute-explain"])
            usage = (await reply.json())["usage"]
        expected = explained["expected_hit_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        view = await pool.view(explained["worker"])
        said = f"expected {expected} tokens cached, {cached} were: {shown(view)}"
        return bool(expected == cached or (expected < cached and not view.exact))

    try:
        await until(right, "a hit as expected")
    except AssertionError as error:
        return said or str(error)
    return ""


@pytest.mark.parametrize(
    ("seed", "lasts_s"),
    [
        pytest.param(1, 0.0, marks=pytest.mark.timeout(300)),
        pytest.param(2, FULL_S, marks=[pytest.mark.full, pytest.mark.timeout(1700)]),
    ],
)
async def test_the_routers_known_blocks_are_those_that_the_engines_hold(
    tmp_path: Path, seed: int, lasts_s: float
) -> None:
    state = ["--kv-state", str(tmp_path / "kv_state")]  # a killed router leaves this to the next
    async with pool(tmp_path, seed, [*ROUTER, *state]) as made:
        load = Load(lambda: made.url, random.Random(seed))
        load.start()
        until_s, rounds = time.monotonic() + lasts_s, 0
        try:
            while rounds < SHORT_ROUNDS or time.monotonic() < until_s:
                await trouble(made, rounds)
                wrong = await compare(made, load)
                story = f"seed {seed}, round {rounds}: {made.story()}, {load.met}"
                rounds += 1
                if wrong:
                    pytest.fail(f"{wrong}; {story}")
                load.resume()
        finally:
            await load.stop()
        done = made.story()
        print(f"{rounds} rounds, {load.served} served: {done}, {load.met}")
        assert {"lost", "bursts", "hangs", "replay_whole"} <= done.keys(), done
        assert load.served > 10 * ROUND_S * rounds
        assert "status 500" not in load.met, load.met
        # The rest are requests in flight or given up by their clients.
        assert load.met["hit as expected"] > load.met["hit below expected"], load.met
        assert load.met["hit above expected"] < load.met["hit as expected"] / 10, load.met
