"""Tests of generated workloads: their shapes against ones computed by hand, their randomness, their
keys.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.generators.table import GENERATORS
from simulator.traces.options import Size, option_rows
from simulator.workloads.open import Chainer, TraceError, sessions
from tests.effort import examples
from tests.simulator.traces.generators.generated import ideal_hit_share, jobs_of, opened


def test_the_sglang_generator_has_the_published_defaults() -> None:
    stream = opened("gen:sglang")
    jobs = list(stream.jobs)
    assert (stream.total, len(jobs), stream.block_tokens) == (1024, 1024, 16)
    assert {(job.at_ns, job.prompt_tokens, job.output_tokens) for job in jobs} == {(0, 2176, 256)}
    # 15 of 16 prompts of a group find its 2,048 tokens: 0.9375 * 2048 / 2176.
    assert ideal_hit_share(jobs, 16) == pytest.approx(0.8824, abs=1e-4)
    groups = Counter(int(job.ids[0]) for job in jobs)
    assert sorted(groups.values()) == [16] * 64
    in_order = jobs_of("gen:sglang?ordered=true")
    firsts = [int(job.ids[0]) for job in in_order]
    assert firsts == sorted(firsts) != [int(job.ids[0]) for job in jobs]
    assert stream.fraction_read() == 1.0


def test_the_sglang_generator_supports_turns_and_ranges() -> None:
    source = "gen:sglang?groups=4&prompts=5&turns=3&range_ratio=0.5&rate=2&gap_s=7"
    stream = opened(source)
    jobs = list(stream.jobs)
    assert stream.total == len(jobs) == 60
    assert [job.at_ns for job in jobs] == sorted(job.at_ns for job in jobs)
    for _, turns in sessions(iter(jobs)):
        assert len(turns) == 3
        for before, after in itertools.pairwise(turns):
            known = [*before.ids.tolist(), *before.answer_ids.tolist()]
            assert after.ids.tolist()[: len(known)] == known
            assert after.at_ns - before.at_ns == 7_000_000_000
            asked = after.prompt_tokens - before.prompt_tokens - before.output_tokens
            assert 64 <= asked <= 128
            assert 128 <= before.output_tokens <= 256
        assert 1024 + 64 <= turns[0].prompt_tokens <= 2176


def test_the_vllm_generator_has_equal_shares_and_the_given_burstiness() -> None:
    jobs = jobs_of("gen:vllm?requests=4003&prefixes=10&rate=20&burstiness=0.25")
    assert len(jobs) == 4000
    assert set(Counter(int(job.ids[0]) for job in jobs).values()) == {400}
    assert {job.prompt_tokens for job in jobs} == {512}
    gaps = [(b.at_ns - a.at_ns) / 1e9 for a, b in itertools.pairwise(jobs)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.15)
    assert spread / mean == pytest.approx(2.0, rel=0.15)  # 1 / sqrt(0.25)
    even = jobs_of("gen:vllm?requests=40&rate=20&burstiness=inf")
    assert [job.at_ns for job in even] == [50_000_000 * i for i in range(40)]


def test_the_inference_perf_generator_cycles_its_corpus() -> None:
    stream = opened("gen:inference_perf?groups=3&prompts=4&system=96&question=48&stages=2:12,6:10")
    jobs = list(stream.jobs)
    assert stream.total == len(jobs) == 84
    assert [stage.requests for stage in stream.stages] == [24, 60]
    for start in (0, 12, 24):
        assert jobs[start].ids.tolist() == jobs[start + 12].ids.tolist()
    assert len({tuple(job.ids.tolist()) for job in jobs}) == 12
    assert {job.prompt_tokens for job in jobs} == {144}
    first, second = stream.stages
    assert (first.start_ns, second.start_ns) == (0, 13_000_000_000)
    for stage in stream.stages:
        inside = [job for job in jobs if stage.start_ns <= job.at_ns < stage.end_ns]
        assert len(inside) == stage.requests


def test_the_inference_perf_generator_supports_conversations() -> None:
    source = "gen:inference_perf?groups=2&prompts=3&multi_turn=true&stages=3:20&max_prompt=600"
    jobs = jobs_of(source)
    assert len(jobs) == 60
    told = sessions(iter(jobs))
    assert len(told) > 6  # conversations that grew too long began anew
    for _, turns in told:
        assert [job.prompt_tokens for job in turns] == [150 + 100 * i for i in range(len(turns))]
        assert turns[-1].prompt_tokens <= 600
    assert len({tuple(job.ids.tolist()) for job in jobs}) == 60


def test_the_llmd_generator_has_the_published_stages() -> None:
    stream = opened("gen:llmd")
    warm_up, *rest = stream.stages
    assert (warm_up.warm_up, warm_up.rate_per_s, warm_up.requests) == (True, 15, 750)
    rates = [3, 10, 15, 20, 22, 25, 30, 35, 40, 43, 46, 49, 52, 55, 57, 60]
    assert [stage.rate_per_s for stage in rest] == rates
    jobs = list(stream.jobs)
    assert stream.total == len(jobs)
    assert {(job.prompt_tokens, job.output_tokens) for job in jobs} == {(7200, 1000)}
    assert len({tuple(job.ids.tolist()) for job in jobs[:750]}) == 750
    assert len({int(job.ids[0]) for job in jobs}) == 150
    # The published working set: 150 x 6,000 + 750 x 1,200 tokens.
    assert len({name for job in jobs for name in job.ids.tolist()}) * 16 == 1_800_000
    small = opened("gen:llmd?case=83x3")
    assert small.stages[0].rate_per_s == 9
    assert next(small.jobs).prompt_tokens == 9000
    fast = opened("gen:llmd", speed=2.0)
    assert fast.stages[1].start_ns == stream.stages[1].start_ns // 2
    assert fast.stages[1].rate_per_s == 6


def test_the_zipf_generator_has_a_heavy_tail_and_nested_prefixes() -> None:
    source = "gen:zipf?requests=20000&groups=50&exponent=1&levels=3&children=4&system=160"
    jobs = jobs_of(source)
    counts = Counter(int(job.ids[0]) for job in jobs).most_common()
    harmonic = sum(1 / rank for rank in range(1, 51))
    assert counts[0][1] / 20000 == pytest.approx(1 / harmonic, rel=0.05)
    assert counts[9][1] / 20000 == pytest.approx(0.1 / harmonic, rel=0.25)
    by_level = [{int(job.ids[10 * level]) for job in jobs} for level in range(4)]
    assert [len(names) for names in by_level[:2]] == [50, 200]
    assert 700 < len(by_level[2]) <= 800  # the rarest may not come up
    assert len(by_level[3]) == 20000
    parents = {}
    for job in jobs:
        for level in (1, 2):
            path = job.ids.tolist()[: 10 * level]
            assert parents.setdefault(int(job.ids[10 * level]), path) == path


def test_prefixes_of_the_zipf_generator_have_a_lifetime() -> None:
    source = "gen:zipf?requests=6000&rate=10&groups=20&exponent=0&lifetime_s=100"
    jobs = jobs_of(source)
    seen: dict[int, list[int]] = {}
    for job in jobs:
        seen.setdefault(int(job.ids[0]), []).append(job.at_ns)
    # 20 at the start, then 20 ranks x 600 s / 100 s deaths.
    assert 20 + 120 * 0.7 < len(seen) < 20 + 120 * 1.3
    early = {name for name, times in seen.items() if times[0] < 20e9}
    late = {name for name, times in seen.items() if times[-1] > 580e9}
    assert len(early & late) <= 3


SMALL = {
    "sglang": "groups=5&prompts=6&rate=3&question=100~50",
    "vllm": "requests=50&rate=9&burstiness=2",
    "inference_perf": "stages=3:5,9:5&multi_turn=true&output=20..60",
    "llmd": "stages=5:5,10:3",
    "zipf": "requests=60&levels=2&lifetime_s=5",
    "sessions": "sessions=15&rate=2&turns=1..5",
    "agentic": "sessions=4&rate=2&system=200&context=100*0.6",
    "tenants": "sessions=15&tenants=3&system=64..200",
    "shared": "requests=40&prefix=300&suffix=60*0.6",
}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_jobs(name: str) -> None:
    def all_of(seed: int) -> bytes:
        jobs = jobs_of(f"gen:{name}?{SMALL[name]}", seed)
        return repr([msgspec.structs.astuple(job) for job in jobs]).encode()

    assert all_of(1) == all_of(1)
    assert all_of(1) != all_of(2)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("block", [None, 64, 7])
def test_every_generated_job_is_valid(name: str, block: int | None) -> None:
    stream = opened(f"gen:{name}?{SMALL[name]}", block_tokens=block)
    size = stream.block_tokens
    assert size == (block or size)
    chainer = Chainer(size, size)
    last_ns = count = 0
    for serial, job in enumerate(stream.jobs):
        assert job.at_ns >= last_ns
        last_ns = job.at_ns
        assert min(job.prompt_tokens, job.output_tokens) >= 1
        full = job.prompt_tokens // size
        assert full <= len(job.ids) <= -(-job.prompt_tokens // size)
        known = (job.prompt_tokens + job.output_tokens) // size
        assert full <= len(chainer.chain(job, serial)) <= known
        count += 1
    assert stream.total in (None, count)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "gen:kafka",
            "expected one of: sglang, vllm, inference_perf, llmd, zipf, sessions, agentic",
        ),
        ("gen:sglang?group=3", "unknown key 'group'; valid ones: burstiness, gap_s, groups"),
        ("gen:sglang?groups=0", "groups=0: .*>= 1"),
        ("gen:sglang?groups=x", "groups=x: "),
        ("gen:sglang?groups", "key=value"),
        ("gen:sglang?system=5-6", "system=5-6: expected 1200, mean~deviation"),
        ("gen:sglang?system=4000000&question=400000", "a prompt of 4400000 tokens"),
        ("gen:sglang?groups=10000000&prompts=10", "different prompts"),
        ("gen:sglang?rate=-1", "rate=-1"),
        ("gen:sglang?system=5*3.5", "sigma at most 3"),
        ("gen:vllm?requests=5", "one per prefix"),
        ("gen:agentic?case=chat", "unknown key 'case'"),
        ("gen:agentic?think_sigma=9", "think_sigma=9"),
        ("gen:tenants?tenants=0", "tenants=0"),
        ("gen:inference_perf?stages=5", "expected rate:seconds"),
        ("gen:inference_perf?stages=0:5", "no request"),
        ("gen:llmd?case=9x9", "case=9x9"),
        ("gen:zipf?levels=9", "levels=9"),
        ("gen:zipf?levels=4&children=1000", "prefixes; expected"),
        ("gen:sessions?system=0&context=0&question=0", "no tokens"),
    ],
)
def test_impossible_options_are_refused(source: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        opened(source)


def test_every_generator_key_has_a_description() -> None:
    rows = [(one.name, *row) for one in GENERATORS for row in option_rows(one.keys)]
    assert {row[0] for row in rows} == {one.name for one in GENERATORS}
    assert [row for row in rows if not row[3]] == []
    assert ("sglang", "groups", "64", "number of system prompts") in rows


@pytest.mark.parametrize("text", ["1200", "1200~360", "2..20", "0", "700*0.6"])
def test_a_size_is_printed_as_it_was_written(text: str) -> None:
    assert str(Size.parse(text)) == text


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("0123456789~.-*x", max_size=8))
def test_any_text_is_a_valid_size_or_refused(text: str) -> None:
    try:
        size = Size.parse(text)
    except ValueError:
        return
    assert all(0 <= size.draw(Random(seed)) <= 4 << 20 for seed in range(5))


def test_a_stream_of_a_million_requests_keeps_no_past_ones() -> None:
    """A stream of a million requests keeps no memory for those that have passed; its memory depends
    on the requests that lie ahead.
    """
    stream = opened("gen:zipf?requests=30000&groups=1000&system=160&question=32&rate=100")
    next(stream.jobs)
    tracemalloc.start()
    for _ in stream.jobs:
        pass
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_generators_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="is a generator"):
        opened("gen:sglang", format="mooncake")
    assert len(jobs_of("gen:sglang", requests=10)) == 10
    assert opened("gen:sglang", requests=10).total == 10
