"""A key's use counted in another process than the one that asks for the key."""

from __future__ import annotations

from pathlib import Path

from router.keys.ring import KeyRing

KEY = "sk-aaaaaaaaaaaaaaaa"


def test_one_ring_counts_what_another_one_lets_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY} blue inflight=1 tokens_per_s=1 tokens_burst=50\n- grey inflight=1\n")
    leader = KeyRing(file, lambda: 0.0)
    satellite = KeyRing(file, lambda: 0.0, leader.secret)
    for key in (satellite.of_key(KEY), satellite.of_tenant("grey")):
        assert key is not None
        assert key.allowance is None
        grant, other = leader.grant(key.whose), leader.grant(key.whose)
        assert grant is not None
        assert other is not None
        assert grant.begin(0.0) is None
        refused = other.begin(0.0)
        assert refused is not None
        assert "1 requests at a time" in refused.what
        other.end(0.0)  # it was not let in, so nothing of it counts
        assert other.begin(0.0) is not None
        grant.end(1.0)
        grant.end(1.0)
        assert other.begin(1.0) is None
        other.end(1.0)
    own = leader.of_key(KEY)
    assert own is not None
    assert (own.whose, own.allowance is None) == (b"", False)
    strange = KeyRing(file, lambda: 0.0).of_key(KEY)
    assert strange is not None
    assert leader.grant(strange.whose) is None
    assert leader.grant(b"") is None


def test_a_request_is_charged_once_by_what_its_worker_says(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY} blue tokens_per_s=1 tokens_burst=50\n")
    leader = KeyRing(file, lambda: 0.0)
    satellite = KeyRing(file, lambda: 0.0, leader.secret).of_key(KEY)
    assert satellite is not None
    grant = leader.grant(satellite.whose)
    assert grant is not None
    assert grant.begin(0.0) is None
    assert grant.spend(0.0, 20) is None
    assert dict(grant.headers(0.0))["x-ratelimit-remaining-tokens"] == "30"
    grant.used(0.0, 22, 5)
    assert dict(grant.headers(0.0))["x-ratelimit-remaining-tokens"] == "23"
    grant.end(0.0)


def test_limits_that_go_and_come_leave_the_count_right(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY} blue inflight=1\n")
    leader = KeyRing(file, lambda: 0.0)
    satellite = KeyRing(file, lambda: 0.0, leader.secret)
    key = satellite.of_key(KEY)
    assert key is not None
    grant = leader.grant(key.whose)
    assert grant is not None
    assert grant.begin(0.0) is None
    file.write_text(f"{KEY} blue inflight=2\n")
    leader.reload()
    other, third = leader.grant(key.whose), leader.grant(key.whose)
    assert other is not None
    assert third is not None
    assert other.begin(0.0) is None
    assert third.begin(0.0) is not None
    file.write_text(f"{KEY} blue\n")
    leader.reload()
    assert leader.grant(key.whose) is None
    grant.end(1.0)  # of limits that are gone
    other.end(1.0)
