"""Chooses the event loops on which tests of the router run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop

from tests.effort import QUICK

Loops = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]

PLAIN: Loops = {"asyncio": asyncio.new_event_loop}
OWN: Loops = {"uvloop": uvloop.new_event_loop}


def relay_loops() -> Loops:
    """Return the router's own event loop and, in full test runs, also asyncio's."""
    return OWN if QUICK else {**OWN, **PLAIN}
