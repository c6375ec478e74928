"""Kernel times of real GPUs, from the tables of AIConfigurator.

`aiconfigurator-core` (NVIDIA, Apache-2.0, of the extra `aic`) carries tables of kernels that were
measured on GPUs, by engine and version, and adds them up to the time of a step. Queries between two
measured sizes are interpolated. CPU time is in none of them. Nothing is downloaded: the package has
its tables, and the `config.json` of many models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.step_time import StepTime

PACKAGE = "aiconfigurator_core"
KI = 1024
PREFILL_TOKENS = tuple(256 << n for n in range(10))  # to 128k, of one prompt and in one step
CACHED_TOKENS = tuple(n * KI for n in (2, 8, 24, 56, 120))
CHUNK_TOKENS = tuple(256 << n for n in range(6))  # to 8k, behind a cached prefix
DECODES = tuple(1 << n for n in range(9))  # to 256
CONTEXT_TOKENS = tuple(KI << n for n in range(7))  # to 64k, of each decode
MIXED = tuple((chunk, decodes) for chunk in (512, 2048, 8192) for decodes in (8, 64))
MIXED_CONTEXT_TOKENS = 4096

Experts = Literal["split", "spread"]  # each expert over all GPUs, or whole experts on each
Kind = Literal["prefill", "cached", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "cached", "decode", "mixed")


class TableError(ValueError):
    """Raised if the tables have no answer; the message has the question and the tables' reply."""


class TableRow(NamedTuple):
    """A step of one prompt or of decodes, and the seconds of its kernels by a table."""

    prefill_tokens: int  # of one prompt; 0: none
    cached_tokens: int  # of that prompt, before them
    decodes: int  # requests that get one token each
    context_tokens: int  # of each of these
    seconds: float

    @property
    def kind(self) -> Kind:
        """The kind of step by which this row is compared."""
        if self.decodes:
            return "mixed" if self.prefill_tokens else "decode"
        return "cached" if self.cached_tokens else "prefill"

    @property
    def pairs(self) -> float:
        """Query-key pairs of the prefill's attention, as `StepLoad.attention_pairs` counts them."""
        return self.prefill_tokens * (self.cached_tokens + self.prefill_tokens / 2)

    @property
    def what(self) -> str:
        """A description of the step in words."""
        prefill = f"prefill {self.prefill_tokens:,}" if self.prefill_tokens else ""
        behind = f" after {self.cached_tokens:,}" if self.cached_tokens else ""
        decode = f"{self.decodes} decodes at {self.context_tokens:,}" if self.decodes else ""
        return f"{prefill}{behind}{' + ' if prefill and decode else ''}{decode}"

    def kernels_s(self, step_time: StepTime) -> float:
        """Return the seconds of this step's kernels by `step_time`."""
        read = self.decodes * self.context_tokens
        kernels = step_time.kernels
        return (
            kernels.decode_step_s(self.prefill_tokens + self.decodes, read)
            + kernels.pair_s * self.pairs
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """A model on the GPUs of one engine, in the form in which the tables are queried for it.

    `model` is a name that the package knows, or a folder with a `config.json`. `gpu` is a name that
    the package knows. `settings` are further arguments of its `EngineHandle.compile`, such as
    `gemm_quant_mode`.
    """

    model: str
    gpu: str  # h100_sxm, ...
    engine: str = "vllm"
    gpus: int = 1  # that split attention and dense layers
    experts: Experts = "split"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """A description of the instance in words."""
        of = f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu
        model = "config.json" if os.path.isdir(self.model) else self.model
        return f"{model} on {of}, {self.engine}"


class Tables:
    """The tables of kernel times of one instance. Lifetime: command. Raises ModuleNotFoundError
    without the package, and TableError for an instance that it does not know.
    """

    def __init__(self, instance: Instance) -> None:
        logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)  # it warns of what it interpolates
        from aiconfigurator_core.sdk.engine import EngineHandle

        self.instance = instance
        spread = instance.experts == "spread"
        try:
            self._handle = EngineHandle.compile(
                instance.model,
                instance.gpu,
                instance.engine,
                tp_size=instance.gpus,
                moe_tp_size=1 if spread else instance.gpus,
                moe_ep_size=instance.gpus if spread else 1,
                **instance.settings,
            )
        except Exception as error:  # of many kinds, none of them documented
            raise TableError(f"{instance.what}: {_first_line(error)}") from error

    def rows(self) -> Iterator[TableRow]:
        """Yield the steps by which profiles are compared, with their seconds. Raises TableError for
        a step without a time.
        """
        handle = self._handle
        prefills = [(tokens, 0) for tokens in PREFILL_TOKENS]
        prefills += [(tokens, cached) for cached in CACHED_TOKENS for tokens in CHUNK_TOKENS]
        for tokens, cached in prefills:
            ms = self._query(handle.predict_prefill_latency, 1, tokens + cached, cached)
            yield TableRow(tokens, cached, 0, 0, ms / 1e3)
        for decodes in DECODES:
            for context in CONTEXT_TOKENS:
                ms = self._query(handle.predict_decode_latency, decodes, context, 2)
                yield TableRow(0, 0, decodes, context, ms / 1e3)
        for tokens, decodes in MIXED:
            # Its prompts are `tokens` long, and its decodes are half way through their answers.
            answer = 2 * (MIXED_CONTEXT_TOKENS - tokens) if tokens < MIXED_CONTEXT_TOKENS else 2
            context = tokens + answer // 2
            ms = self._query(handle.mixed_step_latency, tokens, decodes, tokens, answer)
            yield TableRow(tokens, 0, decodes, context, ms / 1e3)

    def _query(self, question: Any, *arguments: int) -> float:
        try:
            return float(question(*arguments))
        except Exception as error:  # of many kinds, none of them documented
            raise TableError(f"{self.instance.what}: {_first_line(error)}") from error

    def source(self) -> str:
        """Return a text with the package's version, the engine, its version, and the GPU of these
        tables.
        """
        from importlib.metadata import version

        from aiconfigurator_core.sdk.perf_database import (
            get_version_slots,
            resolve_query_version,
        )

        gpu, engine = self.instance.gpu, self.instance.engine
        slots = get_version_slots(gpu, engine)
        known = resolve_query_version(gpu, engine, "current") if slots else "?"
        return f"AIConfigurator {version('aiconfigurator-core')}, {engine} {known} on {gpu}"


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the model's config has no field {error}, which the tables need"
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
