"""The cost of tokenizing a chat's last turn: from scratch, and with the earlier turns known.

    python tests/bench/tokens.py [--json] [--turns N] [--tokens N] [--runs N] [--model DIR]

A chat has N turns and N tokens at its last one. `scratch` renders the template and encodes all
text; `memo` renders and encodes only what the turn before did not have (`engine.wire.memo`);
`again` sends the same turn once more. The parts are shown, too: rendering, cutting, hashing of the
text, and the chain hashes of the ids. Each run compares the ids. `image` is a chat with ten
megabytes of base64: it measures reading the body, and the digest in the image's place.

Without --model the tokenizer is trained here on this project's own files: byte-level BPE, 20,000
tokens, with the regular expression that Llama 3 and Qwen use; the template is ChatML with tools and
thinking. Figures are medians of CPU time on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from engine.wire.hf import HfTokenizer  # noqa: E402
from engine.wire.memo import MemoEncoder  # noqa: E402
from engine.wire.tokens import Chat  # noqa: E402
from kvkernels import chain_hashes  # noqa: E402
from router.body.scan import scan  # noqa: E402
from router.tokens.media import without_media  # noqa: E402
from tests.engine.model_dirs import ORDINARY, SPECIAL, write_model  # noqa: E402

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NOW_S = 1_700_000_000.0
MEMO_BYTES = 64 << 20


def texts() -> list[str]:
    """Return the texts that train the tokenizer and fill the chat."""
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("*/*.py"), *ROOT.glob("tests/*/*.py")]
    return [path.read_text(encoding="utf-8") for path in sorted(files)]


def trained(folder: Path) -> Path:
    """Write a model directory with a tokenizer of a common kind; return it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=20_000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts(), trainer)
    reserved = [f"<|reserved_{number}|>" for number in range(240)]
    made.add_special_tokens([*SPECIAL, *ORDINARY, *reserved])
    write_model(folder)
    made.save(str(folder / "tokenizer.json"))
    return folder


def chat_of(tokenizer: HfTokenizer, turns: int, tokens: int) -> list[dict[str, Any]]:
    """Return the messages of `turns` turns with about `tokens` tokens; the last turn has
    no answer.
    """
    ids = tokenizer.encode("\n".join(texts()), add_special_tokens=False)
    each = tokens // (2 * turns - 1)
    ids = ids * (tokens // len(ids) + 1)
    pieces = [tokenizer.decode(ids[n * each : (n + 1) * each]) for n in range(2 * turns - 1)]
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(pieces)]


def measure(tokenizer: HfTokenizer, turns: int, tokens: int, runs: int) -> dict[str, float]:
    """Return the median times in microseconds, by name."""
    messages = chat_of(tokenizer, turns, tokens)
    last, before = Chat(messages=messages), Chat(messages=messages[:-2])
    exact = np.array(tokenizer.encode_chat(last, NOW_S), dtype=np.int32)
    text = tokenizer.render(last, NOW_S)
    cuts = tokenizer.cuts
    assert cuts is not None, "this tokenizer's texts cannot be cut"
    rows: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start_ns = time.thread_time_ns()
        result = work()
        rows.setdefault(name, []).append((time.thread_time_ns() - start_ns) / 1_000)
        return result

    for _ in range(runs):
        timed("scratch", partial(tokenizer.encode_chat, last, NOW_S))
    # Measured apart, because the memory of a large encoding is freed in the next call.
    for _ in range(runs):
        memo = MemoEncoder(tokenizer, tokenizer, MEMO_BYTES)
        memo.encode_chat(before, NOW_S)
        for name in ("memo", "again"):
            ids = timed(name, partial(memo.encode_chat, last, NOW_S))
            if ids.tobytes() != exact.tobytes():
                raise SystemExit("the memo's ids differ from those from scratch")
        timed("render", partial(tokenizer.render, last, NOW_S))
        timed("cut", partial(cuts.of, text))
        timed("hash text", partial(hashlib.blake2b, text.encode()))
        timed("hash chain", partial(chain_hashes, exact, 16, 0))
    sizes = {"tokens": float(len(exact)), "characters": float(len(text))}
    return sizes | {name: statistics.median(times) for name, times in rows.items()}


def image_us(runs: int) -> dict[str, float]:
    """Return the median times for a chat with a large image, in microseconds by name."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (10 << 20)}}
    text = {"type": "text", "text": "What is it?"}
    body = json.dumps({"messages": [{"role": "user", "content": [text, image]}]}).encode()
    scans, digests = [], []
    for _ in range(runs):
        start_ns = time.thread_time_ns()
        scanned = scan(body, "/v1/chat/completions")
        scanned_ns = time.thread_time_ns()
        without_media(scanned.messages)
        digests.append((time.thread_time_ns() - scanned_ns) / 1_000)
        scans.append((scanned_ns - start_ns) / 1_000)
    return {"image scan": statistics.median(scans), "image digest": statistics.median(digests)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--model", type=Path, help="a directory with tokenizer.json and a template")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with TemporaryDirectory() as folder:
        directory = options.model or trained(Path(folder))
        tokenizer = HfTokenizer(directory)
    figures = measure(tokenizer, options.turns, options.tokens, options.runs)
    figures |= image_us(options.runs)
    figures["ratio"] = figures["scratch"] / figures["memo"]
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        return
    print(f"{figures.pop('tokens'):.0f} tokens, {figures.pop('characters'):.0f} characters")
    print(f"scratch / memo: {figures.pop('ratio'):.1f}; prediction: at least 10")
    for name, value in figures.items():
        print(f"{name:>12} {value:10.0f} us")


if __name__ == "__main__":
    main()
