"""Chooses each request's next token from its logits.

The order of operations is that of vLLM 0.10: log probabilities are taken from the original logits;
ends of text that would come too early are masked; penalties are applied (repetition after CTRL,
Keskar and others 2019, over prompt and output; presence and frequency as OpenAI's API defines them,
over the output); greedy requests take the most likely token; the other logits are scaled, filtered
and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.batch import fetched, placed
from engine.sampling.params import MAX_LOGPROBS, SamplingParams, mix
from engine.scheduler.request import Request


class Penalties:
    """Applies penalties to the logits of a batch; lifetime: worker.

    It keeps the token counts of the last call's requests, so that a step counts only one new token
    a request. A request that was missing in the last call is counted again from its tokens, so
    callers need not report which requests have ended.
    """

    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}  # by request id

    def apply(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        params: Sequence[SamplingParams],
        lengths: Sequence[int],
        latest: Callable[[], Mapping[int, int]],
    ) -> Tensor:
        """Return logits [S, V] with penalties:

        `logits` itself if no request has penalties, else a copy. `lengths` has the number of tokens
        of each output. `latest` returns, by request id, the tokens of the previous step: it is
        called if an output lacks its last token, and may wait.
        """
        kept: dict[int, _Counts] = {}
        rows: list[int] = []
        for row, (request, one) in enumerate(zip(requests, params, strict=True)):
            if one.has_penalties:
                counts = self._counts.get(request.request_id)
                if counts is None or counts.request is not request:
                    counts = _Counts(request)
                counts.catch_up(lengths[row], latest)
                kept[request.request_id] = counts
                rows.append(row)
        self._counts = kept
        if not rows:
            return logits
        counted = [kept[requests[row].request_id] for row in rows]
        sizes = [one.size for one in counted]
        # One line for each token that a row has seen: where it is, how often it is in the output.
        device, dtype = logits.device, logits.dtype

        def put(values: npt.NDArray[np.generic], kind: torch.dtype) -> Tensor:
            return placed(torch.from_numpy(values), kind, device)

        def spread(values: Sequence[float]) -> Tensor:
            return put(np.repeat(np.array(values), sizes), dtype)

        cells = (
            put(np.repeat(np.array(rows), sizes), torch.int64),
            put(np.concatenate([one.ids for one in counted]), torch.int64),
        )
        times = put(np.concatenate([one.times for one in counted]), dtype)

        repetition = spread([params[row].repetition_penalty for row in rows])
        values = logits[cells]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - spread([params[row].frequency_penalty for row in rows]) * times
        values = values - spread([params[row].presence_penalty for row in rows]) * (times > 0)
        return logits.index_put(cells, values)


class _Counts:
    """The distinct tokens of one request, and how often each occurs in its output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        distinct = np.unique(request.prompt).astype(np.int64)
        self.size = len(distinct)
        self._ids: npt.NDArray[np.int64] = distinct
        self._times: npt.NDArray[np.int64] = np.zeros(self.size, dtype=np.int64)
        self._rows = {token: index for index, token in enumerate(distinct.tolist())}
        self._counted = 0  # tokens of the output

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, int64[size]."""
        return self._ids[: self.size]

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """The number of times that each token occurs in the output, int64[size]."""
        return self._times[: self.size]

    def catch_up(self, length: int, latest: Callable[[], Mapping[int, int]]) -> None:
        """Count the new tokens of the output, up to its token number `length`."""
        # Read once, because another thread may be adding tokens.
        gained = self.request.output[self._counted : length]
        if self._counted + len(gained) < length:
            # None is known of a step that failed; its requests have ended.
            gained.append(latest().get(self.request.request_id, 0))
        for token in gained:
            index = self._rows.get(token)
            if index is None:
                index = self._add(token)
            self._times[index] += 1
        self._counted = length

    def _add(self, token: int) -> int:
        index = self._rows[token] = self.size
        if index == len(self._ids):
            room = np.zeros(max(64, index), dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._times = np.concatenate((self._times, room))
        self._ids[index] = token
        self.size += 1
        return index


GREEDY = SamplingParams(temperature=0.0)  # for requests that set no parameters
NOTHING: Mapping[int, int] = MappingProxyType({})
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithms of a token's probability and of the likeliest tokens' probabilities,
    at temperature 1, before penalties and filters.
    """

    logprob: float  # of the chosen token
    top: list[tuple[int, float]]  # the likeliest tokens, as many as requested, likeliest first


