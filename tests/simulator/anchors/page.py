"""Makes the part of docs/notes/anchors.md that comes from the anchors: results, settings and
reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.simulator.anchors.record import Anchor, Compared, Measured, near

PAGE = Path(__file__).parents[3] / "docs" / "notes" / "anchors.md"
BEGIN, END = "<!-- anchors: made by python -m tests.simulator.anchors -->", "<!-- anchors: end -->"
Findings = Sequence[tuple[Anchor, Measured]]


class PageError(ValueError):
    """Raised if the page has no place for the generated part; the text says what is missing."""


def markdown_of(findings: Findings) -> str:
    """Return the Markdown that belongs between the two comments of docs/notes/anchors.md."""
    parts = (results(findings), settings(findings), "\n".join(remarks(findings)))
    return "\n\n".join(part for part in parts if part)


def results(findings: Findings) -> str:
    """Return a table of the published figures and of those of our replays, with a row for each
    ratio.
    """
    lines = ["| anchor | order | compared | published | here | within 25 % |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for anchor, found in findings:
        name, order = f"`{anchor.name}`", "as published" if found.ordered else "**another**"
        for compared, ours in zip(anchor.compared, found.values, strict=True):
            assert ours is not None, anchor.name
            cells = (
                *(name, order, compared.what, figure(compared.published), figure(ours)),
                "yes" if near(ours, compared.published) else "**no**",
            )
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
            name = order = ""
    return "\n".join(lines).replace("|  |", "| |")


def settings(findings: Findings) -> str:
    """Return a table that names each anchor's source, its workers with our profile, its workload
    and its rules.
    """
    lines = ["| anchor | source | workers; profile | workload | rules, and their order |",
             "|---|---|---|---|---|"]  # fmt: skip
    for one, _ in findings:
        where = one.hardware.gpus
        if one.hardware.right:
            where = f"{where}; {one.hardware.as_markdown}"
        cells = f"`{one.name}`", one.source, where, one.workload, f"{one.rules}; {one.order}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def remarks(findings: Findings) -> Iterator[str]:
    """Yield, for each anchor, why a figure is not near the published one and what the source leaves
    out.
    """
    for anchor, found in findings:
        reasons = dict.fromkeys(
            compared.why for compared, ours in zip(anchor.compared, found.values, strict=True)
            if ours is not None and not near(ours, compared.published)
        )  # fmt: skip
        said = " ".join(text.strip() for text in (anchor.reach, *reasons) if text)
        if said:
            yield f"- `{anchor.name}`: {said}"


def unexplained(anchor: Anchor, found: Measured) -> list[Compared]:
    """Return the figures that are not near the published ones and for which no record says why."""
    return [
        compared for compared, ours in zip(anchor.compared, found.values, strict=True)
        if ours is not None and not near(ours, compared.published) and not compared.why
    ]  # fmt: skip


def figure(value: float) -> str:
    """Return `value` with two decimals, or with one from ten on."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def replaced(page: str, body: str) -> str:
    """Return `page` with `body` between the two comments. Raises `PageError` if the comments are
    missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise PageError(f"{PAGE.name}: there is no {BEGIN} with an {END} after it")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"
