"""Dynamo's preset for agents: hits count double, prefill fourfold, and each request is charged."""

from __future__ import annotations

from dataclasses import dataclass

from policies.published.dynamo import Dynamo


@dataclass(frozen=True, slots=True)
class DynamoAgentic(Dynamo):
    """The formula, signals and parameters of `Dynamo` with other defaults.

    Source: NVIDIA Dynamo 1.6 (2026), option `--agentic`: overlap credit 2, prefill load scale 4, 64
    blocks of 16 tokens a request.

    Spill depth: 4 L / (1024 + u) for a prompt of L tokens, of which the holder has S cached and u <
    S are not, if no prefill is queued. The double credit outweighs the holder's own prefill, and
    the idle worker pays for all L tokens fourfold.
    """

    prefill_scale: float = 4.0
    overlap_credit: float = 2.0
    request_tokens: float = 1024.0
