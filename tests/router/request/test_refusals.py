"""Tests of refusals by a prefill worker: which worker is to blame, if any."""

from __future__ import annotations

import pytest

from router.http.errors import WorkerError
from router.http.reply import Framing, HeldReply, Outcome, ReplyHead
from router.request.refusals import outcome_of_prefill
from router.upstream.collected_reply import CollectedReply


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"The request queue is full."}}', "busy"),
        (b'{"error":{"message":"CUDA error"}}', "status_5xx"),
    ],
)
def test_a_503_of_the_prefill_worker_is_classified_and_retryable(body: bytes, kind: str) -> None:
    held = HeldReply(ReplyHead(503, b"No", (), Framing.LENGTH, len(body)), body)
    outcome = Outcome(0.0, 503, WorkerError("status_5xx", "503"), held=held)
    found = outcome_of_prefill(outcome, CollectedReply(1_000), "m")
    assert isinstance(found.error, WorkerError)
    assert found.error.kind == kind
    assert found.retryable
