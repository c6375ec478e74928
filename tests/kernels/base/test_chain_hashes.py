"""Tests that the native chain hashes equal those of the xxhash package, for any length
and buffer.
"""

import array

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvkernels import _native
from tests.oracles import index as twins

Tokens = npt.NDArray[np.int32]


def tokens_of(count: int, seed: int = 1) -> Tokens:
    info = np.iinfo(np.int32)
    return np.random.default_rng(seed).integers(info.min, info.max, count, np.int32, endpoint=True)


@pytest.mark.parametrize("block_size", range(1, 601))
def test_every_block_size_equals_the_definition(block_size: int) -> None:
    """Every block size gives the hashes of the definition. Messages of 12 to 2,408 bytes cover
    every length class of XXH3-64 that a block can reach.
    """
    tokens = tokens_of(3 * block_size + block_size // 2)
    parent = 0
    for block, got in enumerate(_native.chain_hashes(tokens, block_size)):
        own = tokens[block * block_size : (block + 1) * block_size]
        parent = xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + own.tobytes())
        assert int(got) == parent, (block_size, block)


@given(
    tokens=hnp.arrays(np.int32, st.integers(0, 3000)),
    block_size=st.integers(1, 600),
    seed=st.integers(0, 2**64 - 1),
)
def test_chain_hashes_equal_those_of_the_python_version(
    tokens: Tokens, block_size: int, seed: int
) -> None:
    got = _native.chain_hashes(tokens, block_size, seed)
    assert got.dtype == np.uint64
    assert got.shape == (len(tokens) // block_size,)
    np.testing.assert_array_equal(got, twins.chain_hashes(tokens, block_size, seed))


@given(
    tokens=hnp.arrays(np.int32, st.integers(0, 600)),
    block_size=st.integers(1, 40),
    blocks=st.integers(0, 20),
)
def test_a_chain_can_continue_from_any_of_its_hashes(
    tokens: Tokens, block_size: int, blocks: int
) -> None:
    whole = _native.chain_hashes(tokens, block_size, seed=7)
    first = whole[:blocks]
    parent = int(first[-1]) if len(first) else 7
    rest = _native.chain_hashes(tokens[len(first) * block_size :], block_size, parent)
    np.testing.assert_array_equal(np.concatenate((first, rest)), whole)


def test_any_int32_buffer_is_accepted() -> None:
    tokens = tokens_of(100)
    wanted = _native.chain_hashes(tokens, 16)
    read_only = tokens.copy()
    read_only.flags.writeable = False
    buffers = [
        read_only,
        memoryview(tokens),
        memoryview(tokens.tobytes()).cast("i"),
        array.array("i", tokens.tolist()),
        tokens_of(100).astype("<i4"),
        np.concatenate(([1], tokens)).astype(np.int32)[1:],  # not aligned to 8 bytes
    ]
    for buffer in buffers:
        np.testing.assert_array_equal(_native.chain_hashes(buffer, 16), wanted)
        np.testing.assert_array_equal(twins.chain_hashes(buffer, 16), wanted)


def test_tokens_at_an_unaligned_address_are_hashed() -> None:
    tokens = tokens_of(400)
    raw = np.zeros(4 * len(tokens) + 1, dtype=np.uint8)
    raw[1:] = tokens.view(np.uint8)
    askew = raw[1:].view(np.int32)
    assert not askew.flags.aligned
    for block_size in (1, 2, 16, 31, 59, 400):
        got = _native.chain_hashes(askew, block_size)
        np.testing.assert_array_equal(got, twins.chain_hashes(tokens, block_size))


def test_the_result_belongs_to_the_caller() -> None:
    chain = _native.chain_hashes(tokens_of(64), 16)
    kept = chain.copy()
    for seed in range(50):
        _native.chain_hashes(tokens_of(64, seed), 16)
    np.testing.assert_array_equal(chain, kept)
    chain[0] = 0  # writable


@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_an_incomplete_block_has_no_hash(tokens: int) -> None:
    assert len(_native.chain_hashes(tokens_of(tokens), 16)) == 0
    assert len(_native.chain_hashes(tokens_of(tokens), 2**62)) == 0
