"""Tests of the bodies for prefill and decode workers that get a request at once, byte by byte:
SGLang's rooms and Mooncake's transfers.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body.legs import ROOM_BITS, BootstrapAddress, TransferAttempt
from router.engines.adapter import UnrecognizedError
from router.engines.table import TRANSFERS
from router.http.reply import RANK_HEADER
from tests.router.engines.engine_pages import MODELS, engine, recognized
from tests.router.property_support import patient

ROOMS, MOONCAKE = TRANSFERS["sglang"], TRANSFERS["mooncake"]
DOOR = BootstrapAddress("10.0.0.1", 8998)
TRY = TransferAttempt(4503599627370497, "/v1/completions", True, DOOR)
MEET = b'"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":%d,'

# Fields as clients write them, each to the byte.
MESSAGES = '[{"role":"user","content":"caf\\u00e9 \\"x\\" {\\"max_tokens\\": 9}"}]'
TOOLS = '[{"type":"function","function":{"name":"f","parameters":{"stream":true}}}]'
FIELDS = {
    "model": ['"tiny"', '"org/model-8B"'],
    "prompt": ['"a b c"', '"\\u0000 tab\\t 💡"', "[1, 2,3]"],
    "messages": [MESSAGES, '[ {"role" : "system" , "content" : [ ] } ]'],
    "max_tokens": ["16", "1e3", " 7", "null"],
    "max_completion_tokens": ["64"],
    "min_tokens": ["2"],
    "stream": ["true", "false", "null"],
    "stream_options": ['{"include_usage":true}', "null"],
    "ignore_eos": ["false", "true"],
    "temperature": ["0", "0.70", "-0.0", "1E-2"],
    "tools": [TOOLS],
    "stop": ['["\\n\\n", "</s>"]'],
    "metadata": ['{"bootstrap_room":1,"kv_transfer_params":{}}'],
    "seed": ["9007199254740993"],
}
ONE_TOKEN = {
    "stream": "false",
    "stream_options": "null",
    "min_tokens": "0",
    "max_tokens": "1",
    "max_completion_tokens": "1",
    "ignore_eos": "true",
}
LIMITS = {"max_tokens", "max_completion_tokens"}


def random_body(seed: int) -> tuple[list[tuple[str, str]], str, str]:
    """Return a body whose fields are in a client's own order, with blanks around its colons and
    commas.
    """
    draw = random.Random(seed)
    names = draw.sample(sorted(FIELDS), draw.randint(1, len(FIELDS)))
    colon, comma = draw.choice([(":", ","), (": ", ", "), (" :\n  ", ",\n\t"), (":", " ,\r\n")])
    return [(name, draw.choice(FIELDS[name])) for name in names], colon, comma


def body_text(fields: list[tuple[str, str]], colon: str, comma: str) -> bytes:
    return comma.join(f'"{name}"{colon}{value}' for name, value in fields).encode()


@pytest.mark.parametrize("seed", range(50))
def test_bodies_are_edited_and_all_other_bytes_stay(seed: int) -> None:
    fields, *blanks = random_body(seed)
    inside = body_text(fields, *blanks)
    body, meet = b"{%b}" % inside, MEET % TRY.number
    of = replace(TRY, decode_rank=3)
    assert ROOMS.prefill(body, of).body == b"{%b%b}" % (meet, inside)
    assert ROOMS.decode(body, None, of).body == b'{%b"routed_dp_rank":3,%b}' % (meet, inside)
    bootstrap = replace(DOOR, engine_ids=("e",))
    named = b'"transfer_id":"warmroute-10000000000001"'
    sent = MOONCAKE.prefill(body, replace(TRY, bootstrap=bootstrap)).body
    params = b'{"do_remote_decode":true,"do_remote_prefill":false,%b}' % named
    names = {name for name, _ in fields}
    new = b"" if names & LIMITS else b'"max_tokens":1,'
    new += b'"kv_transfer_params":%b,' % params
    new += b"" if "ignore_eos" in names else b'"ignore_eos":true,'
    edited = [(name, _one_token(name, value)) for name, value in fields]
    assert sent == b"{%b%b}" % (new, body_text(edited, *blanks))
    told = MOONCAKE.decode(body, None, replace(TRY, bootstrap=bootstrap)).body
    params = (
        b'{"do_remote_decode":false,"do_remote_prefill":true,%b,'
        b'"remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"e"}' % named
    )
    assert told == b'{"kv_transfer_params":%b,%b}' % (params, inside)
    for one in (sent, told):
        json.loads(one)


def _one_token(name: str, value: str) -> str:
    """Return a body that asks for one token; a blank before the client's value is kept."""
    blank = value[: len(value) - len(value.lstrip())]
    return blank + ONE_TOKEN[name] if name in ONE_TOKEN else value


