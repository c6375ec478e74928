"""Tests of one exchange between a proxy and the picker: each message gets its answer, in whatever
order messages come.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.reply import Header
from router.picker import messages
from router.picker.exchange import PIECE_BYTES, Destination, PickerExchange
from router.picker.messages import DESTINATION, Mode
from tests.effort import examples
from tests.router.picker.picker_messages import message, read

LIMIT = 1 << 20
AT = Destination("10.0.0.1:8000")
MODES = [*Mode]
REQUEST_ARMS = ("request_headers", "request_body", "request_trailers")
ARMS = (*REQUEST_ARMS, "response_headers", "response_body", "response_trailers")
CODES = ("misplaced_message", "bad_message", "unknown_body_mode", "body_too_large")


def arms(answers: list[bytes]) -> list[str]:
    return [one.WhichOneof("response") for one in read(answers)]


def set_headers(change: Any) -> dict[str, bytes]:
    return {one.header.key: one.header.raw_value for one in change.set_headers}


def piece_of(answer: Any) -> tuple[bytes, bool]:
    arm = answer.WhichOneof("response")
    streamed = getattr(answer, arm).response.body_mutation.streamed_response
    return streamed.body, streamed.end_of_stream


def started_exchange(
    modes: tuple[int, int] | None = None, end: bool = False, **more: Any
) -> PickerExchange:
    exchange = PickerExchange(LIMIT)
    fields = more if modes is None else {"modes": modes, **more}
    exchange.feed(message("request_headers", end_of_stream=end, **fields))
    return exchange


def refusal(answers: list[bytes]) -> tuple[int, str]:
    """Return status and error code of the only answer, which refuses the request in place of a
    worker's reply.
    """
    (one,) = read(answers)
    response = one.immediate_response
    assert response.status.code >= 400
    code = json.loads(response.body)["error"]["code"]
    assert response.details == f"warmroute_{code}"
    return response.status.code, code


def test_a_duplex_body_is_returned_in_its_pieces_after_the_choice() -> None:
    exchange = started_exchange()
    assert exchange.feed(message("request_body", body=b"ab")) == []
    assert exchange.feed(message("request_body", body=b"cd")) == []
    assert not exchange.needs_decision
    assert exchange.feed(message("request_body", end_of_stream=True)) == []
    assert exchange.needs_decision
    assert exchange.body == b"abcd"
    head, *pieces = read(exchange.place(AT))
    common = head.request_headers.response
    assert set_headers(common.header_mutation) == {DESTINATION: b"10.0.0.1:8000"}
    assert common.clear_route_cache
    named = head.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
    assert named.string_value == "10.0.0.1:8000"
    assert [piece_of(one) for one in pieces] == [(b"ab", False), (b"cd", True)]
    # Envoy has been seen to send the end twice.
    assert exchange.feed(message("request_body", body=b"cd", end_of_stream=True)) == []


def test_an_empty_duplex_body_is_returned_with_its_end() -> None:
    exchange = started_exchange()
    exchange.feed(message("request_body", end_of_stream=True))
    assert [piece_of(one) for one in read(exchange.place(AT))[1:]] == [(b"", True)]


def test_a_changed_body_is_sent_in_pieces_and_ends_with_its_trailers() -> None:
    exchange = started_exchange()
    exchange.feed(message("request_body", body=b"x"))
    exchange.feed(message("request_trailers"))
    changed = b"y" * (PIECE_BYTES + 1)
    _, one, two, trailers = read(exchange.place(Destination("a:1", body=changed)))
    assert (piece_of(one), piece_of(two)) == ((b"y" * PIECE_BYTES, False), (b"y", False))
    assert trailers.WhichOneof("response") == "request_trailers"


def test_the_answer_to_a_buffered_body_contains_the_destination() -> None:
    exchange = started_exchange((Mode.BUFFERED, Mode.NONE))
    assert exchange.feed(message("request_body", body=b"{}", end_of_stream=True)) == []
    sets: tuple[Header, ...] = ((b"x-one", b"1"),)
    (one,) = read(exchange.place(Destination("a:1,b:2", sets, ("x-gone",), b"{...}")))
    common = one.request_body.response
    assert set_headers(common.header_mutation) == {
        DESTINATION: b"a:1,b:2",
        "x-one": b"1",
        "content-length": b"5",
    }
    assert list(common.header_mutation.remove_headers) == ["x-gone"]
    assert common.body_mutation.body == b"{...}"
    unchanged = started_exchange((Mode.BUFFERED, Mode.NONE))
    unchanged.feed(message("request_body", body=b"{}", end_of_stream=True))
    (one,) = read(unchanged.place(AT))
    assert not one.request_body.response.HasField("body_mutation")
    assert "content-length" not in set_headers(one.request_body.response.header_mutation)


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
def test_headers_before_a_buffered_body_are_answered_immediately(mode: Mode) -> None:
    exchange = PickerExchange(LIMIT)
    said = exchange.feed(message("request_headers", modes=(mode, 0)))
    assert arms(said) == ["request_headers"]
    assert not exchange.needs_decision
    cut = mode is Mode.BUFFERED_PARTIAL
    exchange.feed(message("request_body", body=b"{", end_of_stream=not cut))
    assert (exchange.needs_decision, exchange.blind) == (True, cut)
    assert exchange.body == (b"" if cut else b"{")


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED])
def test_a_request_without_its_body_is_placed_by_its_headers(mode: Mode) -> None:
    exchange = started_exchange((mode, 0))
    assert exchange.needs_decision
    assert exchange.blind
    if mode is Mode.STREAMED:
        assert exchange.feed(message("request_body", body=b"early")) == []
        assert arms(exchange.place(AT)) == ["request_headers", "request_body"]
        assert arms(exchange.feed(message("request_body", end_of_stream=True))) == ["request_body"]
    else:
        assert arms(exchange.place(AT)) == ["request_headers"]


def test_a_response_passes_unchanged_and_its_facts_are_read() -> None:
    exchange = started_exchange(end=True)
    exchange.place(Destination("10.0.0.2:1,10.0.0.3:1"))
    exchange.response_sets = ((b"x-warmroute-worker", b"3"),)
    told = {"upstream.address": "10.0.0.2:1", "response.code_details": "via_upstream"}
    came = message(
        "response_headers",
        pairs=[("content-type", "text/event-stream; charset=utf-8")],
        attributes=told | {"upstream.request_attempt_count": "2"},
    )
    (head,) = read(exchange.feed(came))
    change = head.response_headers.response.header_mutation
    assert set_headers(change) == {"x-warmroute-worker": b"3"}
    reply = exchange.reply
    assert reply is not None
    assert (reply.served, reply.attempts, reply.by_worker) == ("10.0.0.2:1", 2, True)
    assert (reply.head.status, reply.head.event_stream) == (200, True)
    (one,) = read(exchange.feed(message("response_body", body=b"data")))
    assert piece_of(one) == (b"data", False)
    assert exchange.taken() == [b"data"]
    assert not exchange.over
    (one,) = read(exchange.feed(message("response_body", end_of_stream=True)))
    assert piece_of(one) == (b"", True)
    assert (exchange.over, exchange.taken()) == (True, [])
    assert exchange.refuse(500, (), b"", "late") == []


@pytest.mark.parametrize(
    ("length", "came", "over"),
    [("4", b"data", True), ("5", b"data", False), ("0", b"", True), ("x", b"", False),
     ("9" * 30, b"data", False)],
)  # fmt: skip
def test_an_early_end_is_complete_if_the_whole_content_length_came(
    length: str, came: bytes, over: bool
) -> None:
    exchange = started_exchange(end=True)
    exchange.place(AT)
    exchange.feed(message("response_headers", pairs=[("content-length", length)]))
    exchange.feed(message("response_body", body=came))
    assert not exchange.over
    exchange.closed()
    assert exchange.over == over


def test_the_response_of_another_worker_omits_the_chosen_worker() -> None:
    exchange = started_exchange(end=True)
    exchange.place(AT)
    exchange.response_sets = ((b"x-warmroute-worker", b"3"), (b"x-request-id", b"7"))
    told = {"upstream.address": "10.0.0.2:1"}
    (head,) = read(exchange.feed(message("response_headers", attributes=told)))
    change = head.response_headers.response.header_mutation
    assert set_headers(change) == {"x-request-id": b"7"}


@pytest.mark.parametrize(
    ("attributes", "by_worker"),
    [
        ({}, True),
        ({"upstream.address": ""}, False),
        ({"upstream.address": "10.0.0.2:1"}, True),
        ({"response.code_details": "no_healthy_upstream", "upstream.address": ""}, False),
        ({"response.code_details": "via_upstream"}, True),
    ],
)
def test_the_response_is_attributed_to_the_worker_or_to_the_proxy(
    attributes: dict[str, str], by_worker: bool
) -> None:
    exchange = started_exchange(end=True)
    exchange.place(AT)
    exchange.feed(message("response_headers", status="503", attributes=attributes))
    assert exchange.reply is not None
    assert exchange.reply.by_worker is by_worker


def test_the_served_endpoint_in_gateway_metadata_is_used() -> None:
    exchange = started_exchange(end=True)
    exchange.place(AT)
    served = ("envoy.lb", messages.SERVED, "10.0.0.9:80")
    exchange.feed(message("response_headers", metadata=[served]))
    assert exchange.reply is not None
    assert exchange.reply.served == "10.0.0.9:80"


@pytest.mark.parametrize(
    ("texts", "hint"),
    [
        (["10.0.0.1:80", "10.0.0.2"], ["10.0.0.1:80", "10.0.0.2"]),
        ("10.0.0.1:80, 10.0.0.2:80", ["10.0.0.1:80", "10.0.0.2:80"]),
        ([], []),
        ("", []),
    ],
)
def test_the_subset_hint_of_endpoints_is_read(texts: Any, hint: list[str]) -> None:
    given = ("envoy.lb.subset_hint", messages.SUBSET, texts)
    assert started_exchange(end=True, metadata=[given]).subset == hint
    assert started_exchange(end=True).subset is None


def test_an_exchange_in_observability_mode_gets_no_answer() -> None:
    exchange = started_exchange(observability_mode=True)
    assert exchange.idle
    for arm in ARMS:
        assert exchange.feed(message(arm)) == []
    assert exchange.refuse(500, (), b"", "any") == []


def test_unknown_body_modes_are_refused_with_the_reason() -> None:
    for modes in ((5, 0), (0, 9), (-1, 0)):
        exchange = PickerExchange(LIMIT)
        said = exchange.feed(message("request_headers", modes=modes))
        assert refusal(said) == (500, "unknown_body_mode")
        assert exchange.feed(message("request_body", body=b"a")) == []


def test_a_body_over_the_limit_is_refused() -> None:
    for modes in (None, (Mode.BUFFERED, 0)):
        exchange = started_exchange(modes)
        said = exchange.feed(message("request_body", body=bytes(LIMIT + 1)))
        assert refusal(said) == (413, "body_too_large")


def test_malformed_messages_are_refused() -> None:
    assert refusal(PickerExchange(LIMIT).feed(b"\xff\xff\xff")) == (500, "bad_message")
    exchange = started_exchange(end=True)
    exchange.place(AT)
    said = exchange.feed(message("response_headers", status="2x0"))
    assert refusal(said) == (500, "bad_message")


def test_an_unknown_field_is_ignored() -> None:
    exchange = PickerExchange(LIMIT)
    assert exchange.feed(b"\xa2\x06\x03abc") == []  # field 100
    exchange.feed(message("request_headers", end_of_stream=True))
    assert exchange.needs_decision


def test_a_response_of_the_proxy_itself_before_the_body_passes() -> None:
    exchange = started_exchange((Mode.BUFFERED, Mode.NONE))
    said = exchange.feed(message("response_headers", status="413", end_of_stream=True))
    assert arms(said) == ["response_headers"]
    assert (exchange.needs_decision, exchange.over) == (False, True)


# --- any data plane that keeps the rules, and any that does not -----------------------------------


@dataclass
class Plan:
    """One request and its reply as Envoy would send them, message by message."""

    modes: tuple[Mode, Mode]
    request: list[bytes]
    trailers: bool
    answer: list[bytes]
    answer_trailers: bool
    split_end: bool  # the end comes in a message of its own
    changed: bytes | None = None
    said: list[Any] = field(default_factory=list)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pieces = st.lists(st.binary(min_size=1, max_size=8), max_size=4)
    modes = draw(st.sampled_from(MODES)), draw(st.sampled_from(MODES))
    request = draw(pieces)
    trailers = bool(request) and draw(st.booleans())
    changed = draw(st.none() | st.binary(max_size=8))
    if not request or modes[0] not in (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED):
        changed = None
    flags = draw(st.booleans()), draw(st.booleans())
    return Plan(modes, request, trailers, draw(pieces), flags[0], flags[1], changed)


class Envoy:
    """Sends the messages of one request and checks each answer as Envoy's filter does."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.exchange = PickerExchange(LIMIT)
        self.upstream = b""
        self.client = b""
        self.named = False

    def send(self, arm: str, **fields: Any) -> list[Any]:
        return read(self.exchange.feed(message(arm, **fields)))

    def run(self) -> None:
        self.request()
        if not self.named:
            raise AssertionError("nobody was named")
        self.answer()
        self.exchange.closed()
        assert self.exchange.over
        assert not self.exchange.refused

    def placed(self) -> list[Any]:
        assert self.exchange.needs_decision
        said = read(self.exchange.place(Destination("a:1", body=self.plan.changed)))
        for one in said:
            for arm in ("request_headers", "request_body"):
                common = getattr(one, arm).response
                self.named = self.named or DESTINATION in set_headers(common.header_mutation)
        return said

    def request(self) -> None:
        plan, mode = self.plan, self.plan.modes[0]
        bodiless = not plan.request
        said = self.send("request_headers", end_of_stream=bodiless, modes=plan.modes)
        if bodiless or mode in (Mode.NONE, Mode.STREAMED):
            assert not said
            said = self.placed()
            assert [one.WhichOneof("response") for one in said] == ["request_headers"]
            if bodiless:
                return
        if mode is Mode.NONE:
            self.upstream = b"".join(plan.request)
        elif mode is Mode.FULL_DUPLEX_STREAMED:
            self.duplex()
        elif mode is Mode.STREAMED:
            for at, piece in enumerate(plan.request):
                end = at == len(plan.request) - 1 and not plan.trailers
                (one,) = self.send("request_body", body=piece, end_of_stream=end)
                assert not one.request_body.response.HasField("body_mutation")
                self.upstream += piece
        else:
            assert [one.WhichOneof("response") for one in said] == ["request_headers"]
            whole = b"".join(plan.request)
            assert not self.send("request_body", body=whole, end_of_stream=not plan.trailers)
            (one,) = self.placed()
            common = one.request_body.response
            changed = common.HasField("body_mutation")
            self.upstream = common.body_mutation.body if changed else whole
            length = set_headers(common.header_mutation).get("content-length")
            assert length == (b"%d" % len(self.upstream) if changed else None)
        if plan.trailers and mode is not Mode.FULL_DUPLEX_STREAMED:
            (one,) = self.send("request_trailers")
            assert one.WhichOneof("response") == "request_trailers"

    def duplex(self) -> None:
        plan = self.plan
        for at, piece in enumerate(plan.request):
            last = at == len(plan.request) - 1 and not plan.trailers and not plan.split_end
            assert not self.send("request_body", body=piece, end_of_stream=last)
        if plan.trailers:
            assert not self.send("request_trailers")
        elif plan.split_end:
            assert not self.send("request_body", end_of_stream=True)
        head, *rest = self.placed()
        assert head.WhichOneof("response") == "request_headers"
        if plan.trailers:
            assert rest.pop().WhichOneof("response") == "request_trailers"
        ends = [piece_of(one)[1] for one in rest]
        assert ends == [False] * (len(rest) - 1) + [not plan.trailers]
        self.upstream = b"".join(piece_of(one)[0] for one in rest)

    def answer(self) -> None:
        plan, mode = self.plan, self.plan.modes[1]
        ends = not plan.answer and not plan.answer_trailers
        (one,) = self.send("response_headers", end_of_stream=ends)
        assert one.WhichOneof("response") == "response_headers"
        pieces = [b"".join(plan.answer)] if mode is Mode.BUFFERED else plan.answer
        pieces = [] if mode is Mode.NONE else [one for one in pieces if one]
        for at, piece in enumerate(pieces):
            last = at == len(pieces) - 1 and not plan.answer_trailers
            (one,) = self.send("response_body", body=piece, end_of_stream=last)
            if mode is Mode.FULL_DUPLEX_STREAMED:
                assert piece_of(one) == (piece, last)
                self.client += piece_of(one)[0]
            else:
                assert not one.response_body.response.HasField("body_mutation")
                self.client += piece
        if mode is not Mode.NONE:
            assert b"".join(self.exchange.taken()) == b"".join(plan.answer)
        if plan.answer_trailers:
            (one,) = self.send("response_trailers")
            assert one.WhichOneof("response") == "response_trailers"


