"""From a request's body to chain hashes: exactly, where its tokens can be had, else by text.

Token-id prompts are hashed as they are. Text and chats go through the model's own tokenizer and
chat template where the operator gave them; otherwise, or where the template refuses, blocks of
UTF-8 text stand in for blocks of tokens, four bytes for a token, and are marked approximate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

import msgspec
import numpy as np

from engine.wire import PromptError, chain_seed
from engine.wire.memo import MemoEncoder
from engine.wire.tokens import Chat
from kvkernels import chain_hashes
from policies.contract import Hashes
from policies.record import record
from router.http.errors import ClientError
from router.http.scan import Scanned, Tokens

T = TypeVar("T")

BYTES_A_TOKEN = 4  # of UTF-8 text, roughly, for English and code with today's vocabularies
_INLINE_TOKENS = 1 << 15  # shorter chains are hashed at once: a thread would cost more


@record
class Prompt:
    """A prompt as the decision core takes it. Lifetime: request."""

    tokens: int  # of all prompts; exact, or guessed from the text where `approximate`
    longest_tokens: int  # of the longest one
    chains: Mapping[int, Hashes]  # by block size
    approximate: bool


class PromptReader:
    """Lifetime: process. `now_s` is the wall clock in seconds, for templates that ask the date.

    At most `waiting_max` requests (limits.inflight_requests) wait for a thread of `executor`.
    """

    def __init__(
        self,
        encoder: MemoEncoder | None,
        executor: Executor,
        now_s: Callable[[], float],
        waiting_max: int,
    ) -> None:
        self._encoder = encoder
        self._executor = executor
        self._now_s = now_s
        self._waiting_max = waiting_max
        self._waiting = 0
        self.template_refusals = 0  # chats the template could not render; read approximately

    async def read(
        self,
        scanned: Scanned,
        model: str,
        block_sizes: Iterable[int],
        adapter: str | None = None,
    ) -> Prompt:
        """The prompt of a request to `model`, with one chain per block size of its pool.

        `model` is the base, where `adapter` names the LoRA adapter that was asked for.
        Of a request with several prompts the first one places it. Raises ClientError(429) while
        too many wait.
        """
        tokens, lengths, approximate = await self._tokens(scanned)
        salt = scanned.cache_salt
        if approximate:  # blocks of text: no engine's events name the like
            seed = chain_seed(adapter or model, "text", salt)
        else:
            seed = chain_seed(model, adapter, salt)
        sizes = sorted(set(block_sizes))
        if len(tokens) <= _INLINE_TOKENS:
            chains = _chains(tokens, sizes, seed)
        else:
            chains = await self._in_thread(lambda: _chains(tokens, sizes, seed))
        return Prompt(sum(lengths), max(lengths), chains, approximate)

    async def _tokens(self, scanned: Scanned) -> tuple[Tokens, list[int], bool]:
        """(tokens that place the request, lengths of its prompts, whether they are guessed)."""
        first = scanned.prompts[0] if scanned.prompts else None
        if isinstance(first, np.ndarray):
            return first, [len(prompt) for prompt in scanned.prompts], False
        if self._encoder is not None:
            try:
                arrays = await self._in_thread(lambda: self._encode(scanned))
            except PromptError:
                self.template_refusals += 1
            else:
                return arrays[0], [len(ids) for ids in arrays], False
        texts = [t for t in scanned.prompts if isinstance(t, str)] or [_conversation(scanned)]
        blocks = [_text_tokens(text) for text in texts]
        return blocks[0], [max(len(b), 1) for b in blocks], True

    def _encode(self, scanned: Scanned) -> list[Tokens]:
        encoder, salt = self._encoder, scanned.cache_salt
        assert encoder is not None
        if scanned.prompts:
            return [encoder.encode(t, salt=salt) for t in scanned.prompts if isinstance(t, str)]
        chat = Chat(
            messages=list(scanned.messages),
            tools=scanned.tools,
            add_generation_prompt=scanned.add_generation_prompt,
            continue_final_message=scanned.continue_final_message,
            chat_template_kwargs=scanned.chat_template_kwargs,
        )
        return [encoder.encode_chat(chat, self._now_s(), salt)]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._waiting_max:
            why = f"{self._waiting} requests wait to be tokenized already; try again later"
            raise ClientError(429, why, code="router_full")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1


def _chains(tokens: Tokens, block_sizes: Iterable[int], seed: int) -> dict[int, Hashes]:
    return {size: chain_hashes(tokens, size, seed) for size in block_sizes}


def _text_tokens(text: str) -> Tokens:
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data, dtype="<i4", count=len(data) // BYTES_A_TOKEN)


def _conversation(scanned: Scanned) -> str:
    """A chat as one text in which an earlier turn is a prefix of the later one."""
    tools = msgspec.json.encode(scanned.tools).decode() if scanned.tools else ""
    return tools + "".join(msgspec.json.encode(message).decode() for message in scanned.messages)
