"""Token ids and chain hashes of a request's prompt, exact where its tokens can be had, else by
text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from engine.wire.memo import MemoEncoder
from engine.wire.tokens import Chat, PromptError
from kvkernels import PromptText, chain_seed, scan_request
from policies.contract import Hashes
from policies.record import record
from router.body.legs import check_no_transfer
from router.body.paths import Path
from router.body.scan import (
    LONG_BYTES,
    SHAPES,
    Message,
    ScanLimits,
    Scanned,
    Sequenced,
    Tokens,
    scan,
)
from router.core.workers.hit_modes import TokenState
from router.core.workers.kv_events import hashes_of
from router.engines.table import TRANSFER_FIELDS
from router.http.errors import ClientError
from router.request.in_turn import InTurn

# Parts whose content is text (vLLM 0.33 and OpenAI's API).
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_SHORT_CHARS = 64  # of names and options, which are kept as they are


def has_media(messages: Iterable[Message]) -> bool:
    """Whether any message has a part that is not text."""
    return any(
        isinstance(content := message.get("content"), list) and any(map(_is_medium, content))
        for message in messages
    )


def without_media(messages: Iterable[Message]) -> list[Message]:
    """The messages with every medium replaced by its XXH3-128, hexadecimal."""
    return [_shown(message) for message in messages]


def _shown(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_digested(part) if _is_medium(part) else part for part in content]
    return {**message, "content": parts}


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in TEXT_PARTS


def _digested(value: Any) -> Any:
    """The same value with long texts (addresses, base64) replaced by their digests."""
    if isinstance(value, str) and len(value) > _SHORT_CHARS:
        return xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return {_digested(key): _digested(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_digested(inner) for inner in value]
    return value


log = logging.getLogger(__name__)

MAX_MODELS = 4_096  # that are kept account of
_STRIKES_OUT = 3.0
_PAST_STRIKES = 2.0  # after its time aside, one more is enough
_FORGIVEN = 0.1  # by a prompt that agrees: one in eleven may differ, which a client could contrive
_LONGEST_RECHECK_S = 3_600.0


@dataclass(slots=True)
class _Account:
    """What is known of one model's tokens. Lifetime: process."""

    strikes: float = 0.0
    aside_s: float = 0.0  # how long it was put aside the last time
    until_s: float | None = None  # put aside by its traffic until then
    failing: set[int] = field(default_factory=set)  # workers whose probes differ
    failing_tools: set[int] = field(default_factory=set)  # ... where a chat has tools, only
    told: bool = False
    told_tools: bool = False


class TokenCheck:
    """Lifetime: process. `clock` gives seconds; `recheck_s` is how long a model stays aside at
    first; that doubles, up to an hour, each time that traffic after it differs again.
    """

    def __init__(self, clock: Callable[[], float], recheck_s: Callable[[], float]) -> None:
        self._clock = clock
        self._recheck_s = recheck_s
        self._accounts: dict[str, _Account] = {}
        self.mismatches: Counter[str] = Counter()  # by model

    def trusts(self, model: str, tools: bool = False) -> bool:
        """Whether prompts of `model` are placed by our ids now; `tools`: chats that have some."""
        account = self._accounts.get(model)
        if account is not None and tools and account.failing_tools:
            return False
        if account is None or (account.until_s is None and not account.failing):
            return True
        if account.until_s is not None and self._clock() >= account.until_s:
            account.until_s = None
            account.strikes = _PAST_STRIKES
        return account.until_s is None and not account.failing

    def state(self, model: str) -> TokenState:
        """Return the state of our token ids of `model`, by what its workers said of them."""
        if model not in self._accounts:
            return "unchecked"
        if not self.trusts(model):
            return "differ"
        return "checked" if self.trusts(model, tools=True) else "tools"

    def exact(self) -> Iterator[tuple[str, bool]]:
        """Every model that was checked, and whether it is trusted."""
        for model in list(self._accounts):
            yield model, self.trusts(model)

    def counted(self, model: str, own: int, reported: int) -> None:
        """A worker answered a prompt of `model`, for which we had counted `own` tokens."""
        account = self._account(model)
        if account is None:
            return
        if own == reported:
            account.strikes = max(account.strikes - _FORGIVEN, 0.0)
            if account.strikes == 0.0:
                account.aside_s = 0.0
            return
        self.mismatches[model] += 1
        account.strikes += 1.0
        if account.strikes < _STRIKES_OUT or account.until_s is not None:
            return
        account.aside_s = min(max(2 * account.aside_s, self._recheck_s()), _LONGEST_RECHECK_S)
        account.until_s = self._clock() + account.aside_s
        what = f"the last prompt has {own} tokens by our count, {reported} by its worker's"
        self._tell(model, account, what)

    def probed(self, model: str, worker_id: int, difference: str | None) -> None:
        """A worker was asked for the ids of our probes; `difference` None: they are ours."""
        account = self._account(model)
        if account is None:
            return
        if difference is None:
            account.failing.discard(worker_id)
            if not account.failing:
                account.until_s, account.strikes, account.told = None, 0.0, False
            return
        self.mismatches[model] += 1
        account.failing.add(worker_id)
        self._tell(model, account, f"worker {worker_id}: {difference}")

    def probed_tools(self, model: str, worker_id: int, difference: str | None) -> None:
        """The same for the probe that has tools, where the others are ours: engines hand tools to
        the template in forms of their own.
        """
        account = self._account(model)
        if account is None:
            return
        if difference is None:
            account.failing_tools.discard(worker_id)
            account.told_tools = account.told_tools and bool(account.failing_tools)
            return
        self.mismatches[model] += 1
        account.failing_tools.add(worker_id)
        if not account.told_tools:
            account.told_tools = True
            line = "model %r: its chats with tools are placed by text from now on: worker %d: %s"
            log.warning(line, model, worker_id, difference)

    def forget(self, worker_id: int) -> None:
        """The worker is gone, or serves something else now."""
        for account in self._accounts.values():
            account.failing.discard(worker_id)
            account.failing_tools.discard(worker_id)

    def _account(self, model: str) -> _Account | None:
        if model not in self._accounts:
            if len(self._accounts) >= MAX_MODELS:
                return None
            self._accounts[model] = _Account()
        return self._accounts[model]

    def _tell(self, model: str, account: _Account, what: str) -> None:
        if not account.told:
            account.told = True
            log.warning("model %r: its prompts are placed by text from now on: %s", model, what)


