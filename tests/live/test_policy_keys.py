"""Tests of the error messages for a policy that cannot be used, in each configuration key that
takes a policy.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.live.stack import running, until
from tests.router.settings.config_problems import problems_of


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("policy: hybrid?load_factor=-1", "policy: policy hybrid: load_factor"),
        ("policy: hybrid?load_factor=much", "policy hybrid: load_factor: could not convert"),
        ("policy: round_robin?temperature=-1", "temperature is -1.0; it must be 0 or more"),
        ("policy: nowhere.to.be:found", "cannot import nowhere.to.be:found"),
        ("policy_fallback: hybird", "policy_fallback: no policy 'hybird'"),
        ("policy_fallback: tests.live.holding:hold_all", "must be a built-in without memory"),
        ("policy_slow_ms: 0", "policy_slow_ms: "),
        ("policy_hang_s: soon", "policy_hang_s: "),
        ("policy: hybrid?temperature=.nan", "temperature: "),
        ("policy: tests.live.stack:WAIT_S", "it must be a class with a method costs"),
    ],
)
def test_the_error_for_an_invalid_policy_names_its_key(file: str, says: str, tmp_path) -> None:
    assert says in problems_of(file=file, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("hybird", "no policy 'hybird' (did you mean hybrid?)"),
        ("hybrid?load_factor=-1", "policy hybrid: load_factor"),
        (
            "hybrid?lod_factor=1",
            "has no parameter 'lod_factor' (did you mean load_factor?); valid: load_factor",
        ),
        ("tests.live.bad_policies:Unborn", "policy tests.live.bad_policies:Unborn failed: "),
    ],
)
async def test_a_reload_with_an_unusable_policy_changes_nothing(
    tmp_path: Path, policy: str, says: str
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: round_robin\n")
    async with running(tmp_path, workers=1, router=["--config", str(file)]) as stack:
        file.write_text(f"policy: {policy}\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def refused() -> bool:
            return "reload refused, the old configuration stays" in stack.router.log.read_text()

        await until(refused, "the refusal")
        assert says in stack.router.log.read_text()
        async with stack.http.get(f"{stack.admin}/policy") as reply:
            assert (await reply.json())["policy"] == "round_robin?temperature=0.0"
        status, _ = await stack.complete([1])
        assert status == 200
