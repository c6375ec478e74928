"""Tests of vLLM's names of blocks, computed by its published rules, and of which blocks events mean
by these names.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvkernels import EventBatch, chain_hashes, chain_seed
from router.core.workers.engine_names import RULES, EngineNames
from tests.router.core.vllm_names import Engine

SIZE = 16
WINDOW = 3 * SIZE + 1  # tokens: a prompt's last three blocks are kept
PROMPT = list(range(1, 8 * SIZE + 1))
# Digests of the block before the first, of tokens 1..16 and of 17..32, by vLLM 0.9 to 0.33's own
# rules, computed with hashlib, cbor2 and xxhash.
VECTORS = {
    ("sha256_cbor", "0"): (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea",
        "4a0a393805c6d2f0ed831000d41bb65980336c4c04895d5e26470bbec927f5bf",
    ),
    ("sha256_cbor", "vllm-none-hash"): (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
        "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf",
    ),
    ("sha256", "0"): (
        "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        "bea72b7d33de03c1aa715efbb492d0e0d3801f00c1f985756896072ae8b31325",
        "2744667f6645310ff670b0c5d7c64987ffa5940de5a549f17d92dcbb5b559e31",
    ),
    ("sha256", "vllm-none-hash"): (
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
        "8e717becdc2054b7a3223b7b844f462c0db0ac86287b752b16d077ad0843c577",
    ),
    ("xxhash_cbor", "0"): (
        "1ebe36576dcb573f26b99533a20aaeca",
        "c2d7a75070fc6d6b0c3fb0af456c1009",
    ),
    ("xxhash", "0"): ("6fb31cc38bba6066183f7f2104b9c051", "6ba7d7fc1608e5f0a4612b1b0c87458f"),
}


@pytest.mark.parametrize(("algorithm", "seed"), sorted(VECTORS))
def test_rules_give_the_digests_of_vllm(algorithm: str, seed: str) -> None:
    (rule,) = (one for one in RULES if (one.algorithm, one.seed) == (algorithm, seed))
    root, *blocks = (bytes.fromhex(digest) for digest in VECTORS[algorithm, seed])
    assert rule.root == root
    assert rule.digests(root, PROMPT[: 2 * SIZE], SIZE)[: len(blocks)] == blocks


def test_long_integers_are_encoded_as_canonical_cbor() -> None:
    (rule,) = (r for r in RULES if (r.algorithm, r.seed) == ("sha256_cbor", "0"))
    encoded = rule.encode((b"\1" * 32, (0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1), None))
    ids = "00 17 1818 18ff 190100 19ffff 1a00010000 1a7fffffff"
    assert encoded == bytes.fromhex(f"83 5820 {'01' * 32} 88 {ids} f6")


ENGINE = Engine(SIZE, WINDOW)


def batch(*events: dict[str, Any]) -> EventBatch:
    return EventBatch(msgspec.msgpack.encode([0.0, events, 0]))


def places(names: EngineNames, *events: dict[str, Any]) -> dict[int, int]:
    found, chain = names.places(batch(*events))
    return dict(zip(found.tolist(), chain.tolist(), strict=True))


def expected(tokens: list[int], kept: list[int], engine: Engine | None = None) -> dict[int, int]:
    ids = np.array(tokens, dtype=np.int32)
    chain = chain_hashes(ids, SIZE, chain_seed("m", None, None)).tolist()
    names = (engine or ENGINE).names(tokens)
    return {names[at]: chain[at] for at in kept}


def test_the_blocks_of_a_tail_and_of_a_junction_are_identified() -> None:
    names = EngineNames("m")
    assert places(names, ENGINE.store_event(PROMPT, 0, [5, 6, 7])) == expected(PROMPT, [5, 6, 7])
    other = PROMPT[: 3 * SIZE] + [9] * 4 * SIZE
    event = ENGINE.store_event(other, 0, [0, 2, 5, 6])
    assert places(names, event) == expected(other, [0, 2, 5, 6])


def test_a_prompt_is_followed_through_chunks_without_kept_blocks() -> None:
    names, engine = EngineNames("m"), ENGINE
    assert places(names, engine.store_event(PROMPT[: 2 * SIZE], 0, [])) == {}
    assert places(names, engine.store_event(PROMPT[: 5 * SIZE], 2, [])) == {}
    assert places(names, engine.store_event(PROMPT, 5, [6, 7])) == expected(PROMPT, [6, 7])
    longer = PROMPT + [5] * SIZE  # a block of the answer
    assert places(names, engine.store_event(longer, 8, [8])) == expected(longer, [8])


def test_blocks_behind_an_unreported_block_are_not_identified() -> None:
    names = EngineNames("m")
    assert places(names, ENGINE.store_event(PROMPT, 4, [6, 7])) == {}


@pytest.mark.parametrize("seed", ["vllm-none-hash", "0"])
def test_the_naming_rule_is_learned_and_then_kept(seed: str) -> None:
    names, engine = EngineNames("m"), Engine(SIZE, WINDOW, seed)
    assert places(names, engine.store_event(PROMPT, 0, [7])) == expected(PROMPT, [7], engine)
    stranger = Engine(SIZE, WINDOW, "another")
    for _ in range(100):  # a prompt with a salt, say
        assert places(names, stranger.store_event(PROMPT, 0, [7])) == {}
    assert not names.unknown
    assert places(names, engine.store_event(PROMPT, 0, [6])) == expected(PROMPT, [6], engine)


def test_an_engine_without_a_known_naming_rule_is_skipped_until_a_restart() -> None:
    names, stranger = EngineNames("m"), Engine(SIZE, WINDOW, 1234)
    for number in range(64):
        assert not names.unknown, number
        assert places(names, stranger.store_event(PROMPT, 0, [5, 6, 7])) == {}
    assert names.unknown
    assert places(names, ENGINE.store_event(PROMPT, 0, [7])) == {}
    names.on_engine_restart()
    assert places(names, ENGINE.store_event(PROMPT, 0, [7])) == expected(PROMPT, [7])


def test_other_tiers_and_wide_token_ids_are_skipped() -> None:
    names = EngineNames("m")
    event = ENGINE.store_event(PROMPT, 0, [7])
    assert places(names, {**event, "medium": "CPU"}) == {}
    assert places(names, {**event, "token_ids": [2**40, *PROMPT[1:]]}) == {}
    assert places(names, {**event, "token_ids": PROMPT[:5]}) == {}


def test_the_work_for_each_batch_is_bounded() -> None:
    names = EngineNames("m")
    flood = {**ENGINE.store_event(PROMPT, 0, []), "token_ids": [1] * 70_000, "block_size": 1}
    assert places(names, flood, ENGINE.store_event(PROMPT, 0, [7])) == {}
    assert places(names, ENGINE.store_event(PROMPT, 0, [7])) == expected(PROMPT, [7])


def test_the_number_of_remembered_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.workers.engine_names._MOST_KNOWN", 3)
    names, engine = EngineNames("m"), ENGINE
    places(names, engine.store_event(PROMPT, 0, [0, 1, 2, 3, 4, 5, 6, 7]))
    longer = [*PROMPT[: 2 * SIZE], *([5] * SIZE)]
    assert places(names, engine.store_event(longer, 2, [2])) == {}  # its parent was forgotten
    last = PROMPT + [5] * SIZE
    assert places(names, engine.store_event(last, 8, [8])) == expected(last, [8])
