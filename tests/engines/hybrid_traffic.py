"""Prompts that test the rules of a hybrid cache: new, with a shared root, repeated, longer,
shorter.

A window's blocks are kept only at the end of a prompt: a shortened prompt may find nothing,
although the model's other layers still have its blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.engines.model import SPECIALS, VOCABULARY
from tests.engines.vllm_server import MODEL

ROOTS = 3
LASTING = 8  # prompts that one client may ask for again
LONGEST_ANSWER = 40  # tokens: more than a block
FEWEST = 20  # tokens of a prompt
Tokens = list[int]


@dataclass(slots=True)
class Traffic:
    """Draws prompts that continue earlier prompts and their answers. Lifetime: test."""

    draw: random.Random
    longest: int  # prompt, in tokens
    lasting: int = LASTING
    roots: list[Tokens] = field(default_factory=list)
    said: list[Tokens] = field(default_factory=list)  # prompts with their answers, newest last

    def __post_init__(self) -> None:
        """Draw the beginnings that several prompts share."""
        self.roots = [self._new(self.longest // 4, self.longest // 2) for _ in range(ROOTS)]

    def prompt(self) -> Tokens:
        """Return the token ids of the next prompt."""
        draw = self.draw
        before = draw.choice(self.said) if self.said else self._new(FEWEST, self.longest)
        match draw.choices(range(5), (1, 3, 4, 6, 1))[0]:
            case 0:
                made = self._new(FEWEST, self.longest)
            case 1:
                made = draw.choice(self.roots) + self._new(1, self.longest // 2)
            case 2:
                made = list(before)
            case 3:
                made = before + self._new(1, 100)
            case _:
                made = before[: draw.randrange(FEWEST, max(FEWEST + 1, len(before)))]
        return made[: self.longest]

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the next request."""
        return {
            "model": MODEL,
            "prompt": self.prompt(),
            "max_tokens": self.draw.choice([1, 1, 8, LONGEST_ANSWER]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def answered(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Record a request's answer, so that a later prompt may continue it."""
        self.said.append(body["prompt"] + answer["choices"][0]["token_ids"])
        del self.said[: -self.lasting]

    def _new(self, fewest: int, most: int) -> Tokens:
        count = self.draw.randint(fewest, most)
        return [self.draw.randrange(len(SPECIALS), VOCABULARY) for _ in range(count)]
