"""Tests of `cached_tokens` in replies: it is not counted as the router's hit if a request has
several answers or if its worker only decodes.
"""

from __future__ import annotations

import pytest

from policies.facts import Finish
from router.http.reply import Outcome, Usage
from router.request.settling import is_own_hit, settle
from router.request.state import AttemptEnd
from tests.router.crowded import crowd


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (b'{"prompt": "a"}', True),
        (b'{"prompt": "a", "n": 1}', True),
        (b'{"prompt": "a", "n": null, "best_of": 1}', True),
        (b'{"prompt": "say \\"n\\": 2"}', True),
        (b'{"prompt": "a", "n": 2}', False),
        (b'{"n":128,"prompt": "a"}', False),
        (b'{"prompt": "a", "n" :\n 10}', False),
        (b'{"prompt": "a", "best_of": 3}', False),
        (b'{"text": "a", "sampling_params": {"n": 4}}', False),
    ],
)
def test_requests_for_one_answer_are_distinguished_from_several(body: bytes, own: bool) -> None:
    assert is_own_hit(body, "both") is is_own_hit(body, "prefill") is own
    assert not is_own_hit(body, "decode")


@pytest.mark.parametrize(("choices", "told"), [(1, 16), (2, None)])
async def test_the_hit_of_a_second_answer_is_not_counted_or_logged_or_learned(
    choices: int, told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hit of a request's second answer is neither counted nor logged nor learned from: vLLM
    reports it because the first answer computed the prompt.
    """
    async with crowd(1) as pool:
        await pool.send(body=b'{"prompt": "a", "n": %d}' % choices)
        request, now_s = pool.requests.pop(), pool.router.dispatcher.clock()
        request.ticket.first_token(now_s)
        facts: list[object] = []
        monkeypatch.setattr(pool.router.dispatcher, "handle_fact", facts.append)
        usage = Usage(prompt_tokens=1000, completion_tokens=9, cached_tokens=16)
        end = AttemptEnd(None, Outcome(now_s, 200, None, 99, now_s, now_s, 9, usage))
        settle(pool.router.service, request, request.attempts[-1], end)
        counts = pool.router.service.metrics.requests
        assert counts.reported_hit_tokens == (told or 0)
        assert counts.reported_prompt_tokens == (0 if told is None else 1000)
        finish = facts.pop()
        assert isinstance(finish, Finish)
        assert (finish.prompt_tokens, finish.cached_tokens) == (1000, told)
        monkeypatch.undo()
        assert request.attempts[0].cached_tokens == told
        assert request.attempts[0].outcome.usage.completion_tokens == 9
        request.__exit__(None, None, None)
