"""Tests that each cause of low hits is named first with its evidence, and that a healthy pool has
no findings.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from router.doctor.routing.catalogue import ALL_ROUTING_CAUSES, judge_routing
from router.doctor.routing.facts import HitsRow, PoolFacts
from router.doctor.routing.findings import RoutingReport
from tests.router.doctor.routing.routing_pools import (
    CASES,
    COLD,
    GOOD,
    RoutingCase,
    decisions,
    two_workers,
    worker,
)
from tests.tidy.checkout import ROOT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cause)
def test_the_cause_is_the_first_finding_with_evidence_and_one_change(case: RoutingCase) -> None:
    found = judge_routing(case.sick)
    assert [one.cause.name for one in found][:1] == [case.cause], found
    verdict = found[0].verdict
    assert case.says in " | ".join(one.says for one in verdict.figures)
    assert all(one.source for one in verdict.figures)
    assert case.change in verdict.change
    assert verdict.wrong.endswith(".")
    assert 0 <= verdict.weight <= 1


def test_each_cause_has_a_test_case() -> None:
    assert {case.cause for case in CASES} == {cause.name for cause in ALL_ROUTING_CAUSES}


def test_the_page_lists_all_causes_in_order() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("## Why are cache hits zero?\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^- `([a-z-]+)`: ", section, re.MULTILINE)
    assert listed == [cause.name for cause in ALL_ROUTING_CAUSES]


def test_a_healthy_pool_has_no_findings() -> None:
    assert judge_routing(GOOD) == ()
    report = RoutingReport(GOOD, (), "again")
    assert report.status == 0
    assert report.text().startswith("Nothing found.\nHits: of 10,560 prompt tokens of 24 requests")


def test_the_report_says_why_hits_are_approximate() -> None:
    hits = HitsRow("approximate", "no-tokenizer", "The router has no tokenizer.", "--tokenizer DIR")
    text = RoutingReport(
        replace(GOOD, workers=two_workers(hits=hits), decisions=()), (), "again"
    ).text()
    assert text.startswith("Nothing found.\n")
    assert (
        "\nExpected hits are only approximate at worker 0 (http://gpu1:8000), worker 1 "
        "(http://gpu2:8000). The router has no tokenizer. To make them exact: --tokenizer DIR"
    ) in text
    for exact in (two_workers(hits=HitsRow("exact")), two_workers(hits=hits, events=None)):
        assert "approximate" not in RoutingReport(replace(GOOD, workers=exact), (), "").text()


def test_a_pool_without_requests_or_workers_has_no_findings() -> None:
    for facts in (PoolFacts("r"), replace(GOOD, decisions=())):
        assert judge_routing(facts) == ()
        assert "no request" in RoutingReport(facts, (), "").text()
        json.dumps(RoutingReport(facts, (), "").shown(), allow_nan=False)


def test_normal_conditions_are_not_reported_as_causes() -> None:
    hybrid = two_workers(block_size=768, engine={"settings": {"block_size": "16"}})
    ranks = tuple(replace(one, answered=1.0) for one in two_workers(rank=1))
    few = decisions(3, expected_hit_tokens=0, cached_tokens=0)
    for facts in (
        replace(GOOD, workers=hybrid),  # the engine's page has 16, its events another size
        replace(GOOD, workers=ranks),  # an engine's counts are of all its ranks
        replace(GOOD, decisions=few),
        replace(GOOD, tokenizer_exact={}, decisions=decisions(approximate=True)),
        replace(GOOD, workers=two_workers(kind="triton", events=None, engine={"endpoints": None})),
        replace(GOOD, others={"http://r2:8081": frozenset({"http://gpu9:8000"})}),
        replace(GOOD, workers=(worker(0, state="down", events=None),)),
    ):
        assert judge_routing(facts) == (), facts


def test_the_cause_that_affects_more_tokens_is_first() -> None:
    off = worker(0, events=None)
    elsewhere = worker(1, told_block_size=32)
    rows = decisions(8, workers=1) + tuple(one for one in decisions(24) if one.worker)
    facts = replace(GOOD, workers=(off, elsewhere), decisions=rows)
    assert [one.cause.name for one in judge_routing(facts)] == ["block-sizes", "events-not-read"]


def test_the_report_has_each_finding_with_its_sources() -> None:
    facts = replace(GOOD, decisions=COLD, workers=two_workers(events=None), unread=("engine x",))
    report = RoutingReport(facts, judge_routing(facts), "warmroute doctor --routing URL")
    text = report.text()
    for part in (
        "1 cause found.",
        "1. events-not-read: the router reads no KV events, at worker 0 (http://gpu1:8000)",
        "   evidence  the engine publishes at tcp://gpu1:5557 (the engine's /kv_event_sources)",
        "   change    take events=none out",
        "After the change ask again: warmroute doctor --routing URL",
        "not looked at: engine x",
    ):
        assert part in text
    shown = json.loads(json.dumps(report.shown(), allow_nan=False))
    assert (report.status, shown["status"]) == (1, 1)
    (finding,) = shown["findings"]
    assert finding["cause"] == "events-not-read"
    assert finding["evidence"][0] == {
        "figure": "the router reads events: no",
        "source": "GET /workers",
    }
