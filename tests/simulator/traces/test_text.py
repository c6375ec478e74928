"""Tests of traces that contain text: chats and spans become names of blocks, and no text is left
anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.job import Job, TraceError
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs
from tests.effort import examples
from tests.simulator.cli_support import FLEET, Run, run, trace
from tests.simulator.trace_lines import ACCESS, CHAT, export, ids, read, span, with_, write
from tests.tokenizer_folder import write_model

__all__ = ["run"]
S = 1_000_000_000
SECRET = "the seventh heron eats plums"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def notes(spec: WorkloadSpec) -> list[str]:
    stream = open_jobs(spec)
    list(stream.jobs)
    assert not stream.errors.total, list(stream.errors)
    return list(stream.notes())


def shared(one: Job, other: Job) -> int:
    """Return the number of equal blocks with which two prompts begin."""
    pairs = zip(ids(one), ids(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids)))


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 1_700_000_060, **chat(user("x" * 400))},
        {"timestamp": "1700000060.0", **chat(user("x" * 400))},
        {"created": 1_700_000_060_000, "body": chat(user("x" * 400))},
        {"time": 1_700_000_060_000_000, "request": chat(user("x" * 400))},
        {"created_at": "2023-11-14T22:14:20Z", "request": chat(user("x" * 400))},
        {"created_at": "2023-11-14 22:14:20", "request": chat(user("x" * 400))},
        {"created_at": "2023-11-14T23:14:20+01:00", **chat(user("x" * 400))},
        {"request": chat(user("x" * 400)), "response": {"body": {"created": 1_700_000_060}}},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "ts": 1_700_000_060,
         "body": chat({"role": "user", "content": [{"type": "text", "text": "x" * 400}]})},
    ],
)  # fmt: skip
def test_a_request_is_read_from_many_json_layouts(tmp_path: Path, line: dict[str, Any]) -> None:
    first = {"timestamp": 1_700_000_000, **chat(user("x" * 400))}
    one, two = read(write(tmp_path, first, line))
    assert (one.at_ns, two.at_ns) == (0, 60 * S)
    assert one.prompt_tokens == two.prompt_tokens == 102
    assert shared(one, two) == 6


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"response": {"usage": {"completion_tokens": 7}}}, 7),
        ({"response": {"body": {"usage": {"completion_tokens": 7}}}}, 7),
        ({"usage": {"completion_tokens": 0}}, 1),
        ({"response": "y" * 40}, 10),
        ({"completion": "y" * 40}, 10),
        ({"response": {"choices": [{"message": assistant("y" * 40)}]}}, 10),
        ({"response": {"choices": [{"text": "y" * 40}]}}, 10),
        ({"messages": [user("x"), assistant("y" * 40)]}, 10),
        ({}, 256),
        ({"max_tokens": 30}, 30),
        ({"max_completion_tokens": 3000}, 256),
        ({"response": {"usage": {"output_tokens": 7, "input_tokens": 2}}}, 7),
        (
            {"response": {"output": [{"content": [{"text": "y" * 32}]}, {"arguments": "{}" * 4}]}},
            10,
        ),
        ({"response": {"output": [{"content": 7}, 7]}}, 256),
        ({"max_output_tokens": 30}, 30),
    ],
)
def test_the_length_of_an_answer_comes_from_usage_text_or_limits(
    tmp_path: Path, more: dict[str, Any], tokens: int
) -> None:
    (job,) = read(write(tmp_path, {**chat(user("x")), **more}))
    assert (job.prompt_tokens, job.output_tokens) == (2, tokens)


def response(said: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": said, **more}


def test_responses_requests_are_read_like_chats(tmp_path: Path) -> None:
    rules = {"role": "system", "content": "r" * 400}
    look = {"name": "look", "description": "d" * 80, "parameters": {"type": "object"}}
    part = [{"type": "input_text", "text": "x" * 400}]
    lines = [
        chat(rules, user("x" * 400)),
        response("x" * 400, instructions="r" * 400),
        response([{"type": "message", **user("x" * 400)}], instructions="r" * 400),
        {"body": response([{"role": "user", "content": part}], instructions="r" * 400)},
        {"request": response("x" * 400, instructions="r" * 400), "response": {"output": []}},
        chat(rules, user("x" * 400), tools=[{"type": "function", "function": look}]),
        response("x" * 400, instructions="r" * 400, tools=[{"type": "function", **look}]),
    ]
    jobs = read(write(tmp_path, *lines))
    full = [ids(job)[: job.prompt_tokens // 16] for job in jobs]
    assert full[:5] == [full[0]] * 5
    assert full[5] == full[6] != full[0]
    assert len(full[0]) == 12


def test_turns_of_responses_requests_share_their_items(tmp_path: Path) -> None:
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}
    result = {"type": "function_call_output", "call_id": "1", "output": "z" * 400}
    begun = [user("x" * 400)]
    one, two, three = read(
        write(
            tmp_path,
            response(begun),
            response([*begun, call, result]),
            response([*begun, call, result, user("more")], previous_response_id=None),
        )
    )
    assert {one.session, two.session, three.session} == {"c1"}
    assert shared(one, two) in (6, 7)  # plus the block that its session continues
    assert shared(two, three) >= 14
    later = response("x", previous_response_id="resp_1")
    said = notes(write(tmp_path, later, later))
    assert "2 of 2 requests have a previous_response_id: the turns before them" in said[-1]


def test_assumptions_are_reported(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    lines = [chat(user("x")), chat(user("y"), usage={"prompt_tokens": 4}, model="n")]
    lines.append(chat({"role": "user", "content": [picture]}, response="yes"))
    said = "\n".join(notes(write(tmp_path, *lines)))
    for words in (
        "no line has a time (timestamp, time, created_at, created, start_time, ts): arrivals are "
        "drawn, Poisson, 1 a second where --rate does not say",
        "without --tokenizer FOLDER, four bytes of a prompt are a token; the file's own counts are "
        "2.00 times these",
        "2 of 3 answers have no length: 256 tokens or max_tokens are taken",
        "1 of 3 answers have no usage: their text is counted",
        "1 images or other media count as a few tokens each",
        "requests of 2 models are taken together",
    ):
        assert words in said
    known = notes(with_(write(tmp_path, CHAT), format="auto?model=m"))
    assert len(known) == 2  # the tokenizer, and the session
    assert len(read(with_(write(tmp_path, *lines), format="auto?model=n"))) == 1


def test_arrival_times_are_drawn_if_the_file_has_none(tmp_path: Path) -> None:
    spec = write(tmp_path, *[chat(user(f"{n}")) for n in range(400)])
    jobs = read(spec, format="chats?rate=4")
    assert 80 < jobs[-1].at_ns / S < 125
    assert [job.at_ns for job in jobs] == [job.at_ns for job in read(spec, format="chats?rate=4")]
    other = [job.at_ns for job in open_jobs(spec, seed=1).jobs]
    assert other != [job.at_ns for job in open_jobs(spec, seed=2).jobs]
    assert read(spec, rate_per_s=20.0)[-1].at_ns / S == pytest.approx(399 / 20, rel=1e-6)


TEXTS = st.text(max_size=40)
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5)


@settings(max_examples=examples(100), deadline=None)
@given(
    system=st.text(max_size=200),
    talks=st.lists(TURNS, min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    tokenized=st.booleans(),
)
def test_prompts_share_common_prefixes_and_turns_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    system: str,
    talks: list[list[tuple[str, str]]],
    order: Any,
    tokenized: bool,
) -> None:
    """Prompts share what they have in common, and turns are found: every turn is in the session of
    the turn before it, and shares all full blocks of that turn.
    """
    folder = tmp_path_factory.getbasetemp()
    requests: list[list[tuple[int, list[dict[str, Any]]]]] = []
    for number, talk in enumerate(talks):
        said: list[dict[str, Any]] = [{"role": "system", "content": system}]
        requests.append([])
        for question, answer in talk:
            said = [*said, user(f"{number}: {question}")]
            requests[-1].append((number, said))
            said = [*said, assistant(answer)]
    lines: list[tuple[int, list[dict[str, Any]]]] = []
    while left := [one for one in requests if one]:
        lines.append(order.choice(left).pop(0))
    spec = write(folder, *[chat(*said) for _, said in lines])
    format = f"chats?tokenizer={write_model(folder)}" if tokenized else "auto"
    jobs = read(spec, format=format)
    before: dict[int, Job] = {}
    for (number, _), job in zip(lines, jobs, strict=True):
        if number in before:
            last = before[number]
            full = last.prompt_tokens // 16
            assert job.session == last.session
            assert shared(last, job) >= full
            assert shared(last, job) <= len(job.ids)
        before[number] = job
    assert len({job.session for job in jobs}) == len(talks)


@settings(max_examples=examples(200), deadline=None)
@given(one=TEXTS, other=TEXTS)
def test_different_texts_have_different_names(
    tmp_path_factory: pytest.TempPathFactory, one: str, other: str
) -> None:
    """Different texts get different names and equal texts the same ones; later text does not change
    the names of earlier blocks.
    """
    filler = "." * 64
    spec = write(
        tmp_path_factory.getbasetemp(),
        chat(user(one), user(filler)),
        chat(user(other), user(filler)),
    )
    first, second = read(spec)
    full = min(first.prompt_tokens, second.prompt_tokens) // 16
    alike = ids(first)[:full] == ids(second)[:full]
    if "\0" not in one + other:
        assert alike == (one == other)


def test_plain_prompts_that_extend_each_other_form_a_session(tmp_path: Path) -> None:
    text = "In the beginning there was a word of some length. " * 8
    spec = write(
        tmp_path,
        {"prompt": text},
        {"prompt": text + "And then another one."},
        {"prompt": "Something else altogether, and not short either." * 2},
        {"prompt": [5] * 64},
        {"prompt": [5] * 64 + [6] * 16},
    )
    jobs = read(spec)
    assert [job.session for job in jobs] == ["c1", "c1", "c2", "c3", "c3"]
    assert [job.prompt_tokens for job in jobs] == [100, 105, 24, 64, 80]
    assert shared(jobs[0], jobs[1]) == 7  # the last one is partial
    assert shared(jobs[3], jobs[4]) == 4


def test_session_names_of_the_file_are_hashed(tmp_path: Path) -> None:
    jobs = read(
        write(
            tmp_path,
            chat(user("a"), session_id=SECRET),
            chat(user("b"), conversation_id=SECRET),
            chat(user("c"), session_id=7),
        )
    )
    assert jobs[0].session == jobs[1].session != jobs[2].session
    assert SECRET not in str(jobs)


def test_a_turn_after_a_forgotten_prompt_starts_a_new_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.traces.prompt_text._MAX_ENDS", 2)
    lines = [chat(user("a")), chat(user("b")), chat(user("c"))]
    lines += [chat(user("a"), user("d")), chat(user("c"), user("d"))]
    assert [job.session for job in read(write(tmp_path, *lines))] == ["c1", "c2", "c3", "c4", "c3"]


def text_files(folder: Path) -> Sequence[tuple[str, list[str | dict[str, Any]]]]:
    """Return files of right and wrong lines that contain a secret wherever text may occur."""
    said = [user(SECRET * 9), assistant(SECRET), user(SECRET)]
    wrong: list[Any] = [
        {"messages": SECRET},
        {"messages": [{"role": SECRET, "content": {"x": SECRET}}]},
        {"messages": [{"role": "user", "content": SECRET, SECRET: 1}], "timestamp": SECRET},
        {"prompt": [SECRET, SECRET]},
        {"prompt": [SECRET, 1]},
        {"messages": [user("x")], "usage": SECRET},
        '{"messages": [{"content": "' + SECRET,
        '{"messages": [{"role": "user", "content": "' + SECRET + '\\ud800"}]}',
    ]
    tool = {"type": "function", "function": {"name": "f", "description": SECRET}}
    good = {**CHAT, "messages": said, "tools": [tool], "session_id": SECRET, "user": SECRET}
    spans = [
        export(span(1.7e9, input__messages=said, conversation__id=SECRET)),
        export(span(1.7e9, input__messages=SECRET)),
        export(span(1.7e9, input__messages=[SECRET])),
        export(span(1.7e9, usage__input_tokens=SECRET)),
        export(span(1.7e9, prompt=SECRET, tool__definitions=SECRET)),
        '{"resourceSpans": "' + SECRET + '"}',
        '{"resourceSpans": [' + SECRET,
    ]
    return [("chats", [good, *wrong]), ("otel", list(spans))]


@pytest.mark.parametrize("number", [0, 1])
def test_no_text_of_a_trace_is_in_outputs_or_reports(run: Run, tmp_path: Path, number: int) -> None:
    """No text of a trace is left anywhere: the secret appears neither in the output for right or
    wrong files, nor in any report.
    """
    name, lines = text_files(tmp_path)[number]
    path = write(tmp_path, *lines).source
    out = tmp_path / "out"
    out.mkdir()
    reports = ("--json", out / "r.json", "--html", out / "r.html", "--csv", out / "r.csv")
    said = run("replay", path, *FLEET, "--policy", "hybrid", *reports)
    assert said.status == 0, said
    assert f"({name})" in said.out
    assert "line 2" in said.out or "line 3" in said.out
    strict = run("replay", path, *FLEET, "--strict")
    assert strict.status == 2
    for text in (*said, *strict, *(one.read_text() for one in out.iterdir())):
        assert SECRET not in str(text)
        assert SECRET[:8] not in str(text)


def test_the_error_for_an_invalid_tokenizer_names_it(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, chat(user("hello"), usage={"prompt_tokens": 16})).source
    model = tmp_path / "a model"
    model.mkdir()
    refused = run("replay", path, *FLEET, "--tokenizer", model)
    assert refused.status == 2
    assert f"tokenizer {model}: cannot be read: " in refused.err
    assert "expected a model's folder with tokenizer.json" in refused.err
    write_model(model)
    said = run("replay", path, *FLEET, "--policy", "hybrid", "--tokenizer", model)
    assert said.status == 0, said
    assert "the tokenizer counts the tokens; the file's own counts are" in said.out
    mooncake = trace(tmp_path)
    assert "unknown key 'tokenizer'" in run("replay", mooncake, *FLEET, "--tokenizer", model).err


def test_the_error_for_a_refusing_template_contains_no_prompt_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "{{ raise_exception(messages[0].content) }}")
    spec = with_(write(tmp_path, chat(user(SECRET))), format=f"chats?tokenizer={folder}")
    with pytest.raises(TraceError, match="line 1: messages: the tokenizer's chat template") as said:
        read(spec)
    assert SECRET not in str(said.value)


def test_spans_without_prompts_share_prefixes_within_a_conversation(tmp_path: Path) -> None:
    def turn(at_s: float, tokens: int, name: str, **more: Any) -> dict[str, Any]:
        sizes = {"usage__input_tokens": tokens, "usage__output_tokens": 20}
        return span(at_s, conversation__id=name, **sizes, **more)

    tool = span(100, operation__name="execute_tool", usage__input_tokens=9)
    agent = span(100, operation__name="invoke_agent", usage__input_tokens=999)
    spec = write(
        tmp_path,
        export(turn(101, 160, "a"), tool, turn(100, 64, "a"), turn(103, 48, "a")),
        export(turn(100.5, 160, "b"), agent, span(104, usage__input_tokens=64)),
        {"resourceSpans": []},
    )
    jobs = read(spec)
    assert [job.at_ns / S for job in jobs] == [0, 0.5, 1, 3, 4]
    assert [job.output_tokens for job in jobs] == [20, 20, 20, 20, 256]
    said = "\n".join(notes(spec))
    assert "2 spans are no calls to a model and left out" in said
    assert "5 of 5 spans have no prompt: what they share is not known" in said
    later = turn(102, 300, "b")
    b, more = (job for job in read(write(tmp_path, export(turn(100, 160, "b")), export(later)))
               if job.session is not None)  # fmt: skip
    assert shared(b, more) == 10
    assert more.session == b.session


@pytest.mark.parametrize(
    "told",
    [
        {"input__messages": [user("x" * 400)]},
        {"input__messages": json.dumps([user("x" * 400)])},
        {"input__messages": [{"role": "user", "parts": [{"type": "text", "content": "x" * 400}]}]},
        {"prompt": json.dumps([user("x" * 400)])},
        {"prompt__0__role": "user", "prompt__0__content": "x" * 400},
    ],
)
def test_prompts_of_spans_are_named_like_those_of_chats(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    (plain,) = read(write(tmp_path, chat(user("x" * 400))))
    (job,) = read(write(tmp_path, export(span(1.7e9, **told))))
    assert ids(job)[:6] == ids(plain)[:6]
    assert job.prompt_tokens == 102
    kept = span(1.7e9)
    kept["events"] = [{"name": "gen_ai.client.inference.operation.details",
                       "attributes": span(0, **told)["attributes"]}]  # fmt: skip
    (same,) = read(write(tmp_path, export(kept)))
    assert ids(same) == ids(job)


def test_spans_written_by_the_opentelemetry_sdk_are_read(tmp_path: Path) -> None:
    """Spans that OpenTelemetry's own SDK and encoder write in OTLP's JSON form are read."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.common")
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("app")
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.conversation.id": "c",
        "gen_ai.usage.input_tokens": 640,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    for tokens in (640, 700):
        with (
            tracer.start_as_current_span("invoke_agent"),
            tracer.start_as_current_span(
                "chat m", attributes=told | {"gen_ai.usage.input_tokens": tokens}
            ),
        ):
            pass
    provider.shutdown()
    line = MessageToJson(encode_spans(kept.get_finished_spans()), indent=None)
    one, two = read(write(tmp_path, line))
    assert [(job.prompt_tokens, job.output_tokens) for job in (one, two)] == [(640, 20), (700, 20)]
    assert shared(one, two) == 40
    assert one.session == two.session


