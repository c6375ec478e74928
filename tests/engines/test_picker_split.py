"""Tests of disaggregation behind a gateway, where a worker plays the part of llm-d's sidecar."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.echo_worker import MODEL, echo_worker
from tests.engines.envoy import ENVOY, running_envoy
from tests.engines.picked import PATH, body_of
from tests.live.stack import running


@pytest.mark.parametrize("door", ["picker", "front"])
async def test_the_decode_worker_gets_the_prefill_workers_address(
    tmp_path: Path, door: str
) -> None:
    ENVOY.or_skip()
    flags = ["--picker-port", "0", "--disaggregation", "always", "--slow-start-s", "0"]
    async with echo_worker() as prefills, echo_worker() as decodes:
        for worker, role in ((prefills, "prefill"), (decodes, "decode")):
            spec = f"kind=openai,model={MODEL},role={role},group=one,transfer=sidecar"
            flags += ["--worker", f"{worker.url},{spec}"]
        async with running(tmp_path, workers=0, router=flags) as stack:
            for worker_id in (0, 1):
                await stack.until_state(worker_id, "ready")
            places = [stack.router.facts["picker"]]
            async with running_envoy(tmp_path, "original-dst.yaml", places) as envoy:
                url = envoy.url if door == "picker" else stack.url
                for what in ("echo", "events"):
                    body = body_of("word " * 400, stream=what == "events")
                    headers = {"x-do": what, "x-prefiller-host-port": "10.9.9.9:1"}
                    sent = stack.http.post(f"{url}{PATH}", data=body, headers=headers)
                    async with sent as reply:
                        assert reply.status == 200
                        assert await reply.read()
                    await stack.assert_idle()
        assert not prefills.heads, "its sidecar asks it, not the router"
        told = [head["x-prefiller-host-port"] for head in decodes.heads]
        assert told == [prefills.address] * 2
