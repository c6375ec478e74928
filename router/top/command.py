"""`warmroute top`: look, draw, read keys, once a second; or one frame for scripts."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.admin_client import AdminClient, AdminError, add_admin_flags, admin_of
from router.top.figures import Look, look
from router.top.frame import SORTS, View, frame

ABOUT = """\
Watch a running router by its admin port: workers, traffic, what is held, the latest decisions.

  warmroute top
  warmroute top --admin http://127.0.0.1:8081 --once

Keys: q quits, p pauses, s sorts by the next of trouble, requests, queued tokens, number.
Hit rates and TTFT (median) are of the latest 1,000 decisions. Exit status: 0, 1 cannot be asked.
"""
_EVERY_S = 1.0
_ONCE_COLUMNS, _ONCE_LINES = 160, 10_000  # of a frame for scripts
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # xterm: other screen, no cursor
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `warmroute top`."""
    parser.add_argument("--once", action="store_true", help="print one frame, and end")
    add_admin_flags(parser)


def top_command(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    try:
        admin = admin_of(args)
        first = look(admin)
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _once(admin, first)
    with _screen(), _keys():
        Watch(admin, first).run()
    return 0


def _once(admin: AdminClient, first: Look) -> int:
    """Two looks, for rates."""
    time.sleep(_EVERY_S)
    try:
        now = look(admin)
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(frame(admin.url, first, now, View(_ONCE_COLUMNS, _ONCE_LINES))))
    return 0


@dataclass
class Watch:
    """The live view. Lifetime: command."""

    admin: AdminClient
    now: Look
    before: Look | None = None
    sort: int = 0
    paused: bool = False
    trouble: str = ""

    def run(self) -> None:
        """Until q or Ctrl-C."""
        next_s = time.monotonic() + _EVERY_S
        while True:
            self._draw()
            key = _key(max(next_s - time.monotonic(), 0.0))
            if key in ("q", "\x03"):
                return
            if key == "p":
                self.paused = not self.paused
            elif key == "s":
                self.sort = (self.sort + 1) % len(SORTS)
            elif not key:
                next_s = time.monotonic() + _EVERY_S
                self._look()

    def _look(self) -> None:
        """A router that is away, as while it is restarted, is asked again."""
        if self.paused:
            return
        try:
            self.before, self.now = self.now, look(self.admin)
            self.trouble = ""
        except AdminError as error:
            self.trouble = str(error)

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        view = View(size.columns, size.lines, SORTS[self.sort], self.paused, self.trouble)
        lines = frame(self.admin.url, self.before, self.now, view)
        shown = "\r\n".join(line + _CLEAR_LINE for line in lines)
        sys.stdout.write(_HOME + shown + _CLEAR_REST)
        sys.stdout.flush()


def _key(within_s: float) -> str:
    """The next key, q where nobody can strike one any more; empty: none within the time."""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""


@contextmanager
def _screen() -> Iterator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


@contextmanager
def _keys() -> Iterator[None]:
    """Keys come as they are struck."""
    number = sys.stdin.fileno()
    kept = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, kept)