T = TypeVar("T")
Shape = Callable[[bytes, ScanLimits], Scanned]

BYTES_A_TOKEN = 4  # of UTF-8 text, roughly, for English and code with today's vocabularies
_INT32 = np.dtype("<i4")
_NO_BLOCKS = np.empty(0, dtype=np.uint64)
_NO_BLOCKS.flags.writeable = False
_INLINE_TOKENS = 1 << 15  # shorter chains are hashed at once: a thread would cost more
_INLINE_BYTES = 1 << 17  # shorter plain bodies are read at once, likewise


@record
class Prompt:
    """A prompt as the decision core takes it. Lifetime: request."""

    tokens: int  # of all prompts; exact, or guessed from the text where `approximate`
    longest_tokens: int  # of the longest one
    chains: Mapping[int, Hashes]  # by block size
    approximate: bool
    encoded: Sequence[Tokens] = ()  # ids that were made here of each prompt's text
    routed_by: str = ""  # for people, where that is not plain
    sequence: Sequenced | None = None  # all of which must meet one worker
    runs_on: bool = False  # at its worker, when its client has left
    stops: bool = False  # it ends another request


@record
class Plain:
    """One request's body, as `Scanned`, but for the prompts. Lifetime: request."""

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


def plain_scan(body: bytes, path: str, limits: ScanLimits) -> Plain | None:
    """The request of `body`, sent to `path`; None where `scan` must read it. Pure."""
    found = scan_request(
        body, limits.max_messages, limits.max_prompts, limits.max_choices, limits.max_key_chars
    )
    if found is None:
        return None
    text, fields = found
    model, stream, session, salt, priority, most, prompts, messages, tokens, longest, ids = fields
    if path.endswith("/chat/completions"):
        if not messages:
            return None
    elif not prompts and path.endswith("/completions"):
        return None
    return Plain(text, model, stream, session, salt, priority, most, tokens, longest, ids)


def _hashed(plain: Plain, block_sizes: Iterable[int], model: str, adapter: str | None) -> Prompt:
    """Return the prompt of a simple request body, with chain hashes for each block size.

    The hashes are computed from token ids if the body contains them, else from its text.
    """
    chains = plain.text.chains(block_sizes, model, adapter, plain.cache_salt)
    return Prompt(plain.tokens, plain.longest_tokens, chains, not plain.has_ids)


