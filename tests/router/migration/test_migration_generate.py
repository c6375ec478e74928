"""Tests that a stream of SGLang's own API over several workers has the same content as one worker's
stream.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.timed import continuation
from router.migration.generate import GenerateJournal, journal_of
from router.migration.journal import Room
from router.migration.plan import Plan, plan_of, rest_of, tokens_left
from tests.effort import examples
from tests.router.migration.generated_streams import PROMPT, Mode, parsed_stream, stream
from tests.router.migration.migration_engines import VOCAB, texts
from tests.router.migration.migration_support import FORMS
from tests.router.property_support import cut

MODES: tuple[Mode, ...] = ("whole", "ids", "pieces")


def planned(total: int = 9, **fields: Any) -> Plan:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": total}, "stream": True}
    plan = plan_of(json.dumps(body | fields).encode(), "/generate", total)
    assert isinstance(plan, Plan), plan
    return plan


@settings(max_examples=examples(150))
@given(
    mode=st.sampled_from(MODES),
    total=st.integers(1, 40),
    deaths=st.lists(st.integers(0, 6_000), max_size=3),
    cuts=st.lists(st.integers(0, 6_000), max_size=5),
)
def test_a_moved_stream_equals_the_stream_of_one_worker(
    mode: Mode, total: int, deaths: list[int], cuts: list[int]
) -> None:
    plan, room = planned(total), Room(10_000, 10_000)
    journal = journal_of(plan, room)
    out, lost = b"", 0
    for number in range(len(deaths) + 1):
        journal.begin(FORMS["sglang"])
        begun = len(journal.answer_ids)
        prompt, left = [*PROMPT, *journal.answer_ids], total
        if begun:
            left = tokens_left(plan, FORMS["sglang"], len(PROMPT), begun, None) or 0
            asked = json.loads(rest_of(plan, prompt, begun, left))
            assert asked["input_ids"] == prompt
            assert asked["sampling_params"] == {"max_new_tokens": total - begun}
        events = stream(mode, f"w{number}", prompt, left)
        reply = b"".join(events)
        dies = number < len(deaths)
        if dies:
            reply = reply[: deaths[number] % len(reply)]
        for piece in cut(reply, cuts):
            out += journal.feed(piece)
        if not dies or journal.complete:
            out += journal.flush()
            break
        if journal.closable:
            out += journal.closing()
            break
        journal.seam()
        if not journal.answer_ids:  # the client has seen nothing of it: this is a retry
            out, lost = b"", number + 1
            journal.close()
            journal = journal_of(plan, room)
        elif journal.unfit:
            assert journal.unfit == "mode"  # it had hardly begun
            assert begun < 4
            journal.close()
            assert room.taken == 0
            return
    text, ids, metas = parsed_stream(out, mode)
    tokens = continuation(PROMPT, total, VOCAB)
    assert ids == tokens
    assert text == "".join(texts(tokens, last=True))
    assert {meta["id"] for meta in metas} == {f"w{lost}"}
    assert {meta["prompt_tokens"] for meta in metas} == {len(PROMPT)}
    assert metas[-1]["finish_reason"]["type"] == "length"
    assert out.endswith(b"data: [DONE]\n\n")
    journal.close()
    assert room.taken == 0


@pytest.mark.parametrize(
    ("mode", "other"),
    [
        ("whole", "ids"),
        ("whole", "pieces"),
        ("ids", "whole"),
        ("ids", "pieces"),
        ("pieces", "whole"),
    ],
)
def test_a_worker_with_another_stream_mode_is_replaced_by_the_next(mode: Mode, other: Mode) -> None:
    plan = planned(30)
    journal = journal_of(plan, Room(1_000, 1_000))
    journal.begin(FORMS["sglang"])
    out = journal.feed(b"".join(stream(mode, "a", PROMPT, 30)[:14]))
    journal.seam()
    assert not journal.unfit
    journal.begin(FORMS["sglang"])
    begun = len(journal.answer_ids)
    out += journal.feed(b"".join(stream(other, "b", [*PROMPT, *journal.answer_ids], 30 - begun)))
    assert journal.failure is not None
    assert journal.failure.kind == "busy"
    journal.seam()
    journal.begin(FORMS["sglang"])
    kept = len(journal.answer_ids)
    out += journal.feed(b"".join(stream(mode, "c", [*PROMPT, *journal.answer_ids], 30 - kept)))
    tokens = continuation(PROMPT, 30, VOCAB)
    assert parsed_stream(out, mode)[:2] == ("".join(texts(tokens, last=True)), tokens)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input_ids": [[1], [2]]}, "prompts"),
        ({"input_ids": None, "text": ["a", "b"]}, "prompts"),
        ({"input_ids": None, "text": "a"}, "no_token_ids"),
        ({"sampling_params": [{}]}, "prompts"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"stop": ["x"]}}, "stop"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"return_logprob": True}, "return_logprob"),
        ({"image_data": "x"}, "image_data"),
    ],
)
def test_a_request_that_depends_on_more_than_tokens_is_not_migratable(
    fields: dict[str, Any], why: str
) -> None:
    body = {"input_ids": PROMPT, "stream": True} | fields
    assert plan_of(json.dumps(body).encode(), "/generate", 5) == why


def test_a_text_moves_as_token_ids_if_the_worker_counts_as_many() -> None:
    ids = np.array(PROMPT, np.int32)
    body = json.dumps({"text": "a", "stream": True, "extra_key": "k", "lora_path": "l"}).encode()
    plan = plan_of(body, "/generate", 5, [ids])
    assert isinstance(plan, Plan)
    assert plan.salt == "l\nk"
    asked = json.loads(rest_of(plan, [*PROMPT, 9], 1, 4))
    assert asked["input_ids"] == [*PROMPT, 9]
    assert "text" not in asked
    for prompt, unfit in ((PROMPT, ""), (PROMPT[1:], "prompt_count")):
        journal = GenerateJournal(plan, Room(100, 100))
        journal.feed(stream("whole", "w", prompt, 5)[0])
        assert journal.unfit == unfit


def test_a_prompt_with_ids_of_images_stays_with_its_worker() -> None:
    prompt, events = [*PROMPT, 2**62], stream("whole", "w", [*PROMPT, 1], 5)
    journal = GenerateJournal(planned(input_ids=prompt), Room(100, 100))
    assert journal.feed(b"".join(events)) == b"".join(events)
    assert (journal.unfit, journal.complete) == ("media", True)


@pytest.mark.parametrize(
    ("finish", "fails"),
    [
        ('{"type":"abort","message":"x"}', True),
        ('{"type":"abort","status_code":503}', True),
        ('{"type":"abort","status_code":400}', False),
        ('{"type":"stop","matched":7}', False),
    ],
)
def test_an_aborted_answer_is_a_failure(finish: str, fails: bool) -> None:
    journal = journal_of(planned(), Room(100, 100))
    out = journal.feed(b"".join(stream("whole", "w", PROMPT, 9, finish)))
    assert (journal.failure is not None) == fails
    assert journal.complete != fails
    assert (finish.encode() in out) != fails


@pytest.mark.parametrize(
    ("event", "unfit"),
    [
        (b'data: {"text":"a"}\n\n', "unreadable"),
        (b"data: [1]\n\n", "unreadable"),
        (b'data: {"text":"a","output_ids":[1,2],"meta_info":{"completion_tokens":1,'
         b'"prompt_tokens":5}}\n\n', "unclear"),
        (b'data: {"text":"a","output_ids":[-1],"meta_info":{}}\n\n', "unreadable"),
        (b'data: {"text":"a","output_ids":[1],"index":1,"meta_info":{"completion_tokens":1,'
         b'"prompt_tokens":5}}\n\n', "several_choices"),
    ],
)  # fmt: skip
def test_an_event_that_cannot_be_followed_passes_unchanged(event: bytes, unfit: str) -> None:
    journal = journal_of(planned(), Room(100, 100))
    assert journal.feed(event) == event
    assert journal.unfit == unfit
