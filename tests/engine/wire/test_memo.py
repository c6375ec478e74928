"""Tests of tokenizing with a memo of earlier texts: it gives the ids of encoding from scratch, for
any tokenizer and order.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import hf
from engine.wire import memo as memo_module
from engine.wire.hf import HfTokenizer
from engine.wire.memo import MIN_PIECE_CHARS, Cuts, MemoEncoder, any_of, cuts_of
from engine.wire.tokens import Chat, PromptError, WordTokenizer
from tests.effort import examples
from tests.engine.model_dirs import KINDS, ORDINARY, SPECIAL, tokenizer_text, write_model

NOW_S = 1_700_000_000.0
LARGE = 1 << 24


@cache
def tokenizer_of(kind: str) -> HfTokenizer:
    with TemporaryDirectory() as folder:
        return HfTokenizer(write_model(Path(folder), kind))


words = st.text("ab Zß\n\u3000▁京<|>", max_size=12)
texts = st.lists(
    st.sampled_from([*SPECIAL, *ORDINARY, "<|im_start", " ", "x" * MIN_PIECE_CHARS]) | words,
    max_size=24,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_ids_equal_those_without_a_memo_for_every_kind_of_tokenizer(kind: str, data: Any) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.cuts is not None
    memo = MemoEncoder(tokenizer, tokenizer, data.draw(st.sampled_from([LARGE, 4_000])))
    text = ""
    for _ in range(data.draw(st.integers(1, 6))):
        text = data.draw(st.sampled_from([text, text[: len(text) // 2], ""])) + data.draw(texts)
        special = data.draw(st.booleans())
        assert memo.encode(text, special).tolist() == tokenizer.encode(text, special)
    assert 0 <= memo.memo.bytes <= LARGE


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_lie_before_special_tokens_and_pieces_encode_separately(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    cuts = tokenizer.cuts
    assert cuts is not None
    text = ("The dog  <|im_end|> \n<|im_start|>user\nBrown fox " * 9 + "<think>x ") * 9
    ends = cuts.of(text)
    assert len(ends) > 5
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert all(piece.startswith(("<|im_end|>", "<|im_start|>")) for piece in pieces[1:])
    assert min(map(len, pieces[:-1])) >= MIN_PIECE_CHARS
    ids = [token for piece in pieces for token in tokenizer.encode(piece, False)]
    assert ids == tokenizer.encode(text, False)


def test_the_next_turn_encodes_only_new_text() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, LARGE)
    messages: list[dict[str, Any]] = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"{turn} " + "the lazy dog " * 40})
        chat = Chat(messages=list(messages))
        before = memo.memo.encoded_chars
        assert memo.encode_chat(chat, NOW_S).tolist() == tokenizer.encode_chat(chat, NOW_S)
        assert memo.memo.encoded_chars - before < 2 * (
            len(messages[-1]["content"]) + MIN_PIECE_CHARS
        )
        messages.append({"role": "assistant", "content": "quick brown fox " * 20})
    assert memo.memo.reused_chars > 5 * memo.memo.encoded_chars / 2


def test_other_salts_and_other_beginnings_share_no_entries() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, LARGE)
    text = ("<|im_start|>" + "secret " * 60) * 4
    for number, salt in enumerate([None, "a", "b", ""]):
        memo.encode(text, salt=salt)
        assert memo.memo.reused_chars == (len(text) if number == 3 else 0)  # "" is no salt
    before = memo.memo.reused_chars
    memo.encode("x" + text, salt="a")
    assert memo.memo.reused_chars == before
    memo.encode(text, salt="a")
    assert memo.memo.reused_chars == before + len(text)


def test_the_memo_stays_within_its_bytes_and_drops_the_oldest_entries() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, 20_000)
    for number in range(100):
        memo.encode(f"{number} " * 200)
        assert memo.memo.bytes <= 20_000
    before = memo.memo.reused_chars
    memo.encode("0 " * 200)
    assert memo.memo.reused_chars == before
    memo.encode("99 " * 200)
    assert memo.memo.reused_chars > before
    huge = "<|im_end|>" + "dog " * 30_000
    assert memo.encode(huge).tolist() == tokenizer.encode(huge)
    assert memo.memo.bytes <= 20_000


def test_without_memory_or_cuts_the_memo_equals_the_plain_tokenizer() -> None:
    tokenizer = tokenizer_of("bytes")
    words = WordTokenizer(100)
    for memo, plain in (
        (MemoEncoder(tokenizer, tokenizer, 0), tokenizer),
        (MemoEncoder(words, None, LARGE), words),
    ):
        text = "one two <|im_end|> " * 100
        assert memo.encode(text).tolist() == plain.encode(text)
        chat = Chat(messages=[{"role": "user", "content": "hello"}])
        assert memo.encode_chat(chat, NOW_S).tolist() == plain.encode_chat(chat, NOW_S)
        assert memo.memo.bytes == 0
    assert MemoEncoder(tokenizer, tokenizer, LARGE).encode("", False).tolist() == []


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_end", "x", "ab<"]), max_size=60).map("".join))
def test_searching_a_long_text_in_windows_changes_no_cut(text: str) -> None:
    cuts = Cuts([token("<|im_end|>"), token("<|im_end|>x<|im_end|>")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memo_module, "MIN_PIECE_CHARS", 3)
        whole = cuts.of(text)
        patch.setattr(memo_module, "_WINDOW_CHARS", 5)
        patch.setattr(memo_module, "_WINDOW_IDS", 2)
        assert cuts.of(text) == whole
        tokenizer = tokenizer_of("bytes")
        memo = MemoEncoder(tokenizer, tokenizer, LARGE)
        assert memo.encode(text).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_tokenized_in_parts_has_the_same_ids(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_PART_IDS", 7)
    in_parts, whole = HfTokenizer(write_model(tmp_path, kind)), tokenizer_of(kind)
    for text in ("The dog", "", "The dog  <|im_end|> \nBrown fox, 東京 and the lazy dog " * 9):
        for special in (False, True):
            assert in_parts.encode(text, special) == whole.encode(text, special)


def test_a_text_that_is_too_long_is_refused() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, 0, max_chars=20)
    assert memo.encode("x" * 20).tolist() == tokenizer.encode("x" * 20)
    with pytest.raises(PromptError, match="more than 20 characters"):
        memo.encode("x" * 21)
    with pytest.raises(PromptError, match="more than 20 characters"):
        memo.encode_chat(Chat(messages=[{"role": "user", "content": "x" * 21}]), NOW_S)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """Other Python threads run while a long text is tokenized: a thread that sleeps 1 ms at a time
    gets at least a tenth of its turns. If Python's lock were held, it would get none.
    """
    tokenizer = tokenizer_of("bytes")
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(tokenizer.encode, "The quick brown fox " * 20_000)
        began_s, looks = time.monotonic(), 0
        while not encoding.done():
            looks += 1
            time.sleep(0.001)
        took_s = time.monotonic() - began_s
    assert looks > took_s / 0.01


def test_text_with_invalid_unicode_is_refused() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, LARGE)
    for salt in (None, "\ud800"):
        with pytest.raises(PromptError, match="Unicode"):
            memo.encode("a<|im_end|>\ud800", salt=salt)


def token(content: str, **flags: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, **({"normalized": False} | flags))


def test_tokens_that_affect_neighbouring_text_make_no_cuts() -> None:
    long = "y" * MIN_PIECE_CHARS
    unfit = [
        token("<l>", lstrip=True),
        token("<w>", single_word=True),
        token("<n>", normalized=True),
        token("word"),
        token(" <b>"),
    ]
    for one in unfit:
        assert cuts_of({}, [one]) is None
    cuts = cuts_of({}, [*unfit, token("<c>"), token("<c>d<c>")])
    assert cuts is not None
    assert cuts.of(f"{long}<l>{long}<c>{long}") == [259 + 256, 2 * 256 + 256 + 6]
    # Where both tokens match, the longer one is found, and there is no cut inside it.
    assert cuts.of(f"{long}<c>d<c>{long}<c>") == [256, 2 * 256 + 7, 2 * 256 + 10]
    with pytest.raises(ValueError, match="no added token"):
        Cuts([])


@given(st.sets(st.text("ab<|. ", min_size=1, max_size=5), min_size=1), st.text("ab<|. "))
def test_the_longest_token_at_a_place_is_found(contents: set[str], text: str) -> None:
    plain = "|".join(re.escape(one) for one in sorted(contents, key=len, reverse=True))
    assert re.findall(any_of(contents), text) == re.findall(plain, text)


def test_many_tokens_with_a_common_beginning_do_not_slow_the_search() -> None:
    """Memo entries for many tokens do not make a search slow: tried one after the other, 250 tokens
    would take seconds for this text of two megabytes.
    """
    names = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    cuts = Cuts([token(name) for name in names])
    assert cuts.of("<|reserved_special_token_" * 80_000) == [2_000_000]
    assert any_of(names).count("reserved") == 1


def test_tokens_nested_too_deeply_make_no_cuts() -> None:
    assert cuts_of({}, [token("<" + "-" * length) for length in range(300)]) is None
    runs = cuts_of({}, [token("<" + "-" * length) for length in range(100)])
    assert runs is not None
    assert runs.of("x" * 256 + "<---") == [256, 260]


def test_threads_can_share_one_memo() -> None:
    tokenizer = tokenizer_of("bytes")
    memo = MemoEncoder(tokenizer, tokenizer, 50_000)
    prompts = [("<|im_start|>" + f"dog {number % 7} " * 50) * (number % 9) for number in range(200)]
    expected = [tokenizer.encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(memo.encode, prompts))
    assert [ids.tolist() for ids in found] == expected
    assert 0 <= memo.memo.bytes <= 50_000


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": {"type": "Neural"}},
        {"normalizer": {"type": "Unheard"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Unheard"}]}},
        {"pre_tokenizer": 5},
    ],
)
def test_tokenizers_with_unknown_parts_get_no_cuts(change: dict[str, Any]) -> None:
    described = json.loads(tokenizer_text("bytes"))
    tokens = [token("<|im_end|>")]
    assert cuts_of(described, tokens) is not None
    assert cuts_of(described | change, tokens) is None


def test_a_cut_does_not_change_single_word_or_stripping_neighbours(tmp_path: Path) -> None:
    described = json.loads(tokenizer_text("bytes"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
    extra = {"<sw>": {"single_word": True}, "w": {"single_word": True}, "<r>": {"rstrip": True}}
    extra["<l>"] = {"lstrip": True}
    for number, (content, more) in enumerate(extra.items()):
        row = {"id": 5_000 + number, "content": content, "normalized": False}
        described["added_tokens"].append(row | flags | more)
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = HfTokenizer(tmp_path)
    cuts = tokenizer.cuts
    assert cuts is not None
    for middle in ("<sw>", "w", "a w", "<r> ", "<r>", "x<l>", " <l>", "<r> <l> w"):
        for filler in ("dog ", "dog"):
            text = (filler * 70 + middle + "<|im_end|>" + middle + filler) * 3
            ends = cuts.of(text)
            assert len(ends) >= 2
            pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            ids = [token for piece in pieces for token in tokenizer.encode(piece, False)]
            assert ids == tokenizer.encode(text, False), re.escape(text[-300:])
