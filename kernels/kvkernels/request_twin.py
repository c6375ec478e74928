"""Plain requests' bodies: what is said of them, and the reading where there is no C++ build."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

# model, stream, session, cache salt, priority, most output tokens, prompts, messages, tokens of all
# prompts, tokens of the longest one, whether they came as token ids
RequestFields = tuple[
    str | None, bool, str | None, str | None, int, int | None, int, int, int, int, bool
]


class PromptText(Protocol):
    """The prompt of a plain body, which only the native reading makes. Lifetime: request."""

    def chains(
        self, block_sizes: Iterable[int], model: str, adapter: str | None, salt: str | None
    ) -> dict[int, Hashes]:
        """Chain hashes of the first prompt, or of the conversation, for each block size.

        Token ids start from `chain_seed(model, adapter, salt)`, text from
        `chain_seed(adapter or model, "text", salt)`.
        """

    def first(self) -> bytes:
        """The bytes that stand for the first prompt's tokens, or the conversation's, 4 for each."""


def scan_request(
    body: bytes, messages: int, prompts: int, choices: int, key_bytes: int
) -> tuple[PromptText, RequestFields] | None:
    """What routing needs of a plain inference request's body, or None: read it in another way.

    Without the C++ build every body is left to whoever can read any.

    The numbers are the most that are allowed of messages, of prompts, of `n`, and of bytes in the
    name of a model, session or salt. The native one answers None for whatever is malformed, over a
    limit, or rare: media, lists of lists, numbers that are no integers within a chat. What it
    does take, `router.http.scan` takes too and reads the same from it.
    """
    return None
