"""Where the text of an answer ends: stop strings, over text that comes in pieces.

Pieces are what a streaming detokenizer gives (`engine.wire.tokens.Tokenizer.stream`): whole
characters, some pieces empty. Text that may yet become a stop string is held back, so that a
client never sees the beginning of what is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the client. `stop`: the string that ended the answer, None while it goes on."""

    text: str
    stop: str | None = None


class StopText:
    """The text of one choice on its way to the client; lifetime: request.

    The earliest stop string in the text ends it; of two that end with the same character, the
    one that began first. `included`: it is part of the text, too. `min_tokens`: text of fewer
    tokens than that ends nowhere, and a stop string that begins in it does not count.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool, min_tokens: int) -> None:
        self._stops = stops
        self._included = included
        self._left = min_tokens if stops else 0  # tokens before a stop string may begin
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""  # given by the detokenizer, not yet to the client
        self._ended = False

    @classmethod
    def of(cls, params: SamplingParams | None) -> StopText:
        """What `params` ask for; nothing is held back without stop strings."""
        if params is None:
            return cls((), included=False, min_tokens=0)
        included = params.include_stop_str_in_output
        return cls(params.stop, included=included, min_tokens=params.min_tokens)

    def push(self, text: str) -> TextPiece:
        """Take in the text of one more token, "" too; what may be sent. ValueError after the end.

        Costs no more than the text and the longest stop string, however long the answer is.
        """
        if self._ended:
            raise ValueError("text after the stop string that ended it")
        if not self._stops or self._left:
            self._left -= 1 if self._left else 0
            return TextPiece(text)
        held = self._held + text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            end, start, stop = found
            self._ended, self._held = True, ""
            return TextPiece(held[: end if self._included else start], stop)
        keep = self._undecided(held)
        self._held = held[len(held) - keep :]
        return TextPiece(held[: len(held) - keep])

    def flush(self) -> str:
        """What is held back when the answer ends for another reason."""
        held, self._held = self._held, ""
        self._ended = True
        return held

    def _undecided(self, text: str) -> int:
        """Characters at the end of `text` that are the beginning of a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
