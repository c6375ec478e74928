"""A tiny Llama trained in seconds on an artificial language, so that its perplexity has a
meaning.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers

from engine.model.batch import Piece, flat_batch
from engine.model.kv_cache import KvCache
from engine.model.transformer import Transformer

VOCAB, CONTEXT = 128, 64
STEPS, BATCH = 200, 12
NAMES = ("anna", "boris", "chen", "dora", "emil", "farah")
THINGS = ("lamp", "river", "stone", "kite", "ladder", "garden", "clock", "engine")
COLOURS = ("red", "green", "small", "old", "quiet", "bright")
DEEDS = (("sees", "saw"), ("paints", "painted"), ("sells", "sold"), ("lifts", "lifted"))


def text(seed: int, characters: int) -> str:
    """Return sentences of the artificial language, in which the name and the colour occur a second
    time.
    """
    draw = random.Random(seed)
    said: list[str] = []
    length = 0
    while length < characters:
        name, thing, deed = draw.choice(NAMES), draw.choice(THINGS), draw.choice(DEEDS)
        colour = draw.choice(COLOURS)
        said.append(f"{name} {deed[0]} the {colour} {thing}. so {name} {deed[1]} it: {colour}. ")
        length += len(said[-1])
    return "".join(said)[:characters]


def train(folder: Path, seed: int = 0) -> float:
    """Train a model and write its checkpoint into `folder`; return the last step's loss in nats."""
    torch.manual_seed(seed)
    shape = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(shape)
    corpus = torch.tensor(list(text(seed, 60_000).encode()))
    steps = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(steps, STEPS)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        starts = torch.randint(len(corpus) - CONTEXT, (BATCH,))
        ids = torch.stack([corpus[start : start + CONTEXT] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        steps.zero_grad()
        loss.backward()
        steps.step()
        slower.step()
    model.save_pretrained(folder)
    return float(loss.detach())


def perplexity(model: Transformer, said: str, kv_dtype: str, chunk: int = 50) -> float:
    """Return the perplexity: exp of the mean surprise at each character after the first of each
    CONTEXT, computed in chunks of `chunk` tokens.
    """
    ids = list(said.encode())
    nats, count = 0.0, 0
    for start in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        own = ids[start : start + CONTEXT]
        kv = KvCache(model.config, CONTEXT // 16, 16, dtype=model.dtype, kv=kv_dtype)
        rows = []
        for at in range(0, CONTEXT, chunk):
            piece = Piece(own[at : at + chunk], at, range(kv.blocks), wants_all=True)
            rows.append(model.forward(flat_batch([piece], 16), kv))
        logits = torch.cat(rows)[:-1]
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(own[1:])).double()) * (
            CONTEXT - 1
        )
        count += CONTEXT - 1
    return float(torch.tensor(nats / count, dtype=torch.float64).exp())
