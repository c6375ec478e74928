"""Tests of the relay's parser of event streams with hostile input."""

import json
from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.fuzz.fuzzing import fuzz


def event(**choice: object) -> bytes:
    chunk = {"id": "a", "choices": [{"index": 0, "finish_reason": None, **choice}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


FIRST = event(text="a", token_ids=[1], prompt_token_ids=[1, 2])
ENDS = event(text="", token_ids=[3], finish_reason="stop")
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
SEEDS = (
    FIRST + event(text="", token_ids=[7]) + event(text="b", token_ids=[8]) + ENDS + USAGE,
    event(delta={"role": "assistant", "content": ""}) + event(delta={"content": "x"}) + ENDS,
    FIRST + event(delta={"tool_calls": [1], "content": None}) + ENDS.replace(b"\n", b"\r\n"),
    FIRST + b': ping\n\ndata: {"error":{"message":"x","code":500}}\n\n',
    FIRST + event(text="c", token_ids=list(range(30))) + event(finish_reason="abort"),
)


def test_mutated_streams_do_not_crash_the_relay(clang: None, tmp_path: Path) -> None:
    """The relay survives a fixed number of mutated inputs that start from streams of each kind, cut
    in two ways.
    """
    cuts = (b"\x00", b"\x06", b"\x81")
    seeds = {f"{n}-{cut[0]}": cut + stream for n, stream in enumerate(SEEDS) for cut in cuts}
    fuzz("streams", seeds, tmp_path, 8_000 * EFFORT)
