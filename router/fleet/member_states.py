"""Defines the states of a worker in the fleet, as the router's own probes find them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

# "starting": it was never recognized. "serving": it is recognized, and its probes are answered.
# "silent": it serves, and its latest probes got no answer. "down": it fails its probes, or is being
# recognized by other options. "asleep" and "paused": its engine lives and takes no requests.
# Draining is no state here: it is an operator's wish, which outlasts all states.
MemberState = Literal["starting", "serving", "silent", "down", "asleep", "paused"]
MEMBER_STATES: Mapping[tuple[MemberState, str], MemberState] = MappingProxyType(
    {
        ("starting", "it is recognized"): "serving",
        ("serving", "it is recognized"): "serving",
        ("serving", "a probe gets no answer"): "silent",
        ("serving", "it fails"): "down",
        ("serving", "it falls asleep"): "asleep",
        ("serving", "it is paused"): "paused",
        ("serving", "its options change"): "down",
        ("silent", "a probe gets no answer"): "silent",
        ("silent", "a probe is answered"): "serving",
        ("silent", "it fails"): "down",
        ("silent", "it falls asleep"): "asleep",
        ("silent", "it is paused"): "paused",
        ("silent", "its options change"): "down",
        ("down", "it is recognized"): "serving",
        ("asleep", "it is recognized"): "serving",
        ("paused", "it is recognized"): "serving",
    }
)
