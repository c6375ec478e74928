"""Tests with whole programs of token ids that engines render for a router without a tokenizer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.model_dirs import write_model
from tests.live.faulty_renderer import faulty_renderer
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, running, until
from tests.told_decision import EXPLAIN, decision_in

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "answers")
BLOCK = 16
Decided = tuple[dict[str, Any], dict[str, Any]]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def chat_message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


@asynccontextmanager
async def rendering(
    folder: Path, *flags: str, router: list[str] | None = None, **options: Any
) -> AsyncIterator[Stack]:
    """Yield a router without a tokenizer and an engine with one, which is started with `flags`."""
    model = write_model(folder / "model")
    async with running(folder, workers=0, router=router or []) as stack:
        arguments = engine_arguments(tokenizer=model, **options)
        engine = await stack.programs.start("worker-0", "engine", [*arguments, *flags])
        stack.workers.append(engine)
        await stack.until_state(await stack.add(engine.url), "ready")
        yield stack


async def send_chat(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> Decided:
    """Send a chat; return the router's decision and the worker's answer."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 8} | fields
    url = f"{stack.url}/v1/chat/completions"
    async with stack.http.post(url, json=body, headers={EXPLAIN: "1"}) as reply:
        assert reply.status == 200, await reply.text()
        return decision_in(reply.headers[EXPLAIN]), await reply.json()


def found(answer: dict[str, Any]) -> int:
    """Return the answer's count of cached tokens."""
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def counted(stack: Stack, name: str, label: str = "") -> float:
    return await metric_sum(stack.http, stack.admin, f"{name}{{{label}}}" if label else name)


async def until_cause(
    stack: Stack, mode: str, cause: str | None, asking: random.Random | None = None
) -> dict[str, Any]:
    """Wait until the worker's hits have this mode and cause, and return them; if `asking` is given,
    send chats meanwhile.
    """
    seen: dict[str, Any] = {}

    async def reached() -> bool:
        if asking is not None:
            await send_chat(stack, [chat_message(words(asking, 50))])
        seen.update((await stack.row(0))["hits"])
        return (seen["mode"], seen["cause"]) == (mode, cause)

    await until(reached, f"hits to be {mode} for {cause}", 60.0)
    return seen


async def test_hits_are_exact_by_the_token_ids_that_the_engine_renders(tmp_path: Path) -> None:
    """Expected hits are exact by the token ids that the engine renders, for new, repeated,
    shortened, continued and edited chats, and for completions.
    """
    rng = random.Random(1)
    async with rendering(tmp_path, "--render") as stack:
        await until_cause(stack, "exact", None)
        chats = [[chat_message(words(rng, rng.randint(20, 300)))]]
        for _ in range(60):
            kind = rng.choice(("new", "again", "shorter", "turn", "edited"))
            chat = list(rng.choice(chats))
            if kind == "new":
                chat = [
                    chat_message(words(rng, 30), "system"),
                    chat_message(words(rng, rng.randint(20, 300))),
                ]
            elif kind == "shorter":
                chat = [chat_message(chat[0]["content"][:200])]
            elif kind == "turn":
                chat += [chat_message(words(rng, 12), "assistant"), chat_message(words(rng, 40))]
            elif kind == "edited":
                chat[-1] = chat_message(words(rng, 50))
            decision, answer = await send_chat(stack, chat, temperature=rng.random())
            assert not decision["approximate"]
            assert decision["prompt_tokens"] == answer["usage"]["prompt_tokens"]
            assert decision["expected_hit_tokens"] == found(answer), kind
            chats.append(chat)
        assert await counted(stack, "warmroute_rendered_prompts_total", 'source="memo"') > 3
        text = words(rng, 200)
        for at in range(2):
            status, answer = await stack.complete(text)
            assert status == 200
            assert (found(answer) > 0) == (at == 1)
        assert await counted(stack, "warmroute_rendered_prompts_total", 'source="text"') == 0


async def test_an_engine_without_the_render_flag_is_logged_with_the_flag(tmp_path: Path) -> None:
    rng = random.Random(2)
    async with rendering(tmp_path) as stack:
        hits = await until_cause(stack, "approximate", "render-off")
        assert hits["lift"] == "--tokenizer DIR, or warmroute-engine --render"
        decision, _ = await send_chat(stack, [chat_message(words(rng, 50))])
        assert decision["approximate"]
        log = stack.router.log.read_text()
        assert "; warmroute-engine --render lets it: prompts whose" in log
        assert log.count("WARNING router.tokens.renderers: the router has no tokenizer for") == 1
        assert "tokenizer.json, or start the engines as `warmroute-engine --render`" in log


