"""Dynamo's preset for agents: hits count double, prefill fourfold, requests extra."""

from __future__ import annotations

from dataclasses import dataclass

from policies.published.dynamo import Dynamo


@dataclass(frozen=True, slots=True)
class DynamoAgentic(Dynamo):
    """Formula, signals and parameters of `Dynamo`, other defaults.

    Source: NVIDIA Dynamo 1.6 (2026), option `--agentic`: overlap credit 2, prefill load scale 4,
    64 blocks of 16 tokens a request.

    Spill depth: 4 L / (1024 + u) for a prompt of L tokens, S of them cached at the holder and
    u < S not, queue drained: the double credit outweighs its own prefill, and the idle worker pays
    for all L fourfold.
    """

    prefill_scale: float = 4.0
    overlap_credit: float = 2.0
    request_tokens: float = 1024.0
