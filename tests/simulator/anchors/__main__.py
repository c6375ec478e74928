"""Replays published results and compares its figures with theirs.

    python -m tests.simulator.anchors [--check] [NAME]...

Without names, the command replays every anchor (a published result with its settings) in full,
which takes some minutes on one core, and rewrites the tables of anchors in docs/notes/anchors.md.
With names, it replays and prints only these anchors and leaves the page as it is. `--check` writes
nothing. The exit status is 1 if rules rank otherwise than published, if a ratio is not near the
published one and no record says why, or, with `--check`, if the page has other figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulator.anchors.catalogue import ANCHORS
from tests.simulator.anchors.page import PAGE, Findings, figure, markdown_of, replaced, unexplained
from tests.simulator.anchors.record import Anchor, Measured, near


def print_result(anchor: Anchor, found: Measured, cpu_s: float) -> None:
    """Print the order and the figures that the replay of one anchor gave."""
    print(f"{anchor.name}: {'order as published' if found.ordered else 'ANOTHER ORDER'}, "
          f"{cpu_s:.0f} s", flush=True)  # fmt: skip
    for compared, ours in zip(anchor.compared, found.values, strict=True):
        assert ours is not None, compared.what
        verdict = "" if near(ours, compared.published) else "   not within 25 %"
        print(f"    {figure(compared.published):>6} {figure(ours):>6}  {compared.what}{verdict}")


def measured(anchors: Sequence[Anchor]) -> Findings:
    """Return what the replay of each of `anchors` in full found; the anchors run one after the
    other.
    """
    findings = []
    for anchor in anchors:
        began_s = time.process_time()
        found = anchor.measure(True)
        print_result(anchor, found, time.process_time() - began_s)
        findings.append((anchor, found))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the module's docstring describes; return its exit status."""
    parser = argparse.ArgumentParser(description="Published results beside replays of them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all, and the page")
    parser.add_argument("--check", action="store_true", help="write nothing; 1: the page differs")
    options = parser.parse_args(arguments)
    known = {anchor.name: anchor for anchor in ANCHORS}
    if wrong := [name for name in options.names if name not in known]:
        parser.error(f"no anchor {', '.join(wrong)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(ANCHORS)
    for anchor in chosen:
        if anchor.missing:
            print(f"{anchor.name}: {', '.join(anchor.missing)} not here", file=sys.stderr)
            return 2
    findings = measured(chosen)
    bad = [a.name for a, found in findings if not found.ordered or unexplained(a, found)]
    if bad:
        print(f"ranked otherwise, or not near and nobody says why: {', '.join(bad)}")
    if options.names:
        return int(bool(bad))
    page = PAGE.read_text()
    anew = replaced(page, markdown_of(findings))
    print(f"{PAGE.name}: {'as it was' if anew == page else 'other figures'}")
    if not options.check:
        PAGE.write_text(anew)
    return int(bool(bad) or (options.check and anew != page))


if __name__ == "__main__":
    sys.exit(main())
