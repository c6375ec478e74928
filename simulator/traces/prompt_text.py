"""Turns prompts that a trace holds as text into tokens and block hashes, as each line is read.

No text is kept. Equal beginnings get equal hashes, and different ones do not. Without a tokenizer
four bytes of UTF-8 count as one token, and each message begins a new token, so that the turns of a
chat share all tokens of the earlier messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from engine.wire.tokens import Chat, PromptError, Tokenizer
from kvkernels import chain_hashes
from policies.contract import Hashes
from simulator.traces.job import LineError, TraceError
from simulator.traces.mooncake import MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS

BLOCK_TOKENS = 16
BYTES_A_TOKEN = 4
_MAX_ID = (1 << 31) - 1
_MAX_MODELS = 1_000  # that are told apart
_MAX_ENDS = 200_000  # prompts that a later one may continue; the oldest are forgotten first
_TEXTS = ("text", "input_text", "output_text")
_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "audio_url", "video",
          "video_url", "file", "input_file", "document", "blob", "uri")  # fmt: skip

Tokens = npt.NDArray[np.int32]


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of files that hold text."""

    model: Annotated[
        str | None,
        msgspec.Meta(description="name of the model whose requests are replayed; default: all"),
    ] = None
    output: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUT_TOKENS)],
        msgspec.Meta(description="number of tokens of an answer whose length the file lacks"),
    ] = 256
    tokenizer: Annotated[
        str | None,
        msgspec.Meta(description="folder of the model's tokenizer; default: a token is four bytes"),
    ] = None


