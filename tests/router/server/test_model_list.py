"""Tests of the list of models and of the first requests that clients of Anthropic's API send."""

from __future__ import annotations

import json

import aiohttp
import pytest

from router.http.errors import ClientError
from router.http.messages import Answer, Request, Response
from router.server.model_list import anthropic_page
from tests.router.server_support import serving

CARDS = [{"id": name, "object": "model"} for name in ("a", "b", "claude-c", "d")]


def ids(page: dict) -> list[str]:
    return [card["id"] for card in page["data"]]


@pytest.mark.parametrize(
    ("query", "shown", "more"),
    [
        ({}, ["a", "b", "claude-c", "d"], False),
        ({"limit": "1000"}, ["a", "b", "claude-c", "d"], False),
        ({"limit": "2"}, ["a", "b"], True),
        ({"limit": "2", "after_id": "b"}, ["claude-c", "d"], False),
        ({"limit": "1", "after_id": "b"}, ["claude-c"], True),
        ({"limit": "1", "before_id": "claude-c"}, ["b"], True),
        ({"limit": "9", "before_id": "claude-c"}, ["a", "b"], False),
        ({"after_id": "d"}, [], False),
    ],
)
def test_a_page_has_the_requested_models(query, shown, more) -> None:
    page = anthropic_page(CARDS, query)
    assert ids(page) == shown
    assert page["has_more"] is more
    assert page["first_id"] == (shown[0] if shown else None)
    assert page["last_id"] == (shown[-1] if shown else None)


def test_consecutive_pages_have_each_model_once() -> None:
    seen: list[str] = []
    query = {"limit": "3"}
    while True:
        page = anthropic_page(CARDS, query)
        seen += ids(page)
        if not page["has_more"]:
            break
        query["after_id"] = page["last_id"]
    assert seen == ["a", "b", "claude-c", "d"]


def test_a_page_has_20_models_by_default() -> None:
    page = anthropic_page([{"id": str(i)} for i in range(30)], {})
    assert len(page["data"]) == 20
    assert page["has_more"]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "1001"},
        {"limit": "-1"},
        {"limit": "²"},
        {"limit": "9" * 5_000},
        {"limit": ""},
        {"after_id": "nobody"},
        {"before_id": "nobody" * 1_000},
        {"after_id": "a", "before_id": "b"},
    ],
)
def test_invalid_page_queries_get_400_with_a_short_error(query) -> None:
    with pytest.raises(ClientError) as refused:
        anthropic_page(CARDS, query)
    assert refused.value.status == 400
    assert len(refused.value.body()) < 600


async def handle(request: Request) -> Answer:
    return Response(200, b"!")


@pytest.mark.parametrize("path", ["/v1/models?limit=1000", "/v1/models/tiny"])
async def test_the_model_list_has_the_form_of_the_clients_api(path: str) -> None:
    async with serving(handle) as it, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{it.port}{path}"
        async with http.get(url) as answer:
            plain = await answer.json()
        async with http.get(url, headers={"anthropic-version": "2023-06-01"}) as answer:
            theirs = await answer.json()
    for one in (plain, theirs):
        assert ("limit" in path) == (one.get("object") == "list")
    assert "has_more" not in plain
    card = theirs["data"][0] if "limit" in path else theirs
    assert card == {
        "id": "tiny",
        "object": "model",
        "type": "model",
        "display_name": "tiny",
        "created_at": "1970-01-01T00:00:00Z",
    }


async def test_the_first_requests_of_claude_code_are_answered() -> None:
    async with serving(handle) as it, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{it.port}"
        async with http.head(f"{url}/api/hello") as hello:
            assert hello.status == 200
        async with http.get(f"{url}/api/hello") as hello:
            assert json.loads(await hello.read())["status"] == "ok"
        async with http.head(f"{url}/") as root:
            assert root.status == 200
        async with http.get(f"{url}/") as root:
            assert root.status == 404
        async with http.post(f"{url}/api/hello") as hello:
            assert hello.status == 405
