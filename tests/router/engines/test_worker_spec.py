"""Tests of worker specifications, given as text and as mappings."""

from __future__ import annotations

import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.spec import KEYS, WorkerSpec, WorkerSpecError, of_rank
from router.engines.worker_spec import parse_worker_spec, worker_spec_of

URL = "http://127.0.0.1:8000"


def test_a_url_alone_leaves_all_options_unset():
    assert parse_worker_spec(URL) == WorkerSpec(URL)
    assert parse_worker_spec(f" {URL}/ ") == WorkerSpec(URL)
    assert parse_worker_spec("https://gpu-7/base/").url == "https://gpu-7/base"


def test_every_key_is_read_from_text_and_from_a_mapping():
    text = (
        f"{URL},kind=vllm,model=org/m:1,rank=3,block_size=32,kv_tokens=400000,events=tcp://h:5557,"
        "replay=tcp://h:5558,topic=kv@h,metrics=http://h:8002/metrics,role=decode,"
        "max_requests=64,max_queued_tokens=8192,max_kv_fraction=0.9,weight=2.5"
    )
    spec = WorkerSpec(
        URL,
        kind="vllm",
        model="org/m:1",
        rank=3,
        block_size=32,
        kv_tokens=400_000.0,
        events="tcp://h:5557",
        replay="tcp://h:5558",
        topic="kv@h",
        metrics="http://h:8002/metrics",
        role="decode",
        max_requests=64.0,
        max_queued_tokens=8192.0,
        max_kv_fraction=0.9,
        weight=2.5,
    )
    assert parse_worker_spec(text) == spec
    assert worker_spec_of({key: getattr(spec, key) for key in KEYS}) == spec
    assert worker_spec_of({"url": URL, "block_size": "32", "kind": None}).block_size == 32
    assert str(spec) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "is not of the form"),
        ("ftp://h", "is not of the form"),
        ("http://", "is not of the form"),
        ("http://h:0", "is not of the form"),
        ("http://h:99999", "url"),
        ("http://[::1", "url"),
        ("http://h/?q=1", "query"),
        ("http://h/a b", "blank"),
        ("http://me:secret@h", "user or password"),
        (f"{URL},kind", "is not key=value"),
        (f"{URL},kin=vllm", "did you mean kind"),
        (f"{URL},colour=red", "keys: url, kind"),
        (f"{URL},kind=vllm,kind=vllm", "given twice"),
        (f"{URL},kind=tgi", "allowed: warmroute, trtllm, vllm, sglang"),
        (f"{URL},role=router", "allowed: both, prefill, decode"),
        (f"{URL},block_size=0", "1..4096"),
        (f"{URL},block_size=1.5", "whole number"),
        (f"{URL},block_size=many", "must be a number"),
        (f"{URL},max_requests=0", "1 or more"),
        (f"{URL},max_requests=nan", "1 or more"),
        (f"{URL},max_queued_tokens=inf", "1 or more"),
        (f"{URL},max_kv_fraction=90", r"\(0, 1\]"),
        (f"{URL},weight=0", "0.01..100"),
        (f"{URL},events=h:5557", "tcp://host:port"),
        (f"{URL},events=tcp://h", "events is 'tcp://h'; allowed: tcp://host:port"),
        (f"{URL},events=tcp://h:65536", "tcp://host:port"),
        (f"{URL},events=tcp://*:5557", "bind:tcp://"),
        (f"{URL},events=bind:tcp://*", "events is 'bind:tcp://"),
        (f"{URL},replay=tcp://h:x", "replay is 'tcp://h:x'"),
        (f"{URL},events=none,replay=tcp://h:1", "events=none"),
        (f"{URL},events=poll,topic=kv", "events=poll"),
        (f"{URL},events=bind:h:5557", "tcp://host:port, ipc://path, bind:tcp"),
        (f"{URL},replay=bind:tcp://h:1", "replay is 'bind:tcp://h:1'"),
        (f"{URL},topic=" + "k" * 1_025, "1024 bytes"),
        (f"{URL},rank=-1", "0..4095"),
        (f"{URL},rank=4096", "0..4095"),
        (f"{URL},rank=0.5", "whole number"),
        (f"{URL},kv_tokens=0", "1..1e12"),
        (f"{URL},kv_tokens=nan", "1..1e12"),
        (f"{URL},kv_tokens=1e13", "1..1e12"),
        (f"{URL},metrics=h:8002/metrics", "metrics 'h:8002/metrics' is not of the form"),
        (f"{URL},metrics=http://me:secret@h/metrics", "the metrics carries a user"),
        (f"{URL},model=", "model is empty"),
        (URL + ",model=" + "m" * 5_000, "longer than"),
        ({"kind": "vllm"}, "url is missing"),
        ({"url": 7}, "url must be text"),
        ({"url": URL, "weight": True}, "weight must be a number"),
        ({"url": URL, "weight": 10**400}, "weight must be a number"),
        ({"url": URL, "model": "a,b"}, "comma"),
        ({1: URL}, "mapping"),
        ([URL], "got list"),
        (None, "got NoneType"),
    ],
)
def test_errors_say_what_is_allowed(value, says):
    with pytest.raises(WorkerSpecError, match=says):
        worker_spec_of(value)


def test_a_rank_has_its_own_name_and_endpoints():
    whole = parse_worker_spec(f"{URL},events=bind:tcp://*:5557,replay=tcp://h:5600,weight=2")
    assert whole.name == URL
    assert of_rank(whole, 0).events == whole.events
    one = of_rank(whole, 2)
    assert (one.name, one.rank, one.weight) == (f"{URL}#2", 2, 2.0)
    assert (one.events, one.replay) == ("bind:tcp://*:5559", "tcp://h:5602")
    for kept in ("none", "poll"):
        assert of_rank(WorkerSpec(URL, events=kept), 5).events == kept
    with pytest.raises(WorkerSpecError, match=r"rank 9: .* no port 65536"):
        of_rank(WorkerSpec(URL, events="tcp://h:65527"), 9)


def test_a_password_never_appears_in_an_error():
    with pytest.raises(WorkerSpecError) as caught:
        parse_worker_spec("http://me:secret@h:1")
    assert "secret" not in str(caught.value)


@given(
    st.builds(
        WorkerSpec,
        url=st.just(URL),
        kind=st.sampled_from([None, "vllm", "openai"]),
        model=st.one_of(st.none(), st.text(string.ascii_letters + "/-=.", min_size=1)),
        block_size=st.one_of(st.none(), st.integers(1, 4096)),
        rank=st.one_of(st.none(), st.integers(0, 4095)),
        kv_tokens=st.one_of(st.none(), st.floats(1.0, 1e12)),
        events=st.sampled_from([None, "none", "poll", "tcp://h:1", "bind:tcp://*:1", "ipc://a"]),
        max_requests=st.one_of(st.none(), st.floats(1.0, 1e9)),
        max_kv_fraction=st.one_of(st.none(), st.floats(0.001, 1.0)),
        weight=st.floats(0.01, 100.0),
    )
)
def test_the_text_of_a_spec_parses_to_the_same_spec(spec):
    assert parse_worker_spec(str(spec)) == spec


@given(st.one_of(st.text(), st.dictionaries(st.text(), st.none() | st.text() | st.floats())))
def test_any_value_is_a_spec_or_a_spec_error(value):
    with suppress(WorkerSpecError):
        assert isinstance(worker_spec_of(value), WorkerSpec)
