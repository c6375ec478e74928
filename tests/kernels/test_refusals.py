"""Tests that the native code and its Python versions refuse bad arguments with the same message."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvkernels import _native
from tests.oracles import index as twins

Call = Callable[[Any], object]

BLOCKS = np.arange(8, dtype=np.uint64)
TOKENS = np.arange(8, dtype=np.int32)
FROZEN = np.frombuffer(bytes(8), dtype=np.int32)


def refusal(call: Call, module: ModuleType) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call(module)
    return type(caught.value), str(caught.value)


CASES: list[tuple[Call, type[Exception], str]] = [
    (lambda m: m.chain_hashes([1, 2], 1), TypeError, "tokens must be a buffer of int32, got list"),
    (lambda m: m.chain_hashes(None, 1), TypeError, "tokens must be a buffer of int32, got None"),
    (lambda m: m.chain_hashes(TOKENS.astype(np.int64), 1), TypeError, "got format 'l' of 8 bytes"),
    (lambda m: m.chain_hashes(TOKENS.astype(np.uint32), 1), TypeError, "got format 'I' of 4"),
    (lambda m: m.chain_hashes(TOKENS.astype(">i4"), 1), TypeError, "got format '>i' of 4"),
    (lambda m: m.chain_hashes(b"12345678", 1), TypeError, "got format 'B' of 1 bytes"),
    (lambda m: m.chain_hashes(TOKENS[::2], 1), ValueError, "tokens must be C-contiguous"),
    (lambda m: m.chain_hashes(TOKENS[::-1], 1), ValueError, "tokens must be C-contiguous"),
    (lambda m: m.chain_hashes(TOKENS.reshape(2, 4), 1), ValueError, "1 dimension, got 2"),
    (lambda m: m.chain_hashes(TOKENS.reshape(8, 1)[0, 0], 1), ValueError, "1 dimension, got 0"),
    (lambda m: m.chain_hashes(TOKENS, 0), ValueError, "block_size must be at least 1, got 0"),
    (lambda m: m.chain_hashes(TOKENS, -4), ValueError, "block_size must be at least 1, got -4"),
    (lambda m: m.chain_hashes(TOKENS, 1.5), TypeError, "block_size must be an int, got float"),
    (lambda m: m.chain_hashes(TOKENS, 1, -1), ValueError, "seed must be a uint64, got -1"),
    (lambda m: m.chain_hashes(TOKENS, 1, 2**64), ValueError, "seed must be a uint64, got 1844674"),
    (lambda m: m.chain_hashes(TOKENS, 1, "a"), TypeError, "seed must be an int, got str"),
    (lambda m: m.PrefixIndex(0), ValueError, "workers must be 1..4096, got 0"),
    (lambda m: m.PrefixIndex(4097), ValueError, "workers must be 1..4096, got 4097"),
    (lambda m: m.PrefixIndex(1, 0), ValueError, "max_entries must be at least 1, got 0"),
    (lambda m: m.PrefixIndex("8"), TypeError, "workers must be an int, got str"),
    (lambda m: m.PrefixIndex(2).store(2, BLOCKS), IndexError, "worker must be 0..1, got 2"),
    (lambda m: m.PrefixIndex(2).store(-1, BLOCKS), IndexError, "worker must be 0..1, got -1"),
    (lambda m: m.PrefixIndex(2).remove(5, BLOCKS), IndexError, "worker must be 0..1, got 5"),
    (lambda m: m.PrefixIndex(2).clear_worker(2), IndexError, "worker must be 0..1, got 2"),
    (lambda m: m.PrefixIndex(2).store("0", BLOCKS), TypeError, "worker must be an int, got str"),
    (lambda m: m.PrefixIndex(2).store(0, TOKENS), TypeError, "hashes must be a buffer of uint64"),
    (lambda m: m.PrefixIndex(2).remove(0, [1]), TypeError, "hashes must be a buffer of uint64"),
    (lambda m: m.PrefixIndex(2).longest_prefix({1}), TypeError, "uint64, got set; numpy.array"),
    (lambda m: m.PrefixIndex(2).raise_prefix(TOKENS, TOKENS), TypeError, "hashes must be a buffer"),
    (lambda m: m.PrefixIndex(2).raise_prefix(BLOCKS, BLOCKS), TypeError, "hits must be a buffer"),
    (lambda m: m.PrefixIndex(2).raise_prefix(BLOCKS, TOKENS[:3]), ValueError, "2 values, one a wo"),
    (lambda m: m.PrefixIndex(2).raise_prefix(BLOCKS, FROZEN), ValueError, "hits must be writable"),
    (lambda m: m.PrefixIndex(2).longest_prefix(BLOCKS[::2]), ValueError, "hashes must be C-contig"),
]


@pytest.mark.parametrize(("call", "kind", "words"), CASES, ids=[case[2] for case in CASES])
def test_native_and_python_errors_have_the_same_text(
    call: Call, kind: type[Exception], words: str
) -> None:
    native = refusal(call, _native)
    assert native[0] is kind
    assert words in native[1]
    assert native == refusal(call, twins)


@pytest.mark.parametrize("module", [_native, twins], ids=["native", "twin"])
def test_a_refused_call_changes_nothing(module: ModuleType) -> None:
    index = module.PrefixIndex(2)
    index.store(0, BLOCKS)
    refusal(lambda _: index.store(9, BLOCKS + np.uint64(100)), module)
    refusal(lambda _: index.remove(0, BLOCKS.astype(np.float64)), module)
    assert len(index) == 8
    assert index.longest_prefix(BLOCKS).tolist() == [8, 0]


def test_a_released_buffer_raises_the_exporters_error() -> None:
    view = memoryview(TOKENS)
    view.release()
    with pytest.raises(ValueError, match="released"):
        _native.chain_hashes(view, 1)