class PromptText:
    """Turns prompts into tokens, block hashes and sessions. Lifetime: stream.

    Raises `TraceError` if the tokenizer cannot be read.
    """

    def __init__(self, block_tokens: int, options: TextOptions) -> None:
        self._block_tokens = block_tokens
        self._model = options.model
        self._tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
        self._conversations = _Conversations(block_tokens)
        self._models: set[str | None] = set()
        self._media = 0  # parts that are no text: each counts as its digest
        self._prompts = self._unnamed = 0  # the latter are without a session's id
        self._counted = self._reported = 0  # prompt tokens, where the trace has their number, too

    def selects(self, model: str | None) -> bool:
        """Return True if the options ask for requests of this model, or of any model."""
        if self._model not in (None, model):
            return False
        if len(self._models) < _MAX_MODELS:
            self._models.add(model)
        return True

    def named(
        self, tokens: Tokens, reported_tokens: int | None, session: str | int | None
    ) -> tuple[Hashes, str]:
        """Return the hashes of a prompt's full blocks, and its session. If no session is given, one
        is found by the prompt's beginning. `reported_tokens` is the number of the prompt's tokens
        that the trace names, or None if it names none.
        """
        self._prompts += 1
        if reported_tokens:
            self._counted += len(tokens)
            self._reported += reported_tokens
        names = chain_hashes(tokens, self._block_tokens)
        if session is not None:
            return names, session_digest(session)
        self._unnamed += 1
        return names, self._conversations.session_of(tokens, names)

    def notes(self) -> Iterator[str]:
        """Yield notes on the assumptions that were made about prompts and sessions."""
        by = "the tokenizer counts the tokens"
        if self._tokenizer is None:
            by = "without --tokenizer FOLDER, four bytes of a prompt are a token"
        share = self._reported / self._counted if self._counted else 1
        if self._prompts:
            yield by + f"; the file's own counts are {share:.2f} times these" * bool(self._counted)
        if self._conversations.begun:
            yield (
                f"{self._unnamed} requests without a session's id are taken as "
                f"{self._conversations.begun} sessions: a prompt that begins with all of an "
                "earlier one is its next turn"
            )
        if self._media:
            yield f"{self._media} images or other media count as a few tokens each"
        if len(self._models) > 1:
            yield (
                f"requests of {len(self._models)} models are taken together; "
                "--format 'auto?model=NAME' takes those of one"
            )

    def of_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Tokens:
        """Return the tokens of a chat, up to the place where the answer begins. Raises `LineError`
        for a chat that has no valid messages.
        """
        if not messages:
            raise LineError("messages: is empty; expected one or more")
        shown = [self._shown(message, number) for number, message in enumerate(messages)]
        if self._tokenizer is None:
            pieces = [_json(tools)] if tools else []
            pieces += map(_piece, shown)
            return _checked(np.frombuffer(b"".join(map(_padded, pieces)), np.dtype("<i4")))
        try:
            chat = Chat(messages=shown, tools=tools or None)
            return _checked(np.array(self._tokenizer.encode_chat(chat, 0.0), np.int32))
        except PromptError as error:  # its message may quote the prompt
            where = error.param or "messages"
            raise LineError(f"{where}: the tokenizer's chat template refuses it") from error

    def of_text(self, text: str) -> Tokens:
        """Return the tokens of a plain prompt; without a tokenizer, up to three last bytes may not
        count.
        """
        if self._tokenizer is not None:
            return _checked(np.array(self._encoded(text, framed=True), np.int32))
        data = text.encode()
        whole = len(data) // BYTES_A_TOKEN * BYTES_A_TOKEN
        return _checked(np.frombuffer(data[:whole] or _padded(data), np.dtype("<i4")))

    def of_ids(self, ids: Sequence[int]) -> Tokens:
        """Return the tokens of a prompt that is given as token ids."""
        if not all(0 <= one <= _MAX_ID for one in ids):
            raise LineError(f"prompt: a token id is beyond 0..{_MAX_ID}")
        return _checked(np.array(ids, np.int32))

    def count(self, text: str) -> int:
        """Return the number of tokens of an answer with this text."""
        if self._tokenizer is None:
            return -(-len(text.encode()) // BYTES_A_TOKEN)
        return len(self._encoded(text, framed=False))

    def _encoded(self, text: str, framed: bool) -> list[int]:
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode(text, framed)
        except PromptError as error:
            raise LineError("prompt: is not valid Unicode") from error

    def _shown(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the message as a chat template takes it, with its parts as one text."""
        where = f"messages[{number}]"
        if not isinstance(message.get("role"), str):
            raise LineError(f"{where}.role: expected a string")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise LineError(f"{where}.content: expected a string or a list of parts")
        if isinstance(content, list):
            content = "\n".join(map(self._part, content))
        return {**message, "content": content}

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            self._media += 1
            return f"<{xxh3_64_hexdigest(_json(part))}>"
        text = part.get("text", part.get("content")) if kind in _TEXTS else None
        return text if isinstance(text, str) else _json(part).decode()


def _tokenizer(folder: str) -> Tokenizer:
    from engine.wire.hf import HfTokenizer  # brings tokenizers and jinja2, needed here only

    try:
        return HfTokenizer(Path(folder))
    except (OSError, ValueError) as error:
        raise TraceError(
            f"tokenizer {folder}: cannot be read: {error}; expected a model's folder with "
            "tokenizer.json and tokenizer_config.json"
        ) from error


def _piece(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes: its role and text, then its other fields as JSON."""
    more = {
        key: value for key, value in message.items() if value and key not in ("role", "content")
    }
    text = f"{message['role']}\n{message['content'] or ''}".encode()
    return text + (_json(more) if more else b"")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _padded(piece: bytes) -> bytes:
    """Return the piece with one to four zero bytes added.

    Then no piece begins with the tokens of a shorter one.
    """
    return piece + bytes(BYTES_A_TOKEN - len(piece) % BYTES_A_TOKEN)


def _checked(tokens: Tokens) -> Tokens:
    if not 1 <= len(tokens) <= MAX_PROMPT_TOKENS:
        raise LineError(f"prompt: {len(tokens)} tokens; expected 1..{MAX_PROMPT_TOKENS}")
    return tokens


def session_digest(name: str | int) -> str:
    """Return a hash of a session's name in the trace, because the name may tell who the
    user was.
    """
    return blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _Conversations:
    """Finds the session of each prompt that names none.

    Lifetime: stream. A prompt that begins with all of an earlier prompt, and is longer, is the next
    turn after that. Only the first such prompt continues the session; another one begins a session
    of its own.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[tuple[int, int], list[str]] = {}  # sessions, by where their prompts end
        self._blocks: Counter[int] = Counter()  # how many of these prompts end behind each block
        self._waiting = 0
        self.begun = 0

    def session_of(self, tokens: Tokens, names: Hashes) -> str:
        """Return the session that a prompt continues or begins."""
        listed = [0, *names.tolist()]
        session = self._continued(tokens, listed)
        if session is None:
            self.begun += 1
            session = f"c{self.begun}"
        full = len(names)
        self._remember((listed[full], self._rest(tokens, full, len(tokens))), session)
        return session

    def _continued(self, tokens: Tokens, listed: Sequence[int]) -> str | None:
        size = self._block_tokens
        for full in range(len(listed) - 1, -1, -1):
            if listed[full] not in self._blocks:
                continue
            for end in range(min(len(tokens) - 1, full * size + size - 1), full * size - 1, -1):
                key = listed[full], self._rest(tokens, full, end)
                if key in self._ends:
                    return self._taken(key)
        return None

    def _rest(self, tokens: Tokens, full: int, end: int) -> int:
        return xxh3_64_intdigest(tokens[full * self._block_tokens : end].tobytes())

    def _remember(self, key: tuple[int, int], session: str) -> None:
        self._ends.setdefault(key, []).append(session)
        self._blocks[key[0]] += 1
        self._waiting += 1
        if self._waiting > _MAX_ENDS:
            self._taken(next(iter(self._ends)))

    def _taken(self, key: tuple[int, int]) -> str:
        sessions = self._ends[key]
        session = sessions.pop(0)
        self._waiting -= 1
        if not sessions:
            del self._ends[key]
        self._blocks[key[0]] -= 1
        if not self._blocks[key[0]]:
            del self._blocks[key[0]]
        return session
