"""Finds the end of an answer's text: stop strings, in text that arrives in pieces.

Pieces come from a streaming detokenizer (`engine.wire.tokens.Tokenizer.stream`): whole characters,
some pieces empty. Text that may still become a stop string is held back, so that a client never
sees the beginning of a stop string.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of text for the client. `stop` is the string that ended the answer; None while the
    answer continues.
    """

    text: str
    stop: str | None = None


class StopText:
    """Cuts the text of one choice at its stop strings; lifetime: request.

    The earliest stop string ends the text; of two that end with the same character, the one that
    began first counts. With `included`, the stop string stays in the text. A text of fewer than
    `min_tokens` tokens never ends, and a stop string that begins in it does not count.
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
        """Return the object that cuts a text at the stop strings in `params`; without stop strings
        it holds nothing back.
        """
        if params is None:
            return cls((), included=False, min_tokens=0)
        included = params.include_stop_str_in_output
        return cls(params.stop, included=included, min_tokens=params.min_tokens)

    def push(self, text: str) -> TextPiece:
        """Take the text of one more token, which may be "", and return what may be sent. Raises
        ValueError after the end.

        The cost depends only on the new text and the longest stop string, however long the answer
        is.
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
        """Return the text that is held back when the answer ends for another reason."""
        held, self._held = self._held, ""
        self._ended = True
        return held

    def _undecided(self, text: str) -> int:
        """Return how many characters at the end of `text` are the beginning of a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
