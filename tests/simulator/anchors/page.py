"""The part of docs/notes/anchors.md that is made of anchors: results, settings, reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.simulator.anchors.record import Anchor, Compared, Measured, near

PAGE = Path(__file__).parents[3] / "docs" / "notes" / "anchors.md"
BEGIN, END = "<!-- anchors: made by python -m tests.simulator.anchors -->", "<!-- anchors: end -->"
Findings = Sequence[tuple[Anchor, Measured]]


class PageError(ValueError):
    """The page has no place for what is made. The text says what is missing."""


def made(findings: Findings) -> str:
    """All that stands between the two comments."""
    parts = (results(findings), settings(findings), "\n".join(remarks(findings)))
    return "\n\n".join(part for part in parts if part)


def results(findings: Findings) -> str:
    """What was published and what is found here, a row for each ratio."""
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
    """Where each is from, and what stands for what."""
    lines = ["| anchor | source | workers; profile | workload | rules, and their order |",
             "|---|---|---|---|---|"]  # fmt: skip
    for one, _ in findings:
        where = one.hardware.gpus
        if one.hardware.right:
            where = f"{where}; {one.hardware.told}"
        cells = f"`{one.name}`", one.source, where, one.workload, f"{one.rules}; {one.order}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def remarks(findings: Findings) -> Iterator[str]:
    """Why a figure is not near, and what a source leaves out."""
    for anchor, found in findings:
        reasons = dict.fromkeys(
            compared.why for compared, ours in zip(anchor.compared, found.values, strict=True)
            if ours is not None and not near(ours, compared.published)
        )  # fmt: skip
        said = " ".join(text.strip() for text in (anchor.reach, *reasons) if text)
        if said:
            yield f"- `{anchor.name}`: {said}"


def unexplained(anchor: Anchor, found: Measured) -> list[Compared]:
    """Figures that are not near, of which no record says why."""
    return [
        compared for compared, ours in zip(anchor.compared, found.values, strict=True)
        if ours is not None and not near(ours, compared.published) and not compared.why
    ]  # fmt: skip


def figure(value: float) -> str:
    """Two decimals, or one from ten on."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def replaced(page: str, body: str) -> str:
    """`page` with `body` between the two comments. Raises `PageError` where they are not."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise PageError(f"{PAGE.name}: there is no {BEGIN} with an {END} after it")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"
