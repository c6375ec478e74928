"""Tests that servers which name images differently than the workers get no prompts with images to
render.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from router.core.workers.table import WorkerFacts
from router.engines.render_way import CHATS
from router.fleet.recognize import Recognized
from router.tokens.render_calls import RenderTerms
from router.tokens.renderers import Renderers
from tests.router.engines.engine_pages import engine

RENDERED = {"token_ids": [1, 2], "features": None}


def pages(root: str | None) -> dict[str, Any]:
    """Return the pages of a vLLM render server whose model has the path `root`; None
    means no path.
    """
    card = {"id": "m", "owned_by": "vllm", "root": root}
    return {
        "/v1/models": {"data": [{"id": "a", "parent": "m", "root": "/adapter"}, card]},
        f"{CHATS}/render": 405,
        f"POST {CHATS}/render": RENDERED,
    }


def fleet_of(*paths: str | None) -> Any:
    """Return a fleet with workers of model m, each with its path of the model."""
    facts = WorkerFacts("w", ("m",), 16, 1.0, has_events=True)
    spec = SimpleNamespace(url="http://worker")
    return SimpleNamespace(
        members={
            number: SimpleNamespace(
                recognized=Recognized("vllm", facts, None, model_path=path), ready=True, spec=spec
            )
            for number, path in enumerate(paths)
        }
    )


@pytest.mark.parametrize(
    ("renderer", "workers", "asked"),
    [
        ("org/m", ["org/m", "org/m"], True),
        ("org/m", ["/models/m"], False),
        ("org/m", ["/models/m", "org/m"], True),
        (None, ["/models/m"], True),
        ("org/m", [None], True),
    ],
)
async def test_images_are_rendered_only_if_renderer_and_worker_name_them_the_same(
    renderer: str | None, workers: list[str | None], asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(pages(renderer)) as url, aiohttp.ClientSession() as http:
        terms = RenderTerms((url,), False, 1.0, 1.0, 1.0, 1.0, 8)
        renderers = Renderers(http, fleet_of(*workers), lambda: 0.0, lambda: terms)
        for _ in range(2):
            await renderers.look()
        assert renderers.renders("m", CHATS)
        assert renderers.renders("m", CHATS, media=True) is asked
    told = [line for line in caplog.messages if "start them with one --model" in line]
    assert len(told) == (not asked)
