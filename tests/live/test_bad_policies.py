"""Tests of a router whose policy raises, returns nonsense, is slow or hangs: every request is still
answered.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from router.process.hang_watch import HUNG_STATUS
from tests.live.stack import running
from tests.told_decision import decision_in

HERE = "tests.live.bad_policies"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("raises", "raised", "failed: KeyError: 'no such column'"),
        ("exits", "raised", "failed: SystemExit: 3"),
        ("nan", "nan", "cost of row 0 is nan"),
        ("too_long", "shape", "returned shape (3,) for 2 workers"),
        ("Forgetful", "raised", "failed: IndexError: list index out of range"),
        ("sleeps", "slow", "for one call; more than 5 ms is slow"),
    ],
)
async def test_every_request_is_served_while_a_failing_policy_is_suspended(
    tmp_path: Path, name: str, kind: str, says: str
) -> None:
    policy = f"{HERE}:{name}"
    async with running(tmp_path, workers=2, router=["--policy", policy]) as stack:
        headers = {"x-warmroute-explain": "1"}
        reasons = []
        for number in range(8):
            body = {"model": "tiny", "prompt": [number], "max_tokens": 1}
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                reasons.append(decision_in(reply.headers["x-warmroute-explain"])["reason"])
        assert reasons[-2:] == ["fallback"] * 2
        assert await stack.metric("warmroute_policy_suspended") == 1
        label = f'warmroute_policy_faults_total{{kind="{kind}",policy="{policy}"}}'
        async with stack.http.get(f"{stack.admin}/metrics") as reply:
            assert label in await reply.text()
        told = stack.router.log.read_text()
        assert says in told
        assert f"policy {policy} is suspended for 10 s" in told
        async with stack.http.get(f"{stack.admin}/policy") as reply:
            shown = await reply.json()
        assert shown["policy"].startswith(policy)
        assert shown["deciding"].startswith("least_requests")
        assert 0 < shown["suspended_for_s"] <= 10
        assert shown["faults"][kind] >= 5
        assert says.rpartition(": ")[2] in shown["last_fault"]
        await stack.assert_idle()


@pytest.mark.parametrize(("name", "status"), [("hangs", HUNG_STATUS), ("hangs_in_c", -27)])
async def test_a_policy_that_hangs_is_logged_before_the_process_ends(
    tmp_path: Path, name: str, status: int
) -> None:
    router = ["--policy", f"{HERE}:{name}", "--policy-hang-s", "0.5"]
    async with running(tmp_path, workers=1, router=router) as stack:
        with pytest.raises(aiohttp.ClientError):
            await stack.complete([1])
        assert await asyncio.wait_for(stack.router.process.wait(), 20) == status
        told = stack.router.log.read_text()
        assert 'bad_policies.py", line' in told
        assert f"in {name}\n" in told
        if status == HUNG_STATUS:
            assert f"policy {HERE}:{name} hangs: no answer for" in told