@patient
@given(number=st.integers(0, 2**ROOM_BITS - 1), ranks=st.integers(1, 4096), data=st.data())
def test_a_bootstrap_room_encodes_its_rank_and_fits_a_double(
    number: int, ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    of = replace(TRY, number=number, bootstrap=replace(DOOR, ranks=ranks, rank=rank))
    sent, told = (json.loads(leg.body) for leg in (ROOMS.prefill(b"{}", of), decode_leg(of)))
    room = sent["bootstrap_room"]
    assert room % ranks == rank
    assert 0 <= room < 2**53
    assert told["bootstrap_room"] == room


def decode_leg(of: TransferAttempt):
    return ROOMS.decode(b"{}", None, of)


def test_without_a_rank_in_the_room_both_legs_have_rank_fields() -> None:
    of = replace(TRY, bootstrap=replace(DOOR, ranks=4, rank=2, by_room=False), decode_rank=1)
    sent, told = ROOMS.prefill(b'{"a":1}', of), ROOMS.decode(b'{"a":1}', None, of)
    assert json.loads(sent.body)["routed_dp_rank"] == 2
    assert json.loads(sent.body)["bootstrap_room"] == TRY.number
    assert json.loads(told.body)["routed_dp_rank"] == 1
    assert json.loads(told.body)["disagg_prefill_dp_rank"] == 2


def test_both_legs_choose_the_same_of_several_engines_behind_a_worker() -> None:
    bootstrap = replace(DOOR, ranks=3, engine_ids=("e0", "e1", "e2"))
    for number in range(6):
        of = replace(TRY, number=number, bootstrap=bootstrap)
        ((name, rank),) = MOONCAKE.prefill(b"{}", of).headers
        told = json.loads(MOONCAKE.decode(b"{}", None, of).body)["kv_transfer_params"]
        assert (name, told["remote_engine_id"]) == (RANK_HEADER, f"e{int(rank)}")
    of = replace(TRY, bootstrap=replace(bootstrap, rank=2))
    assert MOONCAKE.prefill(b"{}", of).headers == (), "its worker's rank is named anyhow"


INFO = {
    "page_size": 64,
    "max_total_num_tokens": 400_000,
    "dp_size": 2,
    "version": "0.5.23",
    "kv_cache_dtype": "fp8_e5m2",
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 9001,
}
PAGES = {"/v1/models": MODELS, "/server_info": INFO}


async def test_an_sglang_worker_reports_its_role_and_bootstrap_address() -> None:
    one = await recognized(PAGES, ",rank=1")
    facts = one.facts
    assert (facts.role, facts.serves_alone, facts.concurrent) == ("prefill", False, True)
    assert one.bootstrap == BootstrapAddress("127.0.0.1", 9001, ranks=2, rank=1)
    assert facts.group == "sglang 0.5.23 mooncake page 64 fp8_e5m2"
    one = await recognized(PAGES, ",rank=0,bootstrap_port=9002,group=mine")
    assert one.bootstrap is not None
    assert (one.bootstrap.port, one.facts.group) == (9002, "mine@0.5.23")


@pytest.mark.parametrize(("radix", "keeps"), [(None, False), (False, False), (True, True)])
async def test_a_decode_worker_keeps_no_prefixes_unless_its_radix_cache_is_on(
    radix: object, keeps: bool
) -> None:
    info = INFO | {"disaggregation_mode": "decode"}
    info |= {} if radix is None else {"disaggregation_decode_enable_radix_cache": radix}
    one = await recognized(PAGES | {"/server_info": info}, ",rank=0")
    assert (one.facts.role, one.facts.keeps_prefixes) == ("decode", keeps)


async def test_an_sglang_worker_without_a_mode_does_prefill_and_decode() -> None:
    info = INFO | {"disaggregation_mode": "null"}
    facts = (await recognized(PAGES | {"/server_info": info}, ",rank=0")).facts
    assert (facts.role, facts.serves_alone, facts.group) == ("both", True, None)


async def test_a_role_that_contradicts_the_engines_mode_is_refused() -> None:
    with pytest.raises(UnrecognizedError, match=r"role=decode .* --disaggregation-mode prefill"):
        await recognized(PAGES, ",rank=0,role=decode")


@pytest.mark.parametrize(
    ("pages", "names"),
    [
        ({"/query": {"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}}, ("a", "b")),
        ({"/query": {"1": {"engine_id": "b"}}}, None),
        ({"/query": {"0": {"engine_id": ""}}}, None),
        ({"/query": [1]}, None),
        ({"/query": {}}, None),
        ({}, None),
    ],
    ids=str,
)
async def test_engine_ids_are_queried_from_mooncakes_bootstrap_server(pages, names) -> None:
    vllm = {"/v1/models": MODELS, "/version": {"version": "0.33.0"}}
    async with engine(pages) as met:
        port = met.rpartition(":")[2]
        spec = f",kind=vllm,events=none,transfer=mooncake,bootstrap_port={port},role=prefill"
        if names is None:
            with pytest.raises(UnrecognizedError, match="/query"):
                await recognized(vllm, spec)
            return
        one = await recognized(vllm, spec)
    assert one.bootstrap == BootstrapAddress("127.0.0.1", int(port), ranks=2, engine_ids=names)
    assert (one.facts.group, one.facts.concurrent) == ("vllm 0.33.0 mooncake", True)
    assert one.facts.serves_alone
