"""The two ways wire material can be wrong: the peer's bytes, or the client's prompt."""

from __future__ import annotations


class WireError(ValueError):
    """A peer sent bytes that do not follow the format; the message says what and where."""


class PromptError(ValueError):
    """A client's prompt or messages cannot be turned into tokens; its message is for the client.

    `param` names the field of the request that is wrong, as OpenAI's error bodies do.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
