"""Writes figures into README and docs by running the commands that produce them in seconds.

    python -m tests.simulator.figures_in_docs [--check] [FILE]...        (make figures: all of them)

A block of output is written anew if a comment of this form precedes it:

    <!-- output: 1 2, 113 columns, until batch, of `warmroute-sim sweep sweep.yaml` -->

The numbers choose paragraphs of the command's output (empty lines separate paragraphs). "columns"
is the width of the terminal, 160 by default. "until" leaves out the lines from the first one that
begins with the given word. "of" names the command, for blocks that do not show it after a `$`. A
block after `<!-- file: NAME -->` is a file that commands of the same document read.
`requests.jsonl` is the log of a live run, which is made once, in a minute, and kept; remove
build/figures to make it again. `SENTENCES` lists the sentences that are written as well. `--check`
writes nothing and ends with 1 if something differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simulator.cli.setups import PROFILE, WORKERS
from simulator.live.demo import SAMPLE_PATH, acts, as_run
from simulator.live.outcome import ResultRow
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.row import ReplayRow, summarize
from simulator.traces.spec import WorkloadSpec

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "build" / "figures"
LOG = "requests.jsonl"
COLUMNS = 160
MARK = re.compile(
    r"<!-- output: (?P<parts>\d+(?: \d+)*)(?:, (?P<columns>\d+) columns)?"
    r"(?:, until (?P<until>\S+))?(?:, of `(?P<command>[^`]+)`)? -->\n```\n(?P<body>.*?)```\n",
    re.DOTALL,
)
FILE = re.compile(r"<!-- file: (?P<name>[\w.]+) -->\n```\w*\n(?P<text>.*?)```\n", re.DOTALL)
# Runs with a terminal of the given width, and without progress, which depends on the machine.
RUN = """
import sys
from simulator.cli import command_line
from simulator.report import board
if __name__ == "__main__":
    board.QUIET_S = float("inf")
    command_line.LOG_COLUMNS = int(sys.argv[1])
    sys.exit(command_line.main(sys.argv[2:]))
"""


class FigureError(Exception):
    """Raised if a block cannot be made; the text says which block and why."""


@dataclass(frozen=True, slots=True)
class Block:
    """One marked block of output. Lifetime: a run of this program."""

    shown: str  # the command as it stands in the block, with its `$`; "": it is in the comment
    command: tuple[str, ...]  # without the program's name
    parts: tuple[int, ...]
    columns: int
    until: str | None
    start: int  # of the output, in the text
    end: int

    @property
    def reads_log(self) -> bool:
        """Whether the block's command reads the log of the live run."""
        return LOG in self.command


def blocks(text: str) -> Iterator[Block]:
    """Yield the marked blocks of a document."""
    for found in MARK.finditer(text):
        body = found["body"]
        shown = "" if found["command"] else _shown(body)
        words = shlex.split(found["command"] or shown.removeprefix("$ ").replace("\\\n", ""))
        if words[:1] != ["warmroute-sim"]:
            raise FigureError(f"{found[0][:80]!r}: no `$ warmroute-sim ...` and no `of`")
        yield Block(
            shown,
            tuple(words[1:]),
            tuple(map(int, found["parts"].split())),
            int(found["columns"] or COLUMNS),
            found["until"],
            found.start("body") + len(shown),
            found.end("body"),
        )


def _shown(body: str) -> str:
    """Return the command line at the start of a block, with the lines that continue it after a
    backslash. The result is "" if the block shows no command.
    """
    found = re.match(r"\$ (?:.*\\\n)*.*\n", body)
    return found[0] if found else ""


