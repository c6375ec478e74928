"""Penalties for tokens that a request has said or was told.

Repetition: CTRL (Keskar and others, 2019), over prompt and output. Presence and frequency: as
OpenAI's API defines them, over the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.placed import placed
from engine.request import Request
from engine.sampling.params import SamplingParams


class Penalties:
    """Applies them to a batch; lifetime: worker.

    Keeps the counts of the requests of the last call, so that a step counts one token a
    request; a request that was away is counted again from its tokens, so nothing must be told
    of requests that end.
    """

    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}  # by request id

    def apply(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        asked: Sequence[SamplingParams],
        said: Sequence[int],
        latest: Callable[[], Mapping[int, int]],
    ) -> Tensor:
        """[S, V] with penalties; `logits` itself where there are none, else a copy.

        `said`: tokens that each output has. `latest` gives, by request id, those of the step
        before this one: it is asked where an output lacks its last one, and may take its time.
        """
        kept: dict[int, _Counts] = {}
        rows: list[int] = []
        for row, (request, one) in enumerate(zip(requests, asked, strict=True)):
            if one.has_penalties:
                counts = self._counts.get(request.request_id)
                if counts is None or counts.request is not request:
                    counts = _Counts(request)
                counts.catch_up(said[row], latest)
                kept[request.request_id] = counts
                rows.append(row)
        self._counts = kept
        if not rows:
            return logits
        counted = [kept[requests[row].request_id] for row in rows]
        sizes = [one.size for one in counted]
        # One line for each token that a row has seen: where it is, how often it was said.
        device, dtype = logits.device, logits.dtype

        def put(values: npt.NDArray[np.generic], kind: torch.dtype) -> Tensor:
            return placed(torch.from_numpy(values), kind, device)

        def spread(values: Sequence[float]) -> Tensor:
            return put(np.repeat(np.array(values), sizes), dtype)

        places = (
            put(np.repeat(np.array(rows), sizes), torch.int64),
            put(np.concatenate([one.ids for one in counted]), torch.int64),
        )
        times = put(np.concatenate([one.said for one in counted]), dtype)

        repetition = spread([asked[row].repetition_penalty for row in rows])
        values = logits[places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - spread([asked[row].frequency_penalty for row in rows]) * times
        values = values - spread([asked[row].presence_penalty for row in rows]) * (times > 0)
        return logits.index_put(places, values)


class _Counts:
    """Distinct tokens of one request, and how often each stands in its output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        distinct = np.unique(request.prompt).astype(np.int64)
        self.size = len(distinct)
        self._ids: npt.NDArray[np.int64] = distinct
        self._said: npt.NDArray[np.int64] = np.zeros(self.size, dtype=np.int64)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}
        self._counted = 0  # tokens of the output

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """int64[size]: the distinct tokens."""
        return self._ids[: self.size]

    @property
    def said(self) -> npt.NDArray[np.int64]:
        """int64[size]: times that each stands in the output."""
        return self._said[: self.size]

    def catch_up(self, said: int, latest: Callable[[], Mapping[int, int]]) -> None:
        """Count what the output has gained, up to `said` tokens."""
        # One read: whoever takes tokens in may be at it in another thread.
        gained = self.request.output[self._counted : said]
        if self._counted + len(gained) < said:
            # None is known of a step that failed; its requests have ended.
            gained.append(latest().get(self.request.request_id, 0))
        for token in gained:
            place = self._places.get(token)
            if place is None:
                place = self._add(token)
            self._said[place] += 1
        self._counted = said

    def _add(self, token: int) -> int:
        place = self._places[token] = self.size
        if place == len(self._ids):
            room = np.zeros(max(64, place), dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._said = np.concatenate((self._said, room))
        self._ids[place] = token
        self.size += 1
        return place
