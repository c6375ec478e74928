"""How engines give token ids in a stream, and take them as a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Form:
    """What one kind of engine does with `return_token_ids` in a streamed request.

    `chat`: also in chats. `hidden`: the value of the fields of ids where nobody asked for them;
    empty: they are left out then. `chat_tokens`: what a chat gets at most that sets no limit
    itself; None: what the context has room for.
    """

    chat: bool = True
    hidden: bytes = b""
    chat_tokens: int | None = None


# vLLM: `openai/chat_completion/serving.py` names the fields in each choice, null where not asked.
# SGLang: pull request 30917; it refuses the field for streamed chats.
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "warmroute": Form(chat_tokens=256),
        "vllm": Form(hidden=b"null"),
        "sglang": Form(chat=False),
    }
)
GENERATE_TOKENS = 128  # what SGLang's own API gives then (0.5, `sampling/sampling_params.py`)
COMPLETION_TOKENS = 16  # what a completion gets that sets no limit: OpenAI's API, all of the above
