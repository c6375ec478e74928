"""Tests of a computing worker over HTTP: it gives the model's own tokens, whatever other requests
do.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.engine.harness import eventually
from tests.engine.real import COMPLETIONS, Reference, computing, greedy, ids_of, loaded
from tests.oracles.block_pool import check_pool

CHAT = "/v1/chat/completions"
PROMPT = list(range(30, 60))


async def test_greedy_tokens_equal_the_models_with_and_without_streaming(
    folder: Path, reference: Reference
) -> None:
    expected = reference.greedy(PROMPT, 12)
    async with computing(loaded(folder)) as worker:
        assert await ids_of(worker, greedy(PROMPT, 12)) == expected
        events = await worker.events(COMPLETIONS, greedy(PROMPT, 12))
        assert [event["choices"][0]["token_ids"][0] for event in events] == expected
        text = worker.worker.tokenizer.decode(expected)
        assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_a_stream_gives_the_same_bytes_as_the_unstreamed_answer(folder: Path) -> None:
    """A stream gives the same text as the whole answer, to its last byte; a random model's answers
    often end within a character.
    """
    ends = set()
    async with computing(loaded(folder)) as worker:
        for seed in range(40):
            body = greedy(PROMPT, 1 + seed % 7, temperature=1.0, seed=seed)
            _, whole = await worker.post(COMPLETIONS, body)
            (choice,) = whole["choices"]
            events = await worker.events(COMPLETIONS, body)
            assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
            ends.add(choice["text"].endswith("\ufffd"))
    assert ends == {True, False}


async def test_tokens_do_not_depend_on_batch_chunks_cache_or_preemption(
    folder: Path, reference: Reference
) -> None:
    """Tokens do not depend on batch, chunks, cache or preemption, all of which occur with 30 cache
    blocks for 24 requests and chunks of at least 8 tokens.
    """
    chance = random.Random(5)
    trunk = [chance.randrange(256) for _ in range(40)]
    prompts = [
        trunk[: chance.randrange(1, 40)] + [chance.randrange(256) for _ in range(9)]
        for _ in range(24)
    ]
    model = loaded(folder, kv_tokens=240, max_num_tokens=32, max_batch_size=8, min_chunk_tokens=8)
    async with computing(model) as worker:
        said = await asyncio.gather(*(ids_of(worker, greedy(one, 30)) for one in prompts))
        scheduler = worker.worker.runner.scheduler
        assert scheduler.preemptions_total > 0
        assert scheduler.prefix_hit_tokens_total > 0
        assert scheduler.kv_used_blocks == 0
        check_pool(scheduler.pool)
    assert said == [reference.greedy(one, 30) for one in prompts]


async def test_seeded_samples_do_not_depend_on_the_batch(folder: Path) -> None:
    async with computing(loaded(folder)) as worker:
        mine = greedy(PROMPT, 20, temperature=1.0, seed=7)
        alone = await ids_of(worker, mine)
        others = [greedy([number] * 9, 25, temperature=1.0) for number in range(10)]
        beside, *_ = await asyncio.gather(*(ids_of(worker, one) for one in [mine, *others]))
        assert beside == alone
        assert await ids_of(worker, mine | {"seed": 8}) != alone


async def test_choices_share_the_prompt_and_the_first_equals_a_single_choice(
    folder: Path,
) -> None:
    async with computing(loaded(folder)) as worker:
        body = greedy(PROMPT, 9, temperature=1.0, seed=3)
        alone = await ids_of(worker, body)
        _, answer = await worker.post(COMPLETIONS, body | {"n": 3})
        choices = [choice["token_ids"] for choice in answer["choices"]]
        assert choices[0] == alone
        assert len({tuple(choice) for choice in choices}) == 3
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer["usage"]["completion_tokens"] == 27


async def test_stop_strings_stop_tokens_and_end_of_text_end_an_answer(
    folder: Path, reference: Reference
) -> None:
    said = reference.greedy(PROMPT, 12)
    async with computing(loaded(folder)) as worker:
        tokenizer = worker.worker.tokenizer
        _, answer = await worker.post(COMPLETIONS, greedy(PROMPT, 12, stop_token_ids=[said[4]]))
        (choice,) = answer["choices"]
        first = said.index(said[4])
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == said[: first + 1]
        assert choice["text"] == tokenizer.decode(said[:first])
        await eventually(lambda: worker.worker.unfinished == 0, "it is idle")


async def test_a_stop_string_ends_streamed_and_unstreamed_answers(folder: Path) -> None:
    async with computing(loaded(folder)) as worker:
        # Few bytes of a random model are characters. Text would need a bias, so the string is one
        # that a seed happens to give.
        for seed in range(50):
            body = greedy(PROMPT, 40, temperature=1.0, seed=seed)
            _, whole = await worker.post(COMPLETIONS, body)
            plain = [at for at, one in enumerate(whole["choices"][0]["text"]) if one.isalnum()]
            if len(plain) > 5:
                break
        text = whole["choices"][0]["text"]
        stop = text[plain[3]]
        _, cut = await worker.post(COMPLETIONS, body | {"stop": stop})
        (choice,) = cut["choices"]
        assert choice["finish_reason"] == "stop"
        assert stop not in choice["text"]
        assert text.startswith(choice["text"])
        events = await worker.events(COMPLETIONS, body | {"stop": [stop, "never said"]})
        assert "".join(one["choices"][0]["text"] for one in events) == choice["text"]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        scheduler = worker.worker.runner.scheduler
        await eventually(lambda: scheduler.kv_used_blocks == 0, "its blocks are free")


async def test_completions_and_chats_have_logprobs_in_their_own_form(
    folder: Path, reference: Reference
) -> None:
    async with computing(loaded(folder)) as worker:
        _, answer = await worker.post(COMPLETIONS, greedy(PROMPT, 3, logprobs=2))
        said = answer["choices"][0]["logprobs"]
        assert len(said["tokens"]) == len(said["token_logprobs"]) == len(said["text_offset"]) == 3
        for logprob, top in zip(said["token_logprobs"], said["top_logprobs"], strict=True):
            assert logprob <= 0
            assert max(top.values()) == logprob, "greedy takes the likeliest"
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        chat |= {"logprobs": True, "top_logprobs": 1, "temperature": 0, "ignore_eos": True}
        _, answer = await worker.post(CHAT, chat)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [len(one["top_logprobs"]) for one in content] == [1, 1]
        _, *events = await worker.events(CHAT, chat)
        streamed = [event["choices"][0]["logprobs"]["content"] for event in events]
        assert [one["logprob"] for (one,) in streamed] == [one["logprob"] for one in content]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"n": 0}, "n"),
        ({"prompt": [[1, 2]] * 40, "n": 2}, "n"),
        ({"prompt": [1, 264]}, "prompt"),
        ({"prompt": [1] * 4000}, "prompt"),
    ],
)
async def test_the_error_names_the_bad_sampling_field(
    folder: Path, fields: dict[str, object], param: str
) -> None:
    async with computing(loaded(folder)) as worker:
        status, answer = await worker.post(COMPLETIONS, greedy(PROMPT, 4) | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert worker.worker.unfinished == 0


async def test_unsupported_fields_are_refused_and_not_ignored(folder: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    completion = greedy(PROMPT, 1)
    asked: list[tuple[str, dict[str, object], str, object]] = [
        (COMPLETIONS, completion, "logit_bias", {"5": 10}),
        (COMPLETIONS, completion, "suffix", "end"),
        (COMPLETIONS, completion, "prompt_logprobs", 0),
        (COMPLETIONS, completion, "guided_choice", ["yes", "no"]),
        (COMPLETIONS, completion, "use_beam_search", True),
        (CHAT, chat, "response_format", {"type": "json_object"}),
        (CHAT, chat, "tool_choice", "required"),
        (CHAT, chat, "chat_template", "{{ messages }}"),
    ]
    nothing = {"logit_bias": {}, "response_format": {"type": "text"}, "prompt_logprobs": None}
    async with computing(loaded(folder)) as worker:
        for path, body, name, value in asked:
            status, answer = await worker.post(path, body | {name: value})
            assert (status, answer["error"]["param"]) == (400, name), answer
        status, answer = await worker.post(CHAT, chat | nothing | {"tool_choice": "auto"})
        assert status == 200, answer
        status, answer = await worker.post(COMPLETIONS, completion | nothing | {"suffix": ""})
        assert status == 200, answer


async def test_text_offsets_of_a_stream_equal_those_of_the_unstreamed_answer(folder: Path) -> None:
    async with computing(loaded(folder)) as worker:
        body = greedy(PROMPT, 6, logprobs=0)
        _, answer = await worker.post(COMPLETIONS, body)
        whole = answer["choices"][0]["logprobs"]
        events = await worker.events(COMPLETIONS, body)
        parts = [one["choices"][0]["logprobs"] for one in events]
        assert [at for part in parts for at in part["text_offset"]] == whole["text_offset"]
        assert whole["text_offset"][-1] == len("".join(whole["tokens"][:-1])) > 0


async def test_special_tokens_are_hidden_unless_requested(folder: Path) -> None:
    async with computing(loaded(folder)) as worker:
        tokenizer = worker.worker.tokenizer
        # Few tokens of a random model are special; this seed gives some.
        for seed in range(80):
            body = greedy(PROMPT, 60, temperature=1.0, seed=seed)
            _, answer = await worker.post(COMPLETIONS, body)
            said = answer["choices"][0]["token_ids"]
            if any(token >= 256 for token in said[:-20]):
                break
        shown = tokenizer.decode(said)
        hidden = tokenizer.decode(said, skip_special_tokens=True)
        assert "<|" in shown
        assert answer["choices"][0]["text"] == hidden != shown
        _, answer = await worker.post(COMPLETIONS, body | {"skip_special_tokens": False})
        assert answer["choices"][0]["text"] == shown
        for skips, expected in ((True, hidden), (False, shown)):
            asked = body | {"skip_special_tokens": skips}
            events = await worker.events(COMPLETIONS, asked)
            text = "".join(one["choices"][0]["text"] for one in events)
            assert expected.startswith(text)
            assert ("<|" in text) is not skips


async def test_a_chat_without_max_tokens_may_fill_the_context(folder: Path) -> None:
    async with computing(loaded(folder, kv_tokens=400)) as worker:
        body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
        _, answer = await worker.post(CHAT, body)
        assert answer["usage"]["total_tokens"] == 400
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_client_that_disconnects_frees_its_blocks(folder: Path) -> None:
    async with computing(loaded(folder)) as worker:
        body = greedy(PROMPT, 1000, stream=True)
        async with worker.http.post(worker.url + COMPLETIONS, json=body) as reply:
            assert (await reply.content.readline()).startswith(b"data: ")
        scheduler = worker.worker.runner.scheduler
        await eventually(lambda: not scheduler.requests, "it is cancelled")
        assert scheduler.kv_used_blocks == 0
        steps = json.loads(await worker.get("/debug/steps"))["steps"]
        assert steps[0]["prefill_tokens"] == len(PROMPT)
