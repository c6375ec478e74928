"""What a comparison says in words: who is best, what that costs, whether chance could have done it.

Only what the figures say; a lead within the seeds' spread is called one.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.report.aggregate import by_policy, paired
from simulator.report.figures import Figure, figure
from simulator.report.leads import Groups, Lead, lead, means
from simulator.report.row import ReplayRow
from simulator.wording import percent

# By these a policy is chosen: by the first of them that has a leader.
CHOOSING = ("goodput.share", "ttft_ms.p90", "ttft_ms.mean", "e2e_ms.mean", "hit_rate_tokens")
HEADLINES = (
    *("goodput.share", "ttft_ms.p90", "ttft_ms.mean", "tpot_ms.mean", "e2e_ms.mean"),
    *("output_tokens_per_s", "hit_rate_tokens", "load_skew_busy"),
)
NAMES = {
    "goodput.share": "requests within the limits",
    "ttft_ms.mean": "mean TTFT",
    "tpot_ms.mean": "mean TPOT",
    "e2e_ms.mean": "mean time to the last token",
    "hit_rate_tokens": "hit rate",
    "output_tokens_per_s": "output",
    "load_skew_busy": "busiest worker over the mean",
}
ONE_SEED = "One seed only: what chance does to these figures is not known; replay several seeds."
SMALL = 0.01  # of a figure: told as a cost only where the seeds agree on it


def verdict(rows: Sequence[ReplayRow]) -> list[str]:
    """Sentences for the top of a report, the answer first."""
    groups = by_policy(rows)
    if not rows:
        return ["Nothing was replayed."]
    if not any(row.completed for row in rows):
        return ["No request was completed."]
    if len(groups) == 1:
        return [_alone(next(iter(groups)), groups), *_losses(groups)]
    chosen = _chosen(groups)
    if chosen is None:
        return ["The policies cannot be told apart by any figure.", *_losses(groups)]
    unsure = [ONE_SEED] if chosen.sure is None else []
    costs = _costs(chosen.winner, groups)
    return [_headline(chosen, rows), *costs, *_losses(groups), *unsure]


def leads_told(rows: Sequence[ReplayRow]) -> list[tuple[str, bool]]:
    """For each headline figure who leads by how much, and whether that is beyond chance."""
    groups = by_policy(rows)
    leads = [found for name in HEADLINES if (found := lead(figure(name), groups))]
    return [(_lead_line(found), bool(found.sure)) for found in leads]


def _chosen(groups: Groups) -> Lead | None:
    """The first figure with a leader beyond chance; else the first with any."""
    leads = [found for name in CHOOSING if (found := lead(figure(name), groups))]
    return next((found for found in leads if found.sure), leads[0] if leads else None)


def _headline(chosen: Lead, rows: Sequence[ReplayRow]) -> str:
    one = chosen.figure
    limits = rows[0].goodput
    by = f"by {_name(one)}"
    if one.name == "goodput.share":
        by += f" (TTFT {limits.ttft_ms:g} ms, TPOT {limits.tpot_ms:g} ms)"
    return (
        f"{chosen.winner} is best {by}: {one.said(chosen.value)} against "
        f"{one.said(chosen.other)} with {chosen.second}{_surely(chosen)}."
    )


def _costs(winner: str, groups: Groups) -> list[str]:
    """By which figures another policy is better than the winner, and by how much."""
    costs = []
    for name in HEADLINES:
        one = figure(name)
        ranked = means(one, groups)
        leader = next(iter(ranked), None)
        if leader is None or winner not in ranked or ranked[leader] == ranked[winner]:
            continue
        difference = paired(one, groups[winner], groups[leader])
        cost = Lead(one, leader, ranked[leader], winner, ranked[winner], difference)
        small = abs(cost.value - cost.other) < SMALL * max(abs(cost.value), abs(cost.other))
        if cost.sure or (cost.sure is None and not small):
            told = f"{_name(one)} {one.said(cost.other)} against {one.said(cost.value)}"
            costs.append(f"{told} with {leader}")
    if not costs:
        return [f"By none of the other figures is {winner} clearly worse than another."]
    return [f"What {winner} costs: {'; '.join(costs)}."]


def _lead_line(found: Lead) -> str:
    one = found.figure
    return (
        f"{_upper(_name(one))}: {found.winner} {one.said(found.value)}, then {found.second} "
        f"{one.said(found.other)}{_apart(found)}{_surely(found)}."
    )


def _apart(found: Lead) -> str:
    """How far apart two values are, in percent of the second one; shares say it themselves."""
    if found.figure.show is percent or not found.other:
        return ""
    change = found.value / found.other - 1
    return f" ({change:+.0%})" if abs(change) >= 0.005 else " (under 1 %)"


def _surely(found: Lead) -> str:
    if found.sure is None:
        return ""
    if found.spreads is None:
        return ", the same lead with every seed"
    if found.sure:
        return f", {found.spreads:.1f} times what the seeds are apart"
    return ", which is within what the seeds are apart: chance may turn it around"


def _losses(groups: Groups) -> list[str]:
    """Policies whose times leave out requests that got no answer."""
    told = []
    for label, rows in groups.items():
        asked = sum(row.requests for row in rows)
        unanswered = sum(row.rejected + row.failed for row in rows)
        if unanswered:
            told.append(f"{label} {percent(unanswered / asked)}")
    return [f"Left without an answer: {', '.join(told)}; times are of the others."] if told else []


def _alone(label: str, groups: Groups) -> str:
    told = []
    for name in HEADLINES:
        one = figure(name)
        if label in (found := means(one, groups)):
            told.append(f"{_name(one)} {one.said(found[label])}")
    return f"{label} was replayed alone: {', '.join(told)}."


def _name(one: Figure) -> str:
    return NAMES.get(one.name, one.title)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