def test_a_line_with_many_wrong_spans_counts_as_one_wrong_line(tmp_path: Path) -> None:
    bad = [span(1.7e9, usage__input_tokens="x")] * 30
    stream = open_jobs(write(tmp_path, export(*bad, span(1.7e9, usage__input_tokens=5))))
    assert len(list(stream.jobs)) == 1
    assert stream.errors.total == 1


def test_an_access_log_is_read_with_notes_on_missing_information(tmp_path: Path) -> None:
    refused = {**ACCESS, "prompt_tokens": None, "status": 400}
    unknown = {**ACCESS, "at": 1_699_999_999.25, "output_tokens": None}
    spec = write(tmp_path, ACCESS, refused, unknown, {**ACCESS, "model": "n"})
    jobs = read(spec)
    assert [(job.at_ns, job.prompt_tokens, job.output_tokens) for job in jobs] == [
        (0, 330, 20), (S, 330, 20), (S, 330, 20),
    ]  # fmt: skip
    assert [job.cached_tokens for job in jobs] == [33, 33, 33]
    assert not any(len(job.ids) for job in jobs)
    said = "\n".join(notes(spec))
    assert "an access log has no prefixes" in said
    assert "workers reported 10.0% of their prompt tokens cached" in said
    assert "1 lines without prompt_tokens or model are left out" in said
    assert len(read(spec, format="auto?model=n")) == 1
