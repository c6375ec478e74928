"""All generators by name: `gen:NAME?key=value&key=value`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from simulator.traces.generators.coding_agents import BLOCK, CodingAgentsKeys, coding_agents
from simulator.traces.generators.common import USUAL_BLOCK, Made
from simulator.traces.generators.conversations import (
    AgenticKeys,
    SessionKeys,
    TenantsKeys,
    agentic,
    sessions,
    tenants,
)
from simulator.traces.generators.prefixes import (
    InferencePerfKeys,
    LlmdKeys,
    SglangKeys,
    SharedKeys,
    VllmKeys,
    inference_perf,
    llmd,
    sglang,
    vllm,
)
from simulator.traces.generators.zipf import ZipfKeys, zipf
from simulator.traces.job import TraceError
from simulator.traces.options import name_of, parse_options

PREFIX = "gen:"


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator of requests, with its name and keys."""

    name: str
    about: str  # one line for help
    keys: type[msgspec.Struct]
    make: Callable[[Any, int, int | None], Made]  # keys, seed, tokens a block if asked for
    # Default tokens per KV block of workers: vLLM's default, more for long prompts.
    kv_block: int = USUAL_BLOCK


GENERATORS = (
    Generator("sglang", "SGLang's generated-shared-prefix", SglangKeys, sglang),
    Generator("vllm", "vLLM's prefix_repetition", VllmKeys, vllm),
    Generator(
        "inference_perf", "inference-perf's shared_prefix", InferencePerfKeys, inference_perf
    ),
    Generator("llmd", "llm-d's published workloads with their ladders", LlmdKeys, llmd),
    Generator("zipf", "popular and rare prefixes, nested, born and dying", ZipfKeys, zipf),
    Generator("sessions", "conversations with think time", SessionKeys, sessions),
    Generator("agentic", "agents: a long shared prompt, many quick turns", AgenticKeys, agentic),
    Generator(
        "coding_agents",
        "coding agents with sub-agents and side requests",
        CodingAgentsKeys,
        coding_agents,
        kv_block=BLOCK,
    ),
    Generator("tenants", "chats below tenants' system prompts", TenantsKeys, tenants),
    Generator("shared", "one long system prompt before every request", SharedKeys, vllm),
)


def find_generator(source: str) -> tuple[Generator, Any]:
    """Return the generator that `gen:NAME?key=value` names, and its keys.

    Raises `TraceError` for an unknown name or key (with the valid ones), or a bad value.
    """
    spec = source.removeprefix(PREFIX)
    for one in GENERATORS:
        if one.name == name_of(spec):
            return one, parse_options(spec, one.keys)
    known = ", ".join(one.name for one in GENERATORS)
    raise TraceError(f"generator {name_of(spec)!r}: expected one of: {known}")


def kv_block(source: str) -> int:
    """Return the default tokens per KV block of workers for the generator `gen:NAME...`."""
    name = name_of(source.removeprefix(PREFIX))
    return next((one.kv_block for one in GENERATORS if one.name == name), USUAL_BLOCK)
