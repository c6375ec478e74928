"""Sends requests with LiteLLM and LlamaIndex: a program for these clients' own environment.

    python client_calls.py URL MODEL

It prints one JSON object with the result of each call by its name.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

CHAT = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TOKENS = 12


def of_litellm(url: str, model: str) -> dict[str, Any]:
    """Call a server with LiteLLM: chats, whole and streamed, with tools, and a completion."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded
    litellm = importlib.import_module("litellm")
    asked = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    asked |= {"max_tokens": TOKENS}
    chat = asked | {"model": f"openai/{model}", "messages": CHAT}
    several = chat | {"n": 2, "seed": 1, "temperature": 0.8}
    pieces = list(litellm.completion(**chat, stream=True))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Good day.", **asked
    )
    return {
        "litellm chat": litellm.completion(**chat).model_dump(),
        "litellm tools": litellm.completion(**chat, tools=[TOOL]).model_dump(),
        "litellm several": litellm.completion(**several).model_dump(),
        "litellm stream": "".join(p.choices[0].delta.content or "" for p in pieces),
        "litellm text": text.model_dump(),
    }


def of_llama_index(url: str, model: str) -> dict[str, Any]:
    """Call a server with LlamaIndex: a completion and chats, whole and streamed."""
    module = importlib.import_module("llama_index.llms.openai_like")
    types = importlib.import_module("llama_index.core.llms")
    model_at = module.OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", max_retries=0, temperature=0,
        max_tokens=TOKENS, is_chat_model=True, context_window=4096,
    )  # fmt: skip
    plain = module.OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", max_retries=0, temperature=0,
        max_tokens=TOKENS, context_window=4096,
    )  # fmt: skip
    messages = [types.ChatMessage(role=m["role"], content=m["content"]) for m in CHAT]
    return {
        "llama-index chat": str(model_at.chat(messages)),
        "llama-index stream": "".join(p.delta or "" for p in model_at.stream_chat(messages)),
        "llama-index complete": plain.complete("Good day.").text,
    }


def main() -> None:
    """Call the server with each client and print the results as JSON."""
    url, model = sys.argv[1:]
    print(json.dumps(of_litellm(url, model) | of_llama_index(url, model)))


if __name__ == "__main__":
    main()
