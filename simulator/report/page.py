"""A report as data, which becomes one self-contained HTML page that is readable on a phone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jinja2
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from simulator import DATA
from simulator.report.plots import for_page

MARK = "*"  # of the best cells, for readers and terminals without colour
# Marks of cells that are noise or too uncertain; `figures.marks` explains them.
NOISE, NOT_RESOLVED, WIDE = "~", "not resolved", "±?"
GAP = 1  # the divider between two cells in a terminal


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement that the report should confirm, with its figures and whether it holds."""

    text: str
    holds: bool
    sign: str = ""  # before the text; "": the sign of `holds`

    def __post_init__(self) -> None:
        if not self.sign:
            object.__setattr__(self, "sign", "✓" if self.holds else "✗")


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG picture with its alternative text, caption and list. Lifetime: report."""

    svg: str
    alt: str
    caption: str = ""
    items: Sequence[tuple[str, str]] = ()  # a numbered list below it: name, text


@dataclass(frozen=True, slots=True)
class Card:
    """The pictures of one policy, shown in a row with the cards of others. Lifetime: report."""

    title: str
    text: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Opening:
    """The top of a page: a row of cards with a sentence below. Lifetime: report."""

    cards: Sequence[Card]
    caption: str


@dataclass(frozen=True, slots=True)
class Key:
    """The legend of a section: the meaning of its colours. Lifetime: report."""

    swatches: Sequence[tuple[str, str]] = ()  # name, colour
    scales: Sequence[tuple[str, str]] = ()  # the words at both ends
    colours: Sequence[str] = ()  # of the scales


@dataclass(frozen=True, slots=True)
class Table:
    """A table of figures whose first column names the rows. Lifetime: report."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column)
    strong: frozenset[int] = frozenset()  # rows that stand out
    words: bool = False  # cells are text and may be long
    summary: str = ""  # on a page: folded under this line

    def in_terminal(self, width: int) -> list[RenderableType]:
        """Return the table split into as many tables as `width` columns need, each with a blank
        line after it.
        """
        marked = bool(self.best)
        names = [row[0] for row in self.rows]
        columns = [
            (title, [self._text(row, column, marked) for row in range(len(self.rows))])
            for column, title in enumerate(self.head)
        ][1:]
        room = width - max((len(name) for name in names), default=0) - GAP
        shown: list[RenderableType] = []
        for part in _parts(columns, room):
            table = RichTable(box=SIMPLE_HEAD, padding=0, show_edge=False)
            table.add_column(self.head[0], no_wrap=True)
            for title, _ in part:
                table.add_column(title, justify="right", no_wrap=True)
            for number, name in enumerate(names):
                table.add_row(Text(name), *(cells[number] for _, cells in part))
            shown += [table, Text()]
        return shown

    def in_markdown(self) -> list[str]:
        """Return the table's lines in Markdown, with the names of the rows as code."""
        rows = [[f"`{name}`", *cells] for name, *cells in self.rows]
        lines = [self.head, ["---"] * len(self.head), *rows]
        return [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        ]

    @property
    def cells(self) -> list[str]:
        """All cells of the table, row by row."""
        return [cell for row in self.rows for cell in row]

    def _text(self, row: int, column: int, marked: bool) -> Text:
        cell = self.rows[row][column]
        if (row, column) in self.best:
            return Text(f"{cell}{MARK}", style="bold green")
        return Text(f"{cell} " if marked else cell)


@dataclass(frozen=True, slots=True)
class Section:
    """The parts of a page under one heading, shown in the order of the fields. Lifetime: report."""

    title: str
    text: str = ""
    key: Key | None = None
    cards: Sequence[Card] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    terms: Sequence[tuple[str, str]] = ()  # word, meaning
    lines: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.cards or self.pictures or self.tables or self.lines or self.terms)


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report: its title, story, claims, sections and notes. Lifetime: report."""

    title: str
    story: Sequence[str]  # the answer, in sentences
    claims: Sequence[Claim]
    sections: Sequence[Section]
    notes: Sequence[str]  # how the results were made
    opening: Opening | None = None
    marks: str = ""  # what a sign or a figure in brackets of the claims means

    def html(self) -> str:
        """Return the page as HTML text; equal pages give equal text."""
        return _template().render(page=self, css=(DATA / "page.css").read_text()) + "\n"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["base64"] = _encoded
    environment.tests["doubtful"] = lambda cell: cell.endswith((NOISE, NOT_RESOLVED))
    return environment.from_string((DATA / "report.html").read_text())


def _encoded(svg: str) -> str:
    return base64.b64encode(for_page(svg).encode()).decode()


def _parts(
    columns: Sequence[tuple[str, list[Text]]], room: int
) -> list[list[tuple[str, list[Text]]]]:
    """Return the columns in groups that each fit into `room` characters, at least one in each
    group.
    """
    parts: list[list[tuple[str, list[Text]]]] = []
    left = -1
    for title, cells in columns:
        needed = max([len(title), *(len(text) for text in cells)]) + GAP
        if needed > left or not parts:
            parts.append([])
            left = room
        parts[-1].append((title, cells))
        left -= needed
    return parts