def printed(block: Block, folder: Path) -> str:
    """Run the block's command in `folder`; return the parts of its output that the block shows.
    Raises `FigureError` if the command fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(block.columns), *block.command],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise FigureError(f"{shlex.join(block.command)}: status {done.returncode}: {done.stderr}")
    return shown_of(block, done.stdout)


def shown_of(block: Block, output: str) -> str:
    """Return the part of `output` that the block shows. Raises `FigureError` if the output lacks
    it.
    """
    lines = [line.rstrip() for line in output.splitlines()]
    paragraphs = re.split(r"\n{2,}", "\n".join(lines).strip("\n"))
    if max(block.parts) > len(paragraphs):
        raise FigureError(f"{shlex.join(block.command)}: has {len(paragraphs)} paragraphs")
    kept = "\n\n".join(paragraphs[part - 1] for part in block.parts).splitlines()
    if block.until is not None:
        ends = [n for n, line in enumerate(kept) if line.startswith(block.until)]
        if not ends:
            raise FigureError(f"{shlex.join(block.command)}: no line begins with {block.until}")
        kept = kept[: ends[0]]
    return "\n".join(kept).rstrip() + "\n"


def prepared(text: str) -> Path:
    """Return a folder that holds the files which the commands of a document read."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    if not (SCRATCH / "simulator").exists():
        (SCRATCH / "simulator").symlink_to(ROOT / "simulator")
    for found in FILE.finditer(text):
        (SCRATCH / found["name"]).write_text(found["text"])
        (SCRATCH / f"{found['name']}.results.jsonl").unlink(missing_ok=True)  # old results
    return SCRATCH


def record() -> None:
    """Log the live run with which docs/simulator.md begins, unless the log exists."""
    if (SCRATCH / LOG).exists():
        return
    print("recording a minute of live traffic", flush=True)
    subprocess.run(
        [sys.executable, "-m", "simulator", "stack", "--seconds", "60", "--policy", "round_robin",
         "--port", "0", "--admin-port", "0", "--out", str(SCRATCH / "stack"),
         "--trace", "simulator/data/conversation_sample.jsonl.gz"],
        cwd=ROOT, env={**os.environ, "WARMROUTE_REQUEST_LOG": str(SCRATCH / "part")}, check=True,
    )  # fmt: skip
    (SCRATCH / "part").replace(SCRATCH / LOG)


@cache
def demo() -> dict[tuple[str, str], ResultRow]:
    """Return the rows of the demo on virtual time, by workload and policy."""
    return {
        (act.name, policy): as_run(replay(act.setup(policy)), act).row
        for act in acts()
        for policy in act.policies
    }


def share(value: float | None) -> str:
    return f"{100 * (value or 0):.0f} %"


def ms(value: float | None) -> str:
    return f"{value or 0:,.0f}"


def secs(value_ms: float | None, digits: int = 1) -> str:
    return f"{(value_ms or 0) / 1000:.{digits}f} s"


def change(workload: str, before: str, after: str) -> str:
    """Return a phrase with hit rate and mean TTFT of two policies on one of the demo's
    workloads.
    """
    one, two = demo()[workload, before], demo()[workload, after]
    return (
        f"tokens from cache {share(one.hit_rate_tokens)} → {share(two.hit_rate_tokens)}, mean TTFT "
        f"{secs(one.ttft_ms.mean)} → {secs(two.ttft_ms.mean)}"
    )


def hot_spot() -> str:
    row = demo()["shared_prompt", "kv_prefix"]
    most = share(max(row.requests_per_worker) / row.requests)
    return f"{most} go to one worker of eight; TTFT p99 {secs(row.ttft_ms.p99)}"


def cured() -> str:
    row = demo()["shared_prompt", "warmset"]
    return (
        f"busiest worker {row.load_skew:.2f} × the mean, {share(row.hit_rate_tokens)} of prompt "
        f"tokens from cache, TTFT p99 {secs(row.ttft_ms.p99, 2)}"
    )


def tail() -> str:
    rows = (demo()["shared_prompt", policy] for policy in ("kv_prefix", "warmset"))
    alone, both = (row.ttft_ms.p99 for row in rows)
    return f"{secs(alone)} if caches alone decide, and within {secs(both, 2)}"


@cache
def sample(policy: str) -> ReplayRow:
    """Replay the bundled sample with the defaults of `warmroute-sim replay`; return the row of the
    report.
    """
    pool = (WorkerGroup(WORKERS, PROFILE),)
    setup = Setup(WorkloadSpec(str(SAMPLE_PATH)), policy, pool)
    return summarize(replay(setup))


