"""Tests of blocks that leave the GPU and stay in host memory: they are loaded while other requests
run, and reported to routers.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.block_pool import BlockPool, HostBlock, HostTier
from engine.scheduler.request import Reason, State
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Read, SchedulerSettings
from engine.server.events import EventLog
from engine.server.settings import WorkerSettings
from engine.timed import continuation
from engine.wire.events import BlockStored, decode_batch, snapshot_payloads
from kvkernels import EventBatch, PrefixIndex, WorkerBlocks, chain_hashes
from tests.effort import examples
from tests.engine.harness import VOCAB, drain_live, running, subscriber
from tests.engine.scheduling import SIZE, Driver, array, request
from tests.oracles.block_pool import check_pool

PROMPT = list(range(4 * SIZE + 2))  # four blocks, and two tokens more
OTHER = list(range(1000, 1000 + 6 * SIZE - 1))  # as much as the small GPU holds


def with_host(blocks: int, host_blocks: int, **limits: float) -> Scheduler:
    given = {"max_num_tokens": 64, "max_batch_size": 8, "max_model_tokens": 64} | limits
    pool = BlockPool(blocks, SIZE, host_blocks=host_blocks)
    return Scheduler(SchedulerSettings(**given), pool)  # type: ignore[arg-type]


def evicted(scheduler: Scheduler) -> Driver:
    """Return a driver that has served a prompt whose blocks another prompt has since pushed out of
    the GPU.
    """
    driver = Driver(scheduler)
    for number, prompt in enumerate((PROMPT, OTHER)):
        scheduler.add(request(number, prompt, 1), driver.now_s)
        driver.run()
    chain = chain_hashes(array(PROMPT), SIZE).tolist()
    assert (scheduler.pool.hit(chain), scheduler.pool.host.hit(chain, 0, 9)) == (0, 4)
    return driver


def test_blocks_in_host_memory_are_loaded_and_the_rest_is_computed() -> None:
    scheduler = with_host(6, 8)
    driver = evicted(scheduler)
    again = request(2, PROMPT, 1)
    scheduler.add(again, driver.now_s)
    assert scheduler.schedule(driver.now_s) is None
    assert scheduler.take_reads() == [Read(again, 0, 4 * SIZE, "host")]
    assert (again.state, again.reason) == (State.READING, Reason.KV_TRANSFER)
    scheduler.end_read(2, driver.now_s, arrived=True)
    driver.step()
    (chunk,) = driver.steps[-1].chunks
    assert (chunk.start, chunk.tokens) == (4 * SIZE, 2)
    assert (again.cached_tokens, scheduler.host_hit_tokens_total) == (4 * SIZE, 4 * SIZE)
    assert driver.outputs[2] == driver.outputs[0]


def test_other_requests_run_during_a_load() -> None:
    scheduler = with_host(12, 8)
    driver = Driver(scheduler)
    for number, prompt in enumerate((PROMPT, OTHER, OTHER[::-1])):
        scheduler.add(request(number, prompt, 1), driver.now_s)
        driver.run()
    scheduler.add(request(3, PROMPT, 1), driver.now_s)
    scheduler.add(request(4, [7, 8, 9], 3), driver.now_s)
    for _ in range(3):
        driver.step()
    assert driver.finished[4] == "length"
    assert 3 not in driver.finished
    scheduler.end_read(3, driver.now_s, arrived=True)
    driver.run()
    assert driver.outputs[3] == driver.outputs[0]


def test_a_request_cancelled_during_its_load_frees_blocks_after_the_load() -> None:
    scheduler = with_host(6, 8)
    driver = evicted(scheduler)
    scheduler.add(request(2, PROMPT, 1), driver.now_s)
    assert scheduler.schedule(driver.now_s) is None
    assert len(scheduler.take_reads()) == 1
    assert scheduler.cancel(2)
    assert scheduler.kv_used_blocks == 5
    scheduler.end_read(2, driver.now_s, arrived=True)
    assert scheduler.kv_used_blocks == 0
    check_pool(scheduler.pool)


def test_pinned_host_blocks_are_not_evicted() -> None:
    host = HostTier(2)
    host.keep([(2, block(1)), (1, block(None))])
    host.pin([1, 2])
    assert host.keep([(4, block(3)), (3, block(None))]) == ([], [])
    assert 1 in host
    host.unpin([1, 2])
    assert host.keep([(4, block(3)), (3, block(None))]) == ([4, 3], [2, 1])


def block(parent: int | None) -> HostBlock:

    return HostBlock(parent, array([]))


def test_a_negative_host_memory_size_is_rejected() -> None:
    with pytest.raises(ValueError, match="host blocks must be 0 or more, got -1"):
        HostTier(-1)


class HostMachine(RuleBasedStateMachine):
    """Runs random histories in which a router that follows the events knows what GPU and host
    memory hold.
    """

    @initialize(blocks=st.integers(5, 12), host_blocks=st.integers(0, 14))
    def start(self, blocks: int, host_blocks: int) -> None:
        limits = {"max_num_tokens": 12, "max_batch_size": 4, "prefix_wait_tokens": 8}
        limits |= {"min_chunk_tokens": 4}
        self.scheduler = with_host(blocks, host_blocks, max_model_tokens=20, **limits)
        self.driver = Driver(self.scheduler)
        self.log = EventLog(self.scheduler.pool, lambda: 0.0)
        self.index = PrefixIndex(2, 1000, 1 << 20)
        self.heard = WorkerBlocks(self.index, 0, SIZE, "m")
        self.loading: list[int] = []
        self.serial = 0
        self.prompts: list[list[int]] = []

    @rule(
        path=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.integers(0, 3),
        tokens=st.integers(1, 6),
    )
    def arrive(self, path: list[int], tail: int, tokens: int) -> None:
        prompt = [piece for piece in path for _ in range(SIZE)] + [5] * tail
        self.prompts.append(prompt)
        self.scheduler.add(request(self.serial, prompt, tokens), self.driver.now_s)
        self.serial += 1

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()
            self.loading += [one.request.request_id for one in self.scheduler.take_reads()]

    @rule(place=st.integers(0, 8), arrived=st.sampled_from([True, True, True, False]))
    def end_load(self, place: int, arrived: bool) -> None:
        if self.loading:
            number = self.loading.pop(place % len(self.loading))
            self.scheduler.end_read(number, self.driver.now_s, arrived=arrived)

    @rule(back=st.integers(1, 6))
    def cancel(self, back: int) -> None:
        self.scheduler.cancel(max(0, self.serial - back))

    @rule()
    def clear(self) -> None:
        self.scheduler.pool.clear()

    @invariant()
    def both_tiers_are_known(self) -> None:
        pool = self.scheduler.pool
        check_pool(pool)
        batch = self.log.flush()
        if batch is not None:
            self.heard.apply(EventBatch(batch.payload))
        late = WorkerBlocks(self.index, 1, SIZE, "m")
        for payload in snapshot_payloads(self.log.snapshot())[1]:
            late.apply(EventBatch(payload))
        for prompt in self.prompts[-6:]:
            chain = chain_hashes(array(prompt), SIZE)
            hit = pool.hit(chain.tolist())
            both = hit + pool.host.hit(chain.tolist(), hit, len(chain))
            tiers = self.index.longest_prefix_tiers(chain)
            assert tiers[:2].tolist() == [[hit, hit], [both, both]]
        for worker in range(2):
            assert self.index.held(worker, 1) == len(pool.host)
            assert self.index.held(worker, 0) == pool.cached_blocks
        late.clear()

    def teardown(self) -> None:
        """Assert that all requests end, whatever happened before."""
        for _ in range(1000):
            if not self.scheduler.requests:
                break
            self.step(1)
            self.end_load(0, True)
        assert not self.scheduler.requests
        while self.loading:
            self.end_load(0, True)
        assert self.scheduler.kv_used_blocks == 0


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


async def test_a_simulated_worker_loads_evicted_blocks_and_reports_it() -> None:
    """A simulated worker loads evicted blocks from host memory and reports that over HTTP: usage,
    metrics, events of the medium CPU, and a snapshot that has the blocks.
    """
    prompts = [list(range(start, start + 400)) for start in range(0, 4000, 400)]
    async with (
        running(kv_tokens=1024, host_kv_tokens=16_384) as worker,
        subscriber(worker.worker) as socket,
    ):
        for prompt in prompts:
            await worker.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        status, answer = await worker.post(
            "/v1/completions", {"prompt": prompts[0], "max_tokens": 4}
        )
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 24 * 16
        words = "".join(f" t{token}" for token in continuation(prompts[0], 4, VOCAB))
        assert answer["choices"][0]["text"].replace("<", "").replace(">", "") == words
        batches = await drain_live(socket, worker.worker.kv_seq)
        events = [one for batch in batches for one in decode_batch(batch.payload).events]
        media = {one.medium for one in events if isinstance(one, BlockStored)}
        assert media == {"GPU", "CPU"}
        index = PrefixIndex(1, 10_000, 1 << 24)
        late = WorkerBlocks(index, 0, 16, "m")
        for payload in snapshot_payloads(await worker.get("/kv_snapshot"))[1]:
            late.apply(EventBatch(payload))
        chain = chain_hashes(array(prompts[1]), 16)
        assert index.longest_prefix_tiers(chain)[:, 0].tolist() == [0, 25, 25]
        metrics = (await worker.get("/metrics")).decode()
        assert (
            'external_prefix_cache_hits_total{engine="0",model_name="warmroute-timed"} 384.0'
            in (metrics)
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host_gbytes_per_s": 0.0}, "host_gbytes_per_s must be above 0 and at most 1e6, got 0"),
        ({"host_kv_tokens": -1}, "host_kv_tokens must be 0, or at least one block of 16 .* got -1"),
        ({"host_kv_tokens": 15}, "host_kv_tokens must be 0, or at least one block of 16 .* got 15"),
    ],
)
def test_the_error_names_the_bad_host_tier_setting(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkerSettings(profile_name="llama-3.1-8b-h100", **changes)  # type: ignore[arg-type]