@dataclass(frozen=True, slots=True)
class Likely:
    """The log probabilities of the rows whose requests ask for them, as tensors. Lifetime: step."""

    rows: list[int]
    counts: list[int]  # of the likeliest, that each requests
    chosen: Tensor  # float64[rows], of the chosen tokens
    top_ids: Tensor  # int64[rows, MAX_LOGPROBS]
    top: Tensor  # float64, likeliest first


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that a step has chosen. `ids` is int64[S], -1 for a row that has no most likely
    token (NaN, infinity, all masked): such a request ends with an error. The ids are on the logits'
    device until they are `fetched`.
    """

    ids: Tensor
    likely: Likely | None = None

    def fetched(self) -> Sampled:
        """Return a copy on the host; it is complete when an event that is recorded after this call
        has passed.
        """
        likely = self.likely
        if likely is not None:
            likely = replace(
                likely,
                chosen=fetched(likely.chosen),
                top_ids=fetched(likely.top_ids),
                top=fetched(likely.top),
            )
        return Sampled(fetched(self.ids), likely)

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Return the log probabilities of each row; None for a row that requested none."""
        found: list[TokenLogprobs | None] = [None] * len(self.ids)
        if self.likely is None:
            return found
        likely = self.likely
        pairs = zip(likely.top_ids.tolist(), likely.top.tolist(), strict=True)
        for row, count, logprob, (ids, values) in zip(
            likely.rows, likely.counts, likely.chosen.tolist(), pairs, strict=True
        ):
            top = list(zip(ids, values, strict=True))[:count]
            found[row] = TokenLogprobs(logprob, top)
        return found


class Sampler:
    """Draws the next tokens of requests; lifetime: worker. Between steps it keeps only token
    counts. If logits have columns without a token, `tokens` limits the choice to the ids
    0..tokens-1; None means every column.
    """

    def __init__(self, tokens: int | None = None) -> None:
        self._tokens = tokens
        self._penalties = Penalties()

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        positions: Sequence[int] | None = None,
        latest: Callable[[], Mapping[int, int]] = lambda: NOTHING,
    ) -> Sampled:
        """Return the chosen tokens.

        `logits` [S, V] has a floating type and is left unchanged; row i belongs to requests[i].
        `positions` are those of the tokens to choose, counted from the prompt's first token; None
        means the next position of each request. If a request lacks its previous token, `latest`
        returns that by request id; it is called only for penalties, and only it may wait for the
        device. Raises ValueError if the numbers of rows and requests differ.
        """
        if logits.ndim != 2 or len(logits) != len(requests):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(requests)} requests")
        raw = logits[:, : self._tokens]
        if raw.dtype not in (torch.float32, torch.float64):
            raw = raw.float()
        params = [request.sampling or GREEDY for request in requests]
        if positions is None:
            positions = [request.total_tokens for request in requests]
        lengths = [at - one.prompt_tokens for at, one in zip(positions, requests, strict=True)]
        cut = _without_early_ends(raw, requests, params, lengths)
        cut = self._penalties.apply(cut, requests, params, lengths, latest)
        highest, ids = cut.max(dim=1)
        drawn = [row for row, one in enumerate(params) if not one.is_greedy]
        if drawn:
            rows = placed(drawn, torch.int64, raw.device)
            some = [params[row] for row in drawn]
            scaled = _scaled(cut[rows], highest[rows], some)
            uniforms = [
                uniform(one.seed or 0, positions[row]) for row, one in zip(drawn, some, strict=True)
            ]
            ids[rows] = _draw(_filtered(scaled, some), uniforms)
        ids = torch.where(torch.isfinite(highest), ids, -1)
        return Sampled(ids, _likely(raw, ids, params))


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1), a multiple of 2^-53, that draws the token at `position`.
    It depends only on seed and position: splitmix64's finalizer over a hashed seed and the
    position.
    """
    counter = mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15
    return float(mix(counter & _MASK) >> 11) * 2.0**-53


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return these values as a column [len(values), 1], with the type and on the device
    of `like`.
    """
    return placed(values, like.dtype, like.device).unsqueeze(1)


