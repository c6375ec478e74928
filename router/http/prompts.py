"""From a request's body to chain hashes: exactly, where its tokens can be had, else by text.

Token-id prompts are hashed as they are. Text and chats go through the model's own tokenizer and
chat template where the operator gave them; otherwise, where the template refuses, where there are
media, or where workers were found to count otherwise, blocks of UTF-8 text stand in for blocks of
tokens, four bytes for a token, and are marked approximate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from router.http.media import has_media, without_media
from router.http.paths import Path
from router.http.plain_scan import Plain, plain_scan
from router.http.scan import ScanLimits, Scanned, Tokens, scan
from router.http.shapes import SHAPES
from router.http.token_check import TokenCheck

T = TypeVar("T")

BYTES_A_TOKEN = 4  # of UTF-8 text, roughly, for English and code with today's vocabularies
_INT32 = np.dtype("<i4")
_NO_BLOCKS = np.empty(0, dtype=np.uint64)
_NO_BLOCKS.flags.writeable = False
_INLINE_TOKENS = 1 << 15  # shorter chains are hashed at once: a thread would cost more


@record
class Prompt:
    """A prompt as the decision core takes it. Lifetime: request."""

    tokens: int  # of all prompts; exact, or guessed from the text where `approximate`
    longest_tokens: int  # of the longest one
    chains: Mapping[int, Hashes]  # by block size
    approximate: bool
    encoded: Sequence[Tokens] = ()  # ids that were made here of each prompt's text


class PromptReader:
    """Lifetime: process. `now_s` is the wall clock in seconds, for templates that ask the date.

    At most `waiting_max` requests (limits.inflight_requests) wait for a thread of `executor`.
    Prompts of models that `check` does not trust are read as text. `drops_unused_tools`: a chat
    with `tool_choice` "none" is rendered without tools.
    """

    def __init__(
        self,
        encoder: MemoEncoder | None,
        executor: Executor,
        now_s: Callable[[], float],
        waiting_max: int,
        check: TokenCheck,
        drops_unused_tools: bool = False,
    ) -> None:
        self.encoder = encoder
        self._executor = executor
        self._now_s = now_s
        self._waiting_max = waiting_max
        self._waiting = 0
        self._check = check
        self._drops_unused_tools = drops_unused_tools
        self.template_refusals = 0  # chats the template could not render; read approximately

    def scan(self, body: bytes, path: Path, limits: ScanLimits) -> Scanned | Plain:
        """The request of `body`, sent to `path`, for `read`. Raises ClientError(400).

        A tokenizer must see the text itself, which only the long way keeps.
        """
        if path.reads != "openai":
            return SHAPES[path.reads](body, limits)
        plain = plain_scan(body, path.path, limits) if self.encoder is None else None
        return scan(body, path.path, limits) if plain is None else plain

    async def read(
        self,
        scanned: Scanned | Plain,
        model: str,
        block_sizes: Iterable[int],
        adapter: str | None = None,
    ) -> Prompt:
        """The prompt of a request to `model`, with one chain per block size of its pool.

        `model` is the base, where `adapter` names the LoRA adapter that was asked for.
        Of a request with several prompts the first one places it; one without any counts as a
        token. Raises ClientError(429) while too many wait.
        """
        if isinstance(scanned, Plain):
            return await self._hashed(scanned, model, block_sizes, adapter)
        if not scanned.prompts and not scanned.messages:
            return Prompt(1, 1, dict.fromkeys(block_sizes, _NO_BLOCKS), True)
        blocks: Sequence[Tokens] = ()
        encoded: Sequence[Tokens] = ()
        first = scanned.prompts[0] if scanned.prompts else None
        if isinstance(first, np.ndarray):
            blocks = [_kept(ids, scanned) for ids in scanned.prompts if isinstance(ids, np.ndarray)]
        elif self.encoder is not None and not scanned.by_text:
            blocks = encoded = await self._encoded(scanned, adapter or model, self.encoder)
        approximate = not blocks
        salt = scanned.cache_salt
        if approximate:  # blocks of text: no engine's events name the like
            blocks = [_kept(text, scanned) for text in _texts(scanned)]
            seed = chain_seed(adapter or model, "text", salt)
        else:
            seed = chain_seed(model, adapter, salt)
        tokens = blocks[0]
        sizes = sorted(set(block_sizes))
        if len(tokens) <= _INLINE_TOKENS:
            chains = _chains(tokens, sizes, seed)
        else:
            chains = await self._in_thread(lambda: _chains(tokens, sizes, seed))
        lengths = [max(len(ids), 1) for ids in blocks]
        return Prompt(sum(lengths), max(lengths), chains, approximate, encoded)

    async def _hashed(
        self, plain: Plain, model: str, block_sizes: Iterable[int], adapter: str | None
    ) -> Prompt:
        """The prompt where no tokenizer is asked."""
        tokens, longest, chains_of = plain.tokens, plain.longest_tokens, plain.text.chains
        salt = plain.cache_salt
        if longest <= _INLINE_TOKENS:
            chains = chains_of(block_sizes, model, adapter, salt)
        else:
            chains = await self._in_thread(lambda: chains_of(block_sizes, model, adapter, salt))
        return Prompt(tokens, longest, chains, not plain.has_ids)

    async def _encoded(
        self, scanned: Scanned, model: str, encoder: MemoEncoder
    ) -> Sequence[Tokens]:
        """The exact ids of each prompt; none where they cannot be had."""
        if not self._check.trusts(model) or has_media(scanned.messages):
            return ()
        try:
            return await self._in_thread(lambda: self._encode(scanned, encoder))
        except PromptError:
            self.template_refusals += 1
            return ()

    def _encode(self, scanned: Scanned, encoder: MemoEncoder) -> list[Tokens]:
        options, salt = scanned.options, scanned.cache_salt
        if options.truncate_prompt_tokens == -1:
            raise PromptError("truncation to the engine's own limit", "truncate_prompt_tokens")
        if scanned.prompts:
            special = options.add_special_tokens is not False
            texts = (text for text in scanned.prompts if isinstance(text, str))
            return [_kept(encoder.encode(text, special, salt), scanned) for text in texts]
        if options.chat_template is not None:  # whether it counts is for the engine to say
            raise PromptError("the request brings its own chat template", "chat_template")
        effort = options.reasoning_effort
        drops = self._drops_unused_tools and options.tool_choice == "none"
        chat = Chat(
            messages=list(scanned.messages),
            tools=None if drops else options.tools,
            documents=options.documents,
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=bool(options.continue_final_message),
            chat_template_kwargs=options.chat_template_kwargs,
            reasoning_effort=effort if isinstance(effort, str) else None,
            add_special_tokens=options.add_special_tokens is True,
        )
        return [_kept(encoder.encode_chat(chat, self._now_s(), salt), scanned)]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._waiting_max:
            why = f"{self._waiting} requests wait to be tokenized already; try again later"
            raise ClientError(429, why, code="router_full")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1


def _kept(tokens: Tokens, scanned: Scanned) -> Tokens:
    """What `truncate_prompt_tokens` leaves: the last ones, or the first."""
    limit = scanned.options.truncate_prompt_tokens
    if type(limit) is not int or not 0 < limit < len(tokens):
        return tokens
    return tokens[:limit] if scanned.options.truncation_side == "right" else tokens[-limit:]


def _chains(tokens: Tokens, block_sizes: Iterable[int], seed: int) -> dict[int, Hashes]:
    return {size: chain_hashes(tokens, size, seed) for size in block_sizes}


def _texts(scanned: Scanned) -> list[Tokens]:
    """Each prompt's text as if four bytes were a token."""
    texts = [text for text in scanned.prompts if isinstance(text, str)]
    return [_text_tokens(text) for text in texts or (_conversation(scanned),)]


def _text_tokens(text: str) -> Tokens:
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data, _INT32, len(data) // BYTES_A_TOKEN)


def _conversation(scanned: Scanned) -> str:
    """A chat as one text in which an earlier turn is a prefix of the later one."""
    tools = msgspec.json.encode(scanned.options.tools).decode() if scanned.options.tools else ""
    messages = without_media(scanned.messages)
    return tools + "".join(msgspec.json.encode(message).decode() for message in messages)
