"""Makes the token ids and chain hashes of a request's prompt: exact if its token ids are known,
otherwise from its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec
import numpy as np

from engine.wire.memo import PieceMemo
from engine.wire.tokens import Chat, PromptError
from kvkernels import PromptText, chain_seed, scan_request
from policies.contract import Hashes
from policies.record import record
from router.body.legs import check_no_transfer
from router.body.paths import Path
from router.body.scan import (
    LONG_BYTES,
    SHAPES,
    ScanLimits,
    Scanned,
    Sequenced,
    Tokens,
    scan,
)
from router.core.workers.kv_events import hashes_of
from router.engines.table import TRANSFER_FIELDS
from router.http.errors import ClientError
from router.request.attribution import AttributionLines
from router.request.in_turn import InTurn
from router.tokens.check import TokenCheck
from router.tokens.encoders import Encoders, PromptEncoder
from router.tokens.media import has_media, media_chains, without_media
from router.tokens.rendered_prompts import RenderedPrompt, RenderedPrompts, RenderRequest
from router.tokens.turns import BYTES_A_TOKEN

T = TypeVar("T")
Shape = Callable[[bytes, ScanLimits], Scanned]

_INT32 = np.dtype("<i4")
_NO_BLOCKS = np.empty(0, dtype=np.uint64)
_NO_BLOCKS.flags.writeable = False
_INLINE_TOKENS = 1 << 15  # shorter chains are hashed at once: a thread would cost more
_INLINE_BYTES = 1 << 17  # shorter plain bodies are read at once, likewise


@record
class Prompt:
    """A request's prompt in the form that the decision core needs. Lifetime: request."""

    tokens: int  # of all prompts; exact, or guessed from the text where `approximate`
    longest_tokens: int  # of the longest one
    chains: Mapping[int, Hashes]  # by block size
    approximate: bool
    encoded: Sequence[Tokens] = ()  # ids that were made here of each prompt's text
    routed_by: str = ""  # for people, where that is not plain
    sequence: Sequenced | None = None  # all of which must meet one worker
    runs_on: bool = False  # at its worker, when its client has left
    stops: bool = False  # it ends another request
    begins: bool = False  # only its beginning is known yet; `tokens` guesses the rest
    rendered_by: str = ""  # the renderer that counted its tokens; empty: they were counted here


@record
class Plain:
    """A request's body that was read quickly: like `Scanned`, but without the prompts. Lifetime:
    request.
    """

    text: PromptText
    model: str | None
    stream: bool
    session: str | None
    cache_salt: str | None
    priority: int
    max_output_tokens: int | None
    tokens: int  # of all prompts
    longest_tokens: int
    has_ids: bool  # token ids, else text: four bytes count as one token
    agent_fields: Mapping[str, str | bytes] | None = None  # as of `Scanned`


def plain_scan(body: bytes, path: str, limits: ScanLimits) -> Plain | None:
    """Return the request in `body`, sent to `path`, read quickly; None if only `scan` can read it.
    Pure.
    """
    found = scan_request(
        body, limits.max_messages, limits.max_prompts, limits.max_choices, limits.max_key_chars
    )
    if found is None:
        return None
    text, fields = found
    model, stream, session, salt, priority, most, prompts, messages, tokens, longest, ids, agent = (
        fields
    )
    if path.endswith("/chat/completions"):
        if not messages:
            return None
    elif not prompts and path.endswith("/completions"):
        return None
    return Plain(text, model, stream, session, salt, priority, most, tokens, longest, ids, agent)


def _hashed(plain: Plain, block_sizes: Iterable[int], model: str, adapter: str | None) -> Prompt:
    """Return the prompt of a simple request, with chain hashes for each block size. The hashes are
    computed from token ids if the body contains them, otherwise from its text.
    """
    chains = plain.text.chains(block_sizes, model, adapter, plain.cache_salt)
    return Prompt(plain.tokens, plain.longest_tokens, chains, not plain.has_ids)


def is_counted(prompt: Prompt) -> bool:
    """Return True if all token ids of a text prompt are known."""
    return bool(prompt.encoded) or bool(prompt.rendered_by)