def overloaded() -> str:
    row = sample("kv_prefix")
    assert max(row.requests_per_worker) == row.requests
    return (
        f"{row.requests} requests to one worker of eight, and the TTFT is "
        f"{secs(row.ttft_ms.mean, 0)}"
    )


def demo_table() -> str:
    """Return the table of docs/demo.md, "What it showed", as it is on virtual time."""
    lines, before = [], ""
    for (workload, policy), row in demo().items():
        name = policy if policy not in ("hybrid", "warmset") else f"**{policy}**"
        cells = [
            "" if workload == before else workload, name, f"{row.requests}",
            f"{row.load_skew:.2f}", f"{row.hit_rate_tokens:.3f}",
            *map(ms, (row.ttft_ms.mean, row.ttft_ms.p99, row.e2e_ms.mean)),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells).lstrip() + " |\n")
        before = workload
    return "".join(lines).replace("|  |", "| |")


# Document, the texts before and after a generated text, and the function that makes it.
Sentence = tuple[str, str, str, Callable[[], str]]
SENTENCES: tuple[Sentence, ...] = (
    ("README.md", r"have their first token within ", r" with warmroute\.", tail),
    ("README.md", r"by cache alone \(`kv_prefix`\) \| ", r" \|", hot_spot),
    ("README.md", r"system prompt, by `warmset` \(the default\) \| ", r" \|", cured),
    (
        "README.md", r"\| two minutes of conversations, `round_robin` → `warmset` \| ", r" \|",
        lambda: change("conversation", "round_robin", "warmset"),
    ),
    (
        "README.md", r"do not fit into the caches, `hybrid` → `warmset` \| ", r" \|",
        lambda: change("agents", "hybrid", "warmset"),
    ),
    ("docs/simulator.md", r"on the bundled sample `kv_prefix`\ssends all\s", r"\.", overloaded),
    (
        "docs/demo.md",
        r"November 2026 on virtual time:\n\n[^\n]*\n\|---[^\n]*\n", r"\n(?=The next table)",
        demo_table,
    ),
)  # fmt: skip


def updated(name: str, text: str, chosen: Callable[[Block], bool] | None = None) -> str:
    """Return the document `text` with today's figures; `chosen` limits this to the blocks for which
    it is true.
    """
    for document, before, after, make in SENTENCES:
        if document == name and chosen is None:
            found = re.search(f"({before})(.*?)({after})", text, re.DOTALL)
            if found is None:
                raise FigureError(f"{name}: nothing stands between {before!r} and {after!r}")
            text = f"{text[: found.start(2)]}{make()}{text[found.end(2) :]}"
    folder = prepared(text)
    for block in reversed(list(blocks(text))):  # from the end, so that positions stay valid
        if chosen is None or chosen(block):
            text = f"{text[: block.start]}{printed(block, folder)}{text[block.end :]}"
    return text


def documents() -> list[str]:
    """Return the names of the documents that contain figures made by commands."""
    names = {document for document, *_ in SENTENCES}
    for path in ROOT.glob("docs/**/*.md"):
        if MARK.search(path.read_text()):
            names.add(str(path.relative_to(ROOT)))
    return sorted(names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or check, the figures of the named documents, or of all documents."""
    parser = argparse.ArgumentParser(description="Makes the figures in README and docs anew.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all that have any")
    parser.add_argument("--check", action="store_true", help="write nothing; 1: something differs")
    options = parser.parse_args(arguments)
    different = 0
    for name in options.files or documents():
        path = ROOT / name
        text = path.read_text()
        if any(block.reads_log for block in blocks(text)):
            record()
        try:
            anew = updated(name, text)
        except FigureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        different += anew != text
        print(f"{name}: {'as it was' if anew == text else 'differs' if options.check else 'new'}")
        if not options.check and anew != text:
            path.write_text(anew)
    return int(options.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