@settings(max_examples=examples(200), deadline=None)
@given(plans())
def test_a_conforming_proxy_gets_every_answer_that_it_waits_for(plan: Plan) -> None:
    envoy = Envoy(plan)
    envoy.run()
    whole = b"".join(plan.request)
    assert envoy.upstream == (whole if plan.changed is None else plan.changed)
    if plan.modes[1] is not Mode.NONE:
        assert envoy.client == b"".join(plan.answer)


STEPS = st.lists(
    st.tuples(st.sampled_from((*ARMS, "place", "refuse", "garbage")), st.booleans()), max_size=12
)


@settings(max_examples=examples(400), deadline=None)
@given(st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6)), STEPS, st.booleans())
def test_messages_in_any_order_are_answered_or_refused_once(
    modes: Any, steps: list[tuple[str, bool]], sound: bool
) -> None:
    exchange = PickerExchange(LIMIT)
    fed = dict.fromkeys(ARMS, 0)
    answered = dict.fromkeys((*ARMS, "immediate_response"), 0)
    steps = [("request_headers", False), *steps] if sound else steps
    for number, (step, end) in enumerate(steps):
        if step == "place":
            said = exchange.place(AT) if exchange.needs_decision else []
        elif step == "refuse":
            said = exchange.refuse(503, (), b"{}", "full") if exchange.needs_decision else []
        elif step == "garbage":
            said = exchange.feed(b"\xff" * 3)
        else:
            fed[step] += 1
            fields: dict[str, Any] = {}
            if not step.endswith("trailers"):
                fields["end_of_stream"] = end
            if not number and modes is not None:
                fields["modes"] = modes
            said = exchange.feed(message(step, **fields))
        for arm in arms(said):
            answered[arm] += 1
            assert answered["immediate_response"] <= 1
            assert arm == "immediate_response" or not answered["immediate_response"]
        # What is said is never more than was asked; all of it, once it can be.
        for arm in ARMS:
            assert answered[arm] <= fed[arm]
    assert bool(answered["immediate_response"]) <= bool(exchange.refused)
    assert not (exchange.needs_decision and exchange.refused)
    if exchange.reply is not None and not exchange.refused:
        assert answered["response_headers"] == 1


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4), plans(), st.integers(0, 400), st.binary())
def test_any_bytes_are_answered_without_an_exception(
    noise: list[bytes], plan: Plan, at: int, inserted: bytes
) -> None:
    exchange = PickerExchange(LIMIT)
    sound = message("request_headers", modes=plan.modes, pairs=[(":path", "/a"), ("b", "c")])
    spoilt = sound[:at] + inserted + sound[at:]
    for data in (spoilt, *noise):
        for one in read(exchange.feed(data)):
            if one.WhichOneof("response") == "immediate_response":
                assert json.loads(one.immediate_response.body)["error"]["code"] in CODES
        if exchange.needs_decision:
            exchange.place(AT)
