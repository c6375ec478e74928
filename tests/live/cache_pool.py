"""Runs a router and engines behind faulty proxies; tests can kill and restart each of them."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import zmq.asyncio

from router.admin.kv_view import Chains, KvView, decode_kv_view
from router.cli.kv import truth_of
from simulator.live.processes import Program, Programs
from tests.live.event_relay import CALM, COMPLETE, EventRelay, Faults, relaying
from tests.live.foreign_forms import arrays_of_digests, maps_of_signed
from tests.live.http_front import HttpFront
from tests.live.stack import MODEL, engine_arguments, until

BLOCK = 16
TOUCHED_BLOCKS = 20
KV_BLOCKS = 400  # small, so that blocks are evicted all the time
SNAPSHOT_HARM = 0.5


@dataclass
class Engine:
    """One engine, with the event relay and the HTTP proxy between it and the router. Lifetime:
    test.
    """

    name: str
    options: dict[str, Any]  # its ports stay its own
    program: Program
    relay: EventRelay
    front: HttpFront | None  # only if the router reads its snapshots
    spec: str
    starts: int = 1
    unanswered: int = 0  # unanswered replays of its relay, when it was last exact

    @property
    def url(self) -> str:
        return self.program.url

    @property
    def exact_due(self) -> bool:
        """Return whether the router must know the engine's cache exactly: each lost event can be
        recovered from a snapshot or a complete replay.
        """
        if self.front is not None:
            return True
        whole = self.relay.replay_modes == COMPLETE
        return whole and self.relay.counted["replay_of_nobody"] == self.unanswered

    def compared(self, exact: bool) -> None:
        """Record that the router's view was compared with the engine's cache and found right,
        exactly or as a lower bound.
        """
        if exact:
            self.unanswered = self.relay.counted["replay_of_nobody"]


@dataclass
class Pool:
    """A router and three engines, with methods that kill or disturb them. Lifetime: test."""

    programs: Programs
    http: aiohttp.ClientSession
    rng: random.Random
    engines: list[Engine]
    router_arguments: list[str]
    router: Program
    router_starts: int = 1
    done: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def admin(self) -> str:
        return self.router.facts["admin"]

    def set_faults(self, faults: Faults) -> None:
        """Make all relays and proxies inject these faults; the value CALM injects none."""
        for engine in self.engines:
            engine.relay.faults = faults
            if engine.front is not None:
                engine.front.harm = 0.0 if faults == CALM else SNAPSHOT_HARM

    async def kill_engine(self) -> None:
        """Kill one engine with SIGKILL and start another process at the same ports."""
        engine = self._one()
        await _kill(engine.program)
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        await self._start_engine(engine)

    async def kill_router(self) -> None:
        """Kill the router with SIGKILL and start another one at the same port."""
        await _kill(self.router)
        await self._start_router()

    async def kill_both(self) -> None:
        """Kill the router and one engine, then restart both: the new router never sees the old
        engine.
        """
        engine = self._one()
        await _kill(self.router)
        await _kill(engine.program)
        await self._start_engine(engine)
        await self._start_router()

    async def freeze_engine(self) -> None:
        await self._freeze(self._one().program)

    async def freeze_router(self) -> None:
        await self._freeze(self.router)

    async def reset_cache(self) -> None:
        async with self.http.post(f"{self._one().url}/reset_prefix_cache") as reply:
            assert reply.status == 200

    def _one(self) -> Engine:
        return self.rng.choice(self.engines)

    async def _freeze(self, program: Program) -> None:
        program.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.2, 1.5))
        program.process.send_signal(signal.SIGCONT)

    async def _start_engine(self, engine: Engine) -> None:
        engine.starts += 1
        name = f"{engine.name}-{engine.starts}"
        arguments = engine_arguments(**engine.options)
        engine.program = await self.programs.start(name, "engine", arguments)
        engine.relay.reach_again()

    async def _start_router(self) -> None:
        self.router_starts += 1
        name = f"router-{self.router_starts}"
        self.router = await self.programs.start(name, "router", self.router_arguments)

    async def touch(self, number: int) -> None:
        """Make an engine publish events: send it a new prompt of `TOUCHED_BLOCKS` blocks."""
        engine = self.engines[number]
        prompt = [self.rng.randrange(30_000) for _ in range(TOUCHED_BLOCKS * BLOCK + 1)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        async with self.http.post(f"{engine.url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()

    async def view(self, number: int) -> KvView:
        """Return the router's view of an engine's cache."""
        async with self.http.get(f"{self.admin}/kv?worker={number}") as reply:
            assert reply.status == 200, await reply.text()
            return decode_kv_view(await reply.read())

    async def truth(self, number: int) -> tuple[int, Chains]:
        """Return (number of the last event batch, blocks) from the engine's own snapshot."""
        async with self.http.get(f"{self.engines[number].url}/kv_snapshot") as reply:
            assert reply.status == 200
            return truth_of(await reply.read())

    async def until_ready(self) -> None:
        """Wait until every worker of the router is ready."""

        async def ready() -> bool:
            async with self.http.get(f"{self.admin}/workers") as reply:
                rows = (await reply.json())["workers"]
            return all(row["state"] in ("ready", "trial") for row in rows)  # a trial: the next one

        await until(ready, "every worker to be ready")

    def story(self) -> Counter[str]:
        """Return counts of what was done to the pool and of the faults that its relays and proxies
        injected.
        """
        counted = [engine.relay.counted for engine in self.engines]
        counted += [engine.front.counted for engine in self.engines if engine.front]
        return sum(counted, Counter(self.done))