class PromptReader:
    """Reads requests' prompts, with a tokenizer if there is one. Lifetime: process.

    `now_s` is the wall clock in seconds, for templates that print the date. At most `waiting_max`
    requests (limits.inflight_requests) wait for a thread of `executor`, or of `long`, in which long
    bodies are read so that no short prompt waits for them. Requests get these threads in the order
    of their turns. Prompts of models that `check` does not trust are read as text.
    `drops_unused_tools` says that a chat with `tool_choice` "none" is rendered without tools.
    `rendered` gets from renderers the prompts that `encoders` cannot make as the engines do.
    `kind_of` returns the kind of engine that serves a model, or None if there are several.
    """

    def __init__(
        self,
        encoders: Encoders | None,
        executor: Executor,
        now_s: Callable[[], float],
        waiting_max: int,
        check: TokenCheck,
        drops_unused_tools: bool = False,
        long: Executor | None = None,
        rendered: RenderedPrompts | None = None,
        kind_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._kind_of = kind_of
        self._encoders = encoders
        self._short = InTurn(executor)
        self._long = self._short if long is None else InTurn(long)
        self._turns = count()
        self._now_s = now_s
        self._waiting_max = waiting_max
        self._waiting = 0
        self._check = check
        self._drops_unused_tools = drops_unused_tools
        self._rendered = rendered
        self.attributions = AttributionLines()
        self.template_refusals = 0  # chats the template could not render; read approximately

    @property
    def memo(self) -> PieceMemo | None:
        """The memo with the token ids of known texts; None if the router has no tokenizer."""
        return None if self._encoders is None else self._encoders.memo

    @property
    def has_tokenizer(self) -> bool:
        """True if the router has a tokenizer of its own."""
        return self._encoders is not None

    def next_turn(self) -> int:
        """Return the number of a request that has just arrived, by which `scan` and `read` order
        requests.
        """
        return next(self._turns)

    async def scan(
        self,
        body: bytes,
        path: Path,
        limits: ScanLimits,
        shape: Shape | None = None,
        turn: int | None = None,
    ) -> Scanned | Plain:
        """Return the request in `body`, sent to `path`, for `read`. Raises ClientError(400, 413,
        429).

        `shape` reads bodies that are not a single JSON object of a known form. Without a `turn`,
        the request comes after all earlier ones. If there is a tokenizer, the body is not read
        quickly, because the tokenizer needs the text.
        """
        if shape is not None:
            if len(body) < LONG_BYTES:
                return shape(body, limits)
            return await self._in_thread(self._long, turn, lambda: shape(body, limits))
        plainly = path.reads == "openai" and self._encoders is None
        if len(body) < LONG_BYTES or (plainly and len(body) <= _INLINE_BYTES):
            check_no_transfer(body, TRANSFER_FIELDS)
        if plainly and len(body) <= _INLINE_BYTES:
            plain = plain_scan(body, path.path, limits)
            if plain is not None:
                return plain
            plainly = False
        if len(body) < LONG_BYTES:
            return _scan(body, path, limits, plainly)
        return await self._in_thread(
            self._long, turn, lambda: _scan_long(body, path, limits, plainly)
        )

    async def read(
        self,
        scanned: Scanned | Plain,
        model: str,
        block_sizes: Iterable[int],
        adapter: str | None = None,
        *,
        body_bytes: int = 0,
        turn: int | None = None,
        asked: RenderRequest | None = None,
    ) -> Prompt:
        """Return the prompt of a request to `model`, with one chain of hashes for each block size
        of the model's workers.

        `model` is the base model if `adapter` names the requested LoRA adapter. A request with
        several prompts is placed by the first one; a request without any counts as one token.
        Raises ClientError(429) if too many requests wait. `body_bytes` is the length of the whole
        request; `turn` is the same as for `scan`; `asked` is the request as a renderer may get it,
        or None.
        """
        if isinstance(scanned, Plain):  # no tokenizer is asked
            if not scanned.has_ids:
                rendered = await self._render(scanned, model, block_sizes, adapter, asked, turn)
                if rendered is not None:
                    return rendered
            hashed = partial(_hashed, scanned, block_sizes, model, adapter)
            if scanned.longest_tokens <= _INLINE_TOKENS:
                return hashed()
            return await self._in_thread(self._long, turn, hashed)
        sizes = sorted(set(block_sizes))
        if not scanned.prompts and not scanned.messages:
            none = dict.fromkeys(sizes, _NO_BLOCKS)
            return Prompt(1, 1, none, True, (), *_common_fields(scanned))
        encoder = self._encoder_for(scanned, adapter or model)
        if encoder is None:
            rendered = await self._render(scanned, model, sizes, adapter, asked, turn)
            if rendered is not None:
                return rendered
        long = body_bytes >= LONG_BYTES
        if encoder is None and not long:
            return _prompt(scanned, (), model, sizes, adapter)

        def work() -> tuple[Prompt, bool]:
            encoded, refused = self._encoded(scanned, encoder)
            return _prompt(scanned, encoded, model, sizes, adapter), refused

        prompt, refused = await self._in_thread(self._long if long else self._short, turn, work)
        self.template_refusals += refused
        if encoder is not None and prompt.approximate:
            rendered = await self._render(scanned, model, sizes, adapter, asked, turn)
            return prompt if rendered is None else rendered
        return prompt

    async def _render(
        self,
        scanned: Scanned | Plain,
        model: str,
        sizes: Iterable[int],
        adapter: str | None,
        asked: RenderRequest | None,
        turn: int | None,
    ) -> Prompt | None:
        """Return the prompt with token ids that a renderer made; None if no renderer makes them in
        time.
        """
        by_ids = isinstance(scanned, Scanned) and (
            scanned.by_text or any(isinstance(one, np.ndarray) for one in scanned.prompts)
        )
        if asked is None or self._rendered is None or by_ids or not self._rendered.can(asked):
            return None
        found = await self._rendered.of(asked, partial(self._in_thread, self._long, turn))
        if found is None:
            return None
        hashed = partial(_rendered_prompt, found, scanned, model, sizes, adapter)
        if len(found.rendered[0].ids) <= _INLINE_TOKENS:
            return hashed()
        return await self._in_thread(self._long, turn, hashed)

    def _encoder_for(self, scanned: Scanned, model: str) -> PromptEncoder | None:
        """Return the encoder for the prompt's text; None if the prompt is read as text, or arrived
        as token ids.
        """
        ids = scanned.prompts and isinstance(scanned.prompts[0], np.ndarray)
        if ids or scanned.by_text or self._encoders is None:
            return None
        if not self._check.trusts(model, bool(scanned.options.tools)):
            return None
        return self._encoders.of(self._kind_of(model))

    def _encoded(
        self, scanned: Scanned, encoder: PromptEncoder | None
    ) -> tuple[Sequence[Tokens], bool]:
        """Return the exact token ids of each prompt, none if they are unknown; and whether the
        encoder rejected the prompt.
        """
        if encoder is None:
            return (), False
        try:
            return self._encode(scanned, encoder), False
        except PromptError:
            return (), True

    def _encode(self, scanned: Scanned, encoder: PromptEncoder) -> list[Tokens]:
        options, salt = scanned.options, scanned.cache_salt
        if has_media(scanned.messages):
            return []
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
        ids = encoder.encode_chat(chat, self._now_s(), salt)
        return [_kept(ids, scanned) if encoder.cuts_chats else ids]

    async def _in_thread(self, threads: InTurn, turn: int | None, work: Callable[[], T]) -> T:
        if self._waiting >= self._waiting_max:
            why = f"{self._waiting} requests wait to be tokenized already; try again later"
            raise ClientError(429, why, code="router_full")
        self._waiting += 1
        try:
            return await threads.run(self.next_turn() if turn is None else turn, work)
        finally:
            self._waiting -= 1


def _scan_long(body: bytes, path: Path, limits: ScanLimits, plainly: bool) -> Scanned | Plain:
    check_no_transfer(body, TRANSFER_FIELDS)
    return _scan(body, path, limits, plainly)


def _scan(body: bytes, path: Path, limits: ScanLimits, plainly: bool) -> Scanned | Plain:
    if path.reads != "openai":
        return SHAPES[path.reads](body, limits)
    plain = plain_scan(body, path.path, limits) if plainly else None
    return scan(body, path.path, limits) if plain is None else plain


def _prompt(
    scanned: Scanned,
    encoded: Sequence[Tokens],
    model: str,
    sizes: Iterable[int],
    adapter: str | None,
) -> Prompt:
    """Return the prompt, made from the token ids in the request or those in `encoded`, otherwise
    from its text.
    """
    ids = [one for one in scanned.prompts if isinstance(one, np.ndarray)]
    blocks = [_kept(one, scanned) for one in ids] or encoded
    salt = scanned.cache_salt
    approximate = not blocks
    if approximate:  # blocks of text: no engine's events name the like
        blocks = [_kept(text, scanned) for text in _texts(scanned)]
        seed = chain_seed(adapter or model, "text", salt)
    else:
        seed = chain_seed(model, adapter, salt)
    chains = {size: hashes_of(blocks[0], size, seed) for size in sizes}
    lengths = [max(len(tokens), 1) for tokens in blocks]
    total, longest = sum(lengths), max(lengths)
    return Prompt(total, longest, chains, approximate, encoded, *_common_fields(scanned))


def _rendered_prompt(
    found: RenderedPrompt,
    scanned: Scanned | Plain,
    model: str,
    sizes: Iterable[int],
    adapter: str | None,
) -> Prompt:
    """Return the prompt, made from all token ids that a renderer made, or from those of its known
    beginning.
    """
    ids, media = found.rendered[0]
    chains = media_chains(ids, media, sizes, model=model, adapter=adapter, salt=scanned.cache_salt)
    lengths = [len(one.ids) for one in found.rendered]
    # No prompt is refused for its length by an estimate.
    total, longest = sum(lengths) + found.rest_tokens, max(lengths)
    asides = () if isinstance(scanned, Plain) else _common_fields(scanned)
    prompt = Prompt(total, longest, chains, False, (), *asides)
    # A client may serve engine and renderer different images, so their counts judge nothing.
    by = "" if any(one.media for one in found.rendered) else found.renderer
    return replace(prompt, begins=found.rest_tokens > 0, rendered_by=by)


def _common_fields(scanned: Scanned) -> tuple[str, Sequenced | None, bool, bool]:
    """Return the fields of the prompt that do not depend on how it is read."""
    return scanned.routed_by, scanned.sequence, scanned.runs_on, scanned.stops


def _kept(tokens: Tokens, scanned: Scanned) -> Tokens:
    """Return the tokens that `truncate_prompt_tokens` leaves of a prompt, which are its last or its
    first ones.
    """
    limit = scanned.options.truncate_prompt_tokens
    if type(limit) is not int or not 0 < limit < len(tokens):
        return tokens
    return tokens[:limit] if scanned.options.truncation_side == "right" else tokens[-limit:]


def _texts(scanned: Scanned) -> list[Tokens]:
    """Return each prompt's text as pseudo tokens, each of which stands for four bytes."""
    texts = [text for text in scanned.prompts if isinstance(text, str)]
    if not texts:
        return [_text_tokens(_conversation(scanned))]
    return [_text_tokens(text.encode("utf-8", "surrogatepass")) for text in texts]


def _text_tokens(data: bytes | bytearray) -> Tokens:
    return np.frombuffer(data, _INT32, len(data) // BYTES_A_TOKEN)


def _conversation(scanned: Scanned) -> bytearray:
    """Return a chat as one text, so that the text of an earlier turn is a prefix of the text of a
    later one.

    Each part is written separately, because writing a long chat in one step would hold Python's
    lock for too long.
    """
    encode, tools = msgspec.json.encode, scanned.options.tools
    text = bytearray(b"[" + b",".join(map(encode, tools)) + b"]" if tools else b"")
    for message in without_media(scanned.messages):
        text += encode(message)
    return text
