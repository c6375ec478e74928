"""The router's access log (`router.record.access_log`) as a workload: times and token counts.

The log names no blocks and no sessions, so no request shares a prefix with another one. A replay of
it shows load; to compare policies, replay the request log. Lines without `prompt_tokens` are left
out: those requests were refused before the prompt was read. If an answer's length is not known, the
mean of the known ones so far is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from simulator.traces.job import NO_IDS, Job, LineError
from simulator.traces.mooncake import DECODE_ERRORS, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, SessionId
from simulator.traces.request_log import MAX_UNIX_S


class AccessLogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an access log."""

    model: Annotated[
        str | None,
        msgspec.Meta(description="name of the model whose requests are replayed; default: all"),
    ] = None


class _AccessLogLine(msgspec.Struct, frozen=True, gc=False):
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_UNIX_S)]
    model: str | None = None
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    tenant: SessionId | None = None


class AccessLogReader:
    """Reads the lines of one access log. Lifetime: stream."""

    def __init__(self, options: AccessLogOptions) -> None:
        self._decode = msgspec.json.Decoder(_AccessLogLine).decode
        self._model = options.model
        self._known = self._known_tokens = 0  # answers
        self._reported_tokens = self._cached_tokens = 0  # prompts whose cached tokens are known
        self._without = 0  # lines without a prompt

    def parse(self, raw: bytes) -> Job | None:
        """Return the request of a line, or None if its prompt was never read. Raises
        `LineError`.
        """
        try:
            line = self._decode(raw)
        except DECODE_ERRORS as error:
            raise LineError(str(error)) from error
        if not line.prompt_tokens or line.model is None:
            self._without += 1
            return None
        if self._model not in (None, line.model):
            return None
        if line.output_tokens:
            self._known, self._known_tokens = (
                self._known + 1, self._known_tokens + line.output_tokens,
            )  # fmt: skip
        if line.cached_tokens is not None:
            self._reported_tokens += line.prompt_tokens
            self._cached_tokens += line.cached_tokens
        return Job(
            round(line.at * 1e6) * 1000,
            line.prompt_tokens,
            line.output_tokens or (self._known_tokens // self._known if self._known else 1),
            NO_IDS,
            tenant=line.tenant,
            cached_tokens=line.cached_tokens,
        )

    def notes(self) -> Iterator[str]:
        """Return notes on the figures that an access log lacks."""
        cached = ""
        if self._reported_tokens:
            share = self._cached_tokens / self._reported_tokens
            cached = f" (workers reported {share:.1%} of their prompt tokens cached)"
        yield (
            "an access log has no prefixes: nothing is shared here and nothing hits"
            f"{cached}, so it compares policies by load alone; record --request-log for caches"
        )
        if self._without:
            yield f"{self._without} lines without prompt_tokens or model are left out"
