"""The table of vLLM releases and the tests that each has passed, which every run of these tests
updates.

    python -m tests.engines.compatibility

A run adds its outcomes to `build/engines/compatibility.json`, so releases may be tested one after
the other. This program prints the table.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.engines.environment import ROOT

RESULTS = ROOT / "compatibility.json"
EXACT = "exact hits"  # a property of the tests that count exact hits
# What a column says, and the tests that show it: the ends of their names, without the release.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "recognized": ("test_a_server_is_recognized_by_its_url",),
    "tokens equal": ("test_token_counts_equal_the_servers",),
    "hits exact": ("test_hits_and_index_equal_those_of_vllm",),
    "events": (
        "test_hits_and_index_equal_those_of_vllm",
        "test_the_index_is_right_after_concurrent_requests",
        "test_a_reset_cache_is_known_to_be_empty_after_the_next_step",
    ),
    "replay": ("test_a_lost_event_connection_is_shown_and_recovers",),
    "kill -9": ("test_streams_and_requests_survive_kill_9",),
    "sleep, pause": (
        "test_a_paused_server_gets_no_requests_until_resumed",
        "test_the_cache_of_a_server_that_slept_is_empty",
    ),
    "answers, clients": (
        "test_routed_answers_equal_the_servers",
        "test_refusals_equal_the_servers",
        "test_vllm_clients.py",
    ),
    "misfits": ("test_vllm_misfits.py",),
}
Outcomes = dict[str, dict[str, str]]  # release -> test, or what it counted -> outcome


def add(seen: Outcomes, at: Path = RESULTS) -> None:
    """Add the outcomes of a run to the results file, under a lock against other runs."""
    at.parent.mkdir(parents=True, exist_ok=True)
    with at.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known: Outcomes = json.loads(file.read() or "{}")
        for release, outcomes in seen.items():
            before = known.setdefault(release, {})
            for test, outcome in outcomes.items():
                if outcome != "skipped" or test not in before:
                    before[test] = outcome
        file.truncate(0)
        file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table(known: Outcomes) -> str:
    """Return the table of releases as Markdown, newest first."""
    head = [f"| vLLM | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    newest = sorted(known, key=lambda release: [-int(n) for n in release.split(".")])
    return "\n".join([*head, *(_row(release, known[release]) for release in newest)]) + "\n"


def _row(release: str, outcomes: Mapping[str, str]) -> str:
    return f"| {release} | {' | '.join(_cell(outcomes, column) for column in COLUMNS)} |"


def _cell(outcomes: Mapping[str, str], column: str) -> str:
    wanted = COLUMNS[column]
    found = [o for test, o in outcomes.items() if any(name in test for name in wanted)]
    passed, ran = found.count("passed"), len(found) - found.count("skipped")
    if not ran:
        return "not run"
    counted = outcomes.get(EXACT)
    if column == "hits exact" and counted is not None:
        return counted if passed == ran else f"**{counted}**"
    return (str(passed) if ran > 1 else "yes") if passed == ran else f"**{passed} of {ran}**"


def main() -> int:
    """Print the table of releases."""
    if not RESULTS.exists():
        print("no run yet: make test-engines", file=sys.stderr)
        return 1
    print(table(json.loads(RESULTS.read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