class PromptReader:
    """Lifetime: process. `now_s` is the wall clock in seconds, for templates that ask the date.

    At most `waiting_max` requests (limits.inflight_requests) wait for a thread of `executor`, or of
    `long`, where long bodies are read, so that no short prompt waits behind them. Requests have
    these threads in the order of their turns. Prompts of models that `check` does not trust are
    read as text. `drops_unused_tools`: a chat with `tool_choice` "none" is rendered without tools.
    """

    def __init__(
        self,
        encoder: MemoEncoder | None,
        executor: Executor,
        now_s: Callable[[], float],
        waiting_max: int,
        check: TokenCheck,
        drops_unused_tools: bool = False,
        long: Executor | None = None,
    ) -> None:
        self.encoder = encoder
        self._short = InTurn(executor)
        self._long = self._short if long is None else InTurn(long)
        self._turns = count()
        self._now_s = now_s
        self._waiting_max = waiting_max
        self._waiting = 0
        self._check = check
        self._drops_unused_tools = drops_unused_tools
        self.template_refusals = 0  # chats the template could not render; read approximately

    def next_turn(self) -> int:
        """The place in line of a request that has come now, for `scan` and `read`."""
        return next(self._turns)

    async def scan(
        self,
        body: bytes,
        path: Path,
        limits: ScanLimits,
        shape: Shape | None = None,
        turn: int | None = None,
    ) -> Scanned | Plain:
        """The request of `body`, sent to `path`, for `read`. Raises ClientError(400, 413, 429).

        `shape` reads bodies that are no single JSON object of a known form. Without a `turn` it is
        behind all that came.

        A tokenizer must see the text itself, which only the long way keeps.
        """
        if shape is not None:
            if len(body) < LONG_BYTES:
                return shape(body, limits)
            return await self._in_thread(self._long, turn, lambda: shape(body, limits))
        plainly = path.reads == "openai" and self.encoder is None
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
    ) -> Prompt:
        """The prompt of a request to `model`, with one chain per block size of its pool.

        `model` is the base, where `adapter` names the LoRA adapter that was asked for.
        Of a request with several prompts the first one places it; one without any counts as a
        token. Raises ClientError(429) while too many wait. `body_bytes`: of the whole request;
        `turn`: as for `scan`.
        """
        if isinstance(scanned, Plain):  # no tokenizer is asked
            hashed = partial(_hashed, scanned, block_sizes, model, adapter)
            if scanned.longest_tokens <= _INLINE_TOKENS:
                return hashed()
            return await self._in_thread(self._long, turn, hashed)
        sizes = sorted(set(block_sizes))
        if not scanned.prompts and not scanned.messages:
            none = dict.fromkeys(sizes, _NO_BLOCKS)
            return Prompt(1, 1, none, True, (), *_asides(scanned))
        encoder = self._encoder_for(scanned, adapter or model)
        long = body_bytes >= LONG_BYTES
        if encoder is None and not long:
            return _prompt(scanned, (), model, sizes, adapter)

        def work() -> tuple[Prompt, bool]:
            encoded, refused = self._encoded(scanned, encoder)
            return _prompt(scanned, encoded, model, sizes, adapter), refused

        prompt, refused = await self._in_thread(self._long if long else self._short, turn, work)
        self.template_refusals += refused
        return prompt

    def _encoder_for(self, scanned: Scanned, model: str) -> MemoEncoder | None:
        """The encoder of the prompt's text; None where it is read as text, or came as ids."""
        ids = scanned.prompts and isinstance(scanned.prompts[0], np.ndarray)
        if ids or scanned.by_text or self.encoder is None:
            return None
        return self.encoder if self._check.trusts(model, bool(scanned.options.tools)) else None

    def _encoded(
        self, scanned: Scanned, encoder: MemoEncoder | None
    ) -> tuple[Sequence[Tokens], bool]:
        """The exact ids of each prompt, none where they cannot be had; whether it was refused."""
        if encoder is None:
            return (), False
        try:
            return self._encode(scanned, encoder), False
        except PromptError:
            return (), True

    def _encode(self, scanned: Scanned, encoder: MemoEncoder) -> list[Tokens]:
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
        return [_kept(encoder.encode_chat(chat, self._now_s(), salt), scanned)]

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
    """The prompt of ids that came, or were `encoded` here, else of text."""
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
    return Prompt(total, longest, chains, approximate, encoded, *_asides(scanned))


def _asides(scanned: Scanned) -> tuple[str, Sequenced | None, bool, bool]:
    """What of a request is the same however its prompt is read."""
    return scanned.routed_by, scanned.sequence, scanned.runs_on, scanned.stops


def _kept(tokens: Tokens, scanned: Scanned) -> Tokens:
    """What `truncate_prompt_tokens` leaves: the last ones, or the first."""
    limit = scanned.options.truncate_prompt_tokens
    if type(limit) is not int or not 0 < limit < len(tokens):
        return tokens
    return tokens[:limit] if scanned.options.truncation_side == "right" else tokens[-limit:]


def _texts(scanned: Scanned) -> list[Tokens]:
    """Each prompt's text as if four bytes were a token."""
    texts = [text for text in scanned.prompts if isinstance(text, str)]
    if not texts:
        return [_text_tokens(_conversation(scanned))]
    return [_text_tokens(text.encode("utf-8", "surrogatepass")) for text in texts]


def _text_tokens(data: bytes | bytearray) -> Tokens:
    return np.frombuffer(data, _INT32, len(data) // BYTES_A_TOKEN)


def _conversation(scanned: Scanned) -> bytearray:
    """A chat as one text in which an earlier turn is a prefix of the later one.

    Each part is written by itself: all of a long chat at once would hold Python's lock.
    """
    encode, tools = msgspec.json.encode, scanned.options.tools
    text = bytearray(b"[" + b",".join(map(encode, tools)) + b"]" if tools else b"")
    for message in without_media(scanned.messages):
        text += encode(message)
    return text
