"""Workers as text and as mappings."""

from __future__ import annotations

import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.worker_spec import KEYS, WorkerSpec, WorkerSpecError, parse_worker_spec, worker_spec_of

URL = "http://127.0.0.1:8000"


def test_a_url_alone_leaves_everything_to_be_asked():
    assert parse_worker_spec(URL) == WorkerSpec(URL)
    assert parse_worker_spec(f" {URL}/ ") == WorkerSpec(URL)
    assert parse_worker_spec("https://gpu-7/base/").url == "https://gpu-7/base"


def test_every_key_as_text_and_as_mapping():
    text = (
        f"{URL},kind=vllm,model=org/m:1,block_size=32,events=tcp://h:5557,replay=tcp://h:5558,"
        "role=decode,max_requests=64,max_queued_tokens=8192,max_kv_fraction=0.9,weight=2.5"
    )
    spec = WorkerSpec(
        URL,
        kind="vllm",
        model="org/m:1",
        block_size=32,
        events="tcp://h:5557",
        replay="tcp://h:5558",
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
        ("127.0.0.1:8000", "is not of the form"),
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
        (f"{URL},kind=tgi", "allowed: warmroute, vllm, sglang"),
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
        (f"{URL},events=none,replay=tcp://h:1", "events=none"),
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
def test_refusals_say_what_is_allowed(value, says):
    with pytest.raises(WorkerSpecError, match=says):
        worker_spec_of(value)


def test_a_password_is_never_repeated():
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
        max_requests=st.one_of(st.none(), st.floats(1.0, 1e9)),
        max_kv_fraction=st.one_of(st.none(), st.floats(0.001, 1.0)),
        weight=st.floats(0.01, 100.0),
    )
)
def test_the_text_of_a_spec_reads_back_as_the_same(spec):
    assert parse_worker_spec(str(spec)) == spec


@given(st.one_of(st.text(), st.dictionaries(st.text(), st.none() | st.text() | st.floats())))
def test_anything_is_a_spec_or_a_clear_error(value):
    with suppress(WorkerSpecError):
        assert isinstance(worker_spec_of(value), WorkerSpec)
