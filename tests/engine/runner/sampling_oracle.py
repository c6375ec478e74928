"""The oracle of the torch sampler: sampling in plain float64 numpy, one request at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from engine.sampling.params import SamplingParams
from engine.scheduler.request import Request

Floats = npt.NDArray[np.float64]


def penalized(logits: Floats, request: Request, params: SamplingParams) -> Floats:
    """Return the logits after penalties and bans, from which the token is chosen."""
    logits = logits.astype(np.float64).copy()
    if len(request.output) < params.min_tokens:
        logits[list(request.stop_tokens)] = -np.inf
    said = Counter(request.output)
    for token in {*request.prompt.tolist(), *request.output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * said[token]
        logits[token] -= params.presence_penalty * bool(said[token])
    return logits


def probabilities(logits: Floats, request: Request, params: SamplingParams) -> Floats:
    """Return float64[V], the distribution from which the next token is drawn."""
    logits = penalized(logits, request, params)
    if params.temperature == 0.0:
        return np.eye(len(logits))[np.argmax(logits)]
    with np.errstate(over="ignore"):
        chances = np.exp((logits - logits.max()) / params.temperature)
    chances[chances < params.min_p] = 0.0
    if 0 < params.top_k < len(chances):
        chances[chances < np.sort(chances)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= params.top_p * chances.sum()]] = 0.0
    return chances / chances.sum()