async def test_a_long_conversation_does_not_wait_for_its_renderer(tmp_path: Path) -> None:
    """A long conversation does not wait for the renderer: the router places a turn by the token ids
    rendered for the turn before.
    """
    rng = random.Random(3)
    name = "warmroute_rendered_prompts_total"
    async with rendering(tmp_path, "--render") as stack:
        await until_cause(stack, "exact", None)
        chat = [chat_message(words(rng, 10_000))]
        before = 0
        for turn in range(6):
            decision, answer = await send_chat(stack, chat)
            cached, expected = found(answer), decision["expected_hit_tokens"]
            assert not decision["approximate"]
            if turn < 2:  # the second turn shows that the beginning stays
                assert expected == cached
            else:
                assert before - 64 - BLOCK < expected <= cached
                assert decision["hits"]["cause"] == "beginning-alone"
            before = answer["usage"]["prompt_tokens"]
            chat += [answer["choices"][0]["message"], chat_message(words(rng, 100))]

            async def rendered(turns: int = turn + 1) -> bool:
                calls = 'result="rendered"'
                return await counted(stack, "warmroute_render_calls_total", calls) == turns

            await until(rendered, "the call beside the turn")
        assert await counted(stack, name, 'source="beginning"') == 4
        edited = [chat_message("x " + chat[0]["content"]), *chat[1:]]
        decision, answer = await send_chat(stack, edited)
        assert decision["expected_hit_tokens"] == found(answer)


FAULTS = {
    "hanging": "renderer-failing",
    "slow": "renderer-failing",
    "breaks": "renderer-failing",
    "garbage": "renderer-failing",
    "negative": "renderer-failing",
    "huge": "renderer-failing",
    "killed": "renderer-failing",
    "forbidden": "render-off",
    "longer": "renderer-differs",
    "another": "renderer-differs",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_requests_are_answered_despite_any_fault_of_the_renderer(
    tmp_path: Path, fault: str
) -> None:
    """Requests are answered whatever the renderer does: 64 chats at once meet its fault, and the
    router reports the fault and uses the renderer again afterwards.
    """
    rng = random.Random(fault)
    model = write_model(tmp_path / "model")
    async with faulty_renderer(MODEL, model) as renderer:
        flags = ["--render", "given", "--renderers", renderer.url]
        flags += ["--timeouts-render-s", "0.3"] if fault in ("hanging", "slow") else []
        router = [*flags, "--intervals-token-recheck-s", "2"]
        async with rendering(tmp_path, router=router) as stack:
            await until_cause(stack, "exact", None)
            chats = [[chat_message(words(rng, 100))] for _ in range(64)]
            await renderer.turn(fault)
            answers = await asyncio.gather(*(send_chat(stack, chat) for chat in chats))
            assert all(answer["usage"]["completion_tokens"] == 8 for _, answer in answers)
            await until_cause(stack, "approximate", FAULTS[fault], rng)
            await renderer.turn("none")
            await until_cause(stack, "exact", None)
            # Always the same: how many were drawn before depends on time, and of a prompt of whole
            # blocks the worker computes the last one again, which is not what is tried here.
            chat = [chat_message(words(random.Random(1), 100))]
            for _ in range(2):
                decision, answer = await send_chat(stack, chat)
                assert answer["usage"]["prompt_tokens"] % BLOCK
                assert not decision["approximate"]
                assert decision["expected_hit_tokens"] == found(answer)
            assert "Traceback" not in stack.router.log.read_text()
            await stack.assert_idle()


async def test_unreachable_images_of_one_client_do_not_stop_the_renderer(tmp_path: Path) -> None:
    """Images that cannot be fetched do not stop the rendering of other clients' chats: the router
    places this client's requests by text.
    """
    rng = random.Random(7)
    model = write_model(tmp_path / "model")
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/none.png"}}
    async with faulty_renderer(MODEL, model) as renderer:
        router = ["--render", "given", "--renderers", renderer.url]
        async with rendering(tmp_path, router=router) as stack:
            await until_cause(stack, "exact", None)
            await renderer.turn("breaks on images")
            for _ in range(6):
                text = {"type": "text", "text": words(rng, 30)}
                async with stack.http.post(
                    f"{stack.url}/v1/chat/completions",
                    json={"model": MODEL, "messages": [{"role": "user", "content": [image, text]}]},
                ) as reply:
                    await reply.read()
            assert await counted(stack, "warmroute_render_calls_total", 'result="failed"') == 6
            decision, _ = await send_chat(stack, [chat_message(words(rng, 60))])
            assert not decision["approximate"]
