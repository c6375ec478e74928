"""Text to token ids and back: the protocol of tokenizers, and a tokenizer for workers without a
real one.

Router and engine use the same objects, so that the router's chain hashes are those of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import xxhash


class PromptError(ValueError):
    """Raised for a prompt or messages that cannot be tokenized; the message is for the client.
    `param` names the faulty field of the request, as in OpenAI's error bodies.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


MAX_MESSAGES = 1 << 16
Message = dict[str, Any]


class Chat(msgspec.Struct, frozen=True):
    """The fields of a chat request that shape its prompt (names as in OpenAI's and vLLM's API).

    Lifetime: request. Decode it from the body; unknown fields are ignored there.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False  # the template writes them itself


class StreamDecoder(Protocol):
    """Decodes the token ids of one sequence as they come. Lifetime: request."""

    def step(self, token: int) -> str:
        """Return the text that is certain once `token` has come; "" within a character."""

    def end(self) -> str:
        """Return the text of ids that were held back, because no more ids will come. A part of a
        character becomes U+FFFD.
        """


class Tokenizer(Protocol):
    """Converts texts and chats to token ids and back. Stateless between calls; safe to call from a
    worker thread.
    """

    @property
    def vocab(self) -> int:
        """The size of the vocabulary: ids are 0 .. vocab - 1."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a plain prompt."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids, which are below `vocab`; on request without special tokens."""

    def stream(self, after: Sequence[int] = (), skip_special_tokens: bool = False) -> StreamDecoder:
        """Return a new incremental decoder for ids that follow the ids `after`. Some tokenizers
        drop a blank where a text begins, and an answer is no beginning; vLLM shows its decoder the
        prompt's end for the same reason.
        """

    def render(self, chat: Chat, now_s: float) -> str:
        """Return the prompt of a chat as text. Raises PromptError."""

    def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
        """Return the prompt of a chat as ids. `now_s` (seconds since the epoch) is for
        templates.
        """


# Long runs without a space (Chinese, base64) are cut, so that they cost tokens like elsewhere.
_WORD = re.compile(r"\w{1,16}|[^\w\s]")


def _text_of(token: int) -> str:
    return f" t{token}"


class _WordStream:
    """Decodes ids that are whole words; it holds nothing back and has no state."""

    step = staticmethod(_text_of)

    def end(self) -> str:
        return ""


_WORDS = _WordStream()


class WordTokenizer:
    """A tokenizer with one token for each word or punctuation mark. Lifetime: process; holds no
    state.

    The token `t` is written " t<t>", and such a word is read back as that id, so text made by
    `decode` encodes to the ids it came from. Other words get the id XXH3-64(word) mod vocab. White
    space separates and is lost. Raises ValueError for a vocab outside 2..2^31-1.
    """

    def __init__(self, vocab: int) -> None:
        if not 2 <= vocab < 1 << 31:
            raise ValueError(f"vocab must be 2..{(1 << 31) - 1}, got {vocab}")
        self._vocab = vocab

    @property
    def vocab(self) -> int:
        return self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._word_id(word) for word in _WORD.findall(text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(_text_of, ids))

    def stream(self, after: Sequence[int] = (), skip_special_tokens: bool = False) -> StreamDecoder:
        return _WORDS

    def render(self, chat: Chat, now_s: float) -> str:
        turns = [f"<{message['role']}>{message_text(message)}" for message in checked(chat)]
        if chat.add_generation_prompt and not chat.continue_final_message:
            turns.append("<assistant>")
        tools = msgspec.json.encode(chat.tools).decode() if chat.tools else ""
        return tools + "\n".join(turns)

    def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
        return self.encode(self.render(chat, now_s))

    def _word_id(self, word: str) -> int:
        if word[0] == "t":
            digits = word[1:]
            if digits.isdecimal() and digits.isascii():
                token = int(digits)
                if token < self._vocab and str(token) == digits:
                    return token
        # A lone surrogate can come from JSON escapes; it must not raise an error here.
        return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) % self._vocab


def checked(chat: Chat) -> list[Message]:
    """Return the messages; each has a role, and content of a known form. Raises PromptError."""
    if not chat.messages:
        raise PromptError("messages must not be empty", "messages")
    if len(chat.messages) > MAX_MESSAGES:
        raise PromptError(f"{len(chat.messages)} messages; at most {MAX_MESSAGES}", "messages")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise PromptError(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    for position, message in enumerate(chat.messages):
        where = f"messages[{position}]"
        if not isinstance(message.get("role"), str):
            raise PromptError(f"{where}.role must be a string", f"{where}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise PromptError(
                f"{where}.content must be a string or an array of parts", f"{where}.content"
            )
        for part in content if isinstance(content, list) else ():
            check_part(part, f"{where}.content")
    return chat.messages


def check_part(part: object, where: str) -> None:
    """Raise PromptError unless a part is text; other parts cannot become tokens here."""
    if isinstance(part, str):
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PromptError(f"{where}: a part must be an object with a type", where)
    if part["type"] not in ("text", "input_text", "output_text", "refusal", "thinking"):
        raise PromptError(f"{where}: parts of type {part['type']!r} are not supported", where)
    if not isinstance(part_text(part), str):
        raise PromptError(f"{where}: a {part['type']} part must carry a string", where)


def part_text(part: Any) -> Any:
    """Return the text of one content part. The key of the text is `text`, or the name of the part's
    type.
    """
    if isinstance(part, str):
        return part
    return part.get("text", part.get(part["type"]))


def message_text(message: Message) -> str:
    """Return the content as one string: non-empty parts joined by newlines, as vLLM does it."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, map(part_text, content)))