def _without_early_ends(
    logits: Tensor,
    requests: Sequence[Request],
    params: Sequence[SamplingParams],
    lengths: Sequence[int],
) -> Tensor:
    """Mask tokens that would end a request before its `min_tokens`."""
    rows: list[int] = []
    ids: list[int] = []
    for row, (request, one) in enumerate(zip(requests, params, strict=True)):
        if lengths[row] < one.min_tokens:
            early = sorted(token for token in request.stop_tokens if token < logits.shape[1])
            ids += early
            rows += [row] * len(early)
    if not rows:
        return logits
    device = logits.device
    cells = (placed(rows, torch.int64, device), placed(ids, torch.int64, device))
    return logits.index_put(cells, logits.new_full((), -torch.inf))


def _scaled(logits: Tensor, highest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return logits divided by temperature, with the highest at 0.

    A tiny temperature then overflows to -inf, which means probability 0, and not to +inf, which
    would give NaN.
    """
    return (logits - highest.unsqueeze(1)) / _column([one.temperature for one in params], logits)


def _filtered(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return `scaled`, whose highest is 0 in each row, with -inf for tokens that the filters
    remove.
    """
    least = [one.min_p for one in params]
    if any(least):
        scaled = scaled.masked_fill(scaled < _column(least, scaled).log(), -torch.inf)
    vocab = scaled.shape[1]
    few = [0 < one.top_k < vocab for one in params]
    if any(few):
        rows = placed(list(compress(range(len(few)), few)), torch.int64, scaled.device)
        scaled[rows] = _top_k(scaled[rows], [one.top_k for one in compress(params, few)])
    nucleus = [one.top_p < 1.0 for one in params]
    if any(nucleus):
        rows = placed(list(compress(range(len(nucleus)), nucleus)), torch.int64, scaled.device)
        scaled[rows] = _top_p(scaled[rows], [one.top_p for one in compress(params, nucleus)])
    return scaled


def _top_k(scaled: Tensor, counts: Sequence[int]) -> Tensor:
    """Keep each row's `counts` highest values, and those that equal the last of them."""
    highest = scaled.topk(max(counts), dim=1).values
    last = placed(counts, torch.int64, scaled.device).unsqueeze(1) - 1
    return scaled.masked_fill(scaled < highest.gather(1, last), -torch.inf)


def _top_p(scaled: Tensor, shares: Sequence[float]) -> Tensor:
    """Keep the most likely tokens of each row until they have its share of the probability mass; of
    equal tokens the lower id comes first.
    """
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    mass = ordered.double().exp().cumsum(dim=1)
    enough = mass[:, -1:] * _column(shares, mass)
    beyond = torch.zeros_like(ordered, dtype=torch.bool)
    beyond[:, 1:] = mass[:, :-1] >= enough
    return scaled.masked_fill(torch.empty_like(beyond).scatter_(1, ids, beyond), -torch.inf)


def _draw(scaled: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return int64[rows]: for each row the first id at which the probability mass, summed by id,
    exceeds the row's share of all mass.

    A share below 1 of a sum is below the sum, after rounding too, so there is always such an id,
    and its own mass is not 0. Sums are float64: float32 would lose the tail of a large vocabulary.
    """
    mass = scaled.double().exp().cumsum(dim=1)
    target = mass[:, -1:] * _column(uniforms, mass)
    return torch.searchsorted(mass, target, right=True).squeeze(1).clamp_(max=mass.shape[1] - 1)


def _likely(logits: Tensor, ids: Tensor, params: Sequence[SamplingParams]) -> Likely | None:
    wanted = [(row, one.logprobs) for row, one in enumerate(params) if one.logprobs is not None]
    if not wanted:
        return None
    rows = [row for row, _ in wanted]
    at = placed(rows, torch.int64, logits.device)
    all_of = logits[at].double().log_softmax(dim=1)
    # Always as many: how ties are broken must not depend on the other requests.
    top = all_of.topk(min(MAX_LOGPROBS, all_of.shape[1]), dim=1)
    return Likely(
        rows=rows,
        counts=[count for _, count in wanted],
        chosen=all_of.gather(1, ids[at].clamp(min=0).unsqueeze(1)).squeeze(1),
        top_ids=top.indices,
        top=top.values,
    )