async def _kill(program: Program) -> None:
    program.process.send_signal(signal.SIGKILL)
    await program.process.wait()


@asynccontextmanager
async def pool(log_dir: Path, seed: int, router: list[str]) -> AsyncIterator[Pool]:
    """Yield a router and three engines: one with snapshots behind a faulty HTTP proxy, and two
    whose events are rewritten into other engines' forms.
    """
    rng = random.Random(seed)
    context = zmq.asyncio.Context()
    try:
        async with Programs(log_dir) as programs, aiohttp.ClientSession() as http:
            engines = [
                await _engine(programs, http, context, rng, "ours", None),
                await _engine(programs, http, context, rng, "arrays", arrays_of_digests),
                await _engine(programs, http, context, rng, "signed", maps_of_signed),
            ]
            engines[1].relay.replay_modes = COMPLETE
            async with relaying(*(engine.relay for engine in engines)):
                arguments = ["serve", *router]
                for engine in engines:
                    arguments += ["--worker", engine.spec]
                ports = ["--port", "0", "--admin-port", "0"]
                first = await programs.start("router", "router", [*arguments, *ports])
                ports = ["--port", _port(first.url), "--admin-port", _port(first.facts["admin"])]
                made = Pool(programs, http, rng, engines, [*arguments, *ports], first)
                await made.until_ready()
                yield made
            for engine in engines:
                if engine.front is not None:
                    await engine.front.close()
    finally:
        context.destroy(linger=0)


async def _engine(
    programs: Programs,
    http: aiohttp.ClientSession,
    context: zmq.asyncio.Context,
    rng: random.Random,
    name: str,
    rewrite: Any,
) -> Engine:
    options: dict[str, Any] = {"kv-tokens": KV_BLOCKS * BLOCK, "block-size": BLOCK}
    program = await programs.start(name, "engine", engine_arguments(**options))
    async with http.get(f"{program.url}/kv_event_sources") as reply:
        source = (await reply.json())["0"]
    live, replay = source["endpoint"], source["replay_endpoint"]
    options |= {
        "port": _port(program.url),
        "events-port": _port(live),
        "replay-port": _port(replay),
    }
    relay = EventRelay(context, random.Random(rng.random()), live, replay)
    front = None
    if rewrite is None:
        front = HttpFront(random.Random(rng.random()), program.url, http)
        await front.start()
        url, kind = front.url, ""
    else:
        relay.rewrite = rewrite
        url, kind = program.url, ",kind=vllm"  # vLLM has no snapshots
    spec = f"{url},events={relay.live},replay={relay.replay}{kind}"
    return Engine(name, options, program, relay, front, spec)


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def differences(view: KvView, held: Chains) -> tuple[int, int]:
    """Return (blocks missing in the router's view, blocks in the view that the engine lacks)."""
    ours = view.chains()
    missing = np.setdiff1d(held, ours, assume_unique=True)
    return len(missing), len(np.setdiff1d(ours, held, assume_unique=True))
