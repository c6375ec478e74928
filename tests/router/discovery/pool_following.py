"""Helpers for tests of workers that are discovered from an InferencePool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from router.discovery.kubernetes_source import (
    InferencePoolSource,
)
from router.discovery.source import InferencePoolSpec, parse_source
from router.fleet.sources import Report, SourceTrust
from tests.router.discovery.kubernetes_api import KubernetesApi, kubernetes_api
from tests.router.discovery.kubernetes_server import hosts

MINE = {"app": "vllm"}


def spec(text: str = "inferencepool:llm/chat") -> InferencePoolSpec:
    parsed = parse_source(text)
    assert isinstance(parsed, InferencePoolSpec)
    return parsed


def serving_hosts(report: Report) -> list[str]:
    assert report.workers is not None, report.trouble
    return hosts(one.spec.url for one in report.workers if not one.stopping)


class FollowedPool:
    """Reads the reports of a source and keeps the latest. Lifetime: test."""

    def __init__(
        self,
        api: KubernetesApi,
        text: str = "inferencepool:llm/chat",
        objectives: bool = False,
    ) -> None:
        from kubernetes_asyncio.client import ApiClient, Configuration

        async def connect() -> Any:
            return ApiClient(Configuration(host=api.url))

        self.trust = SourceTrust()
        self.reports: list[Report] = []
        self._source = InferencePoolSource(spec(text), connect, lambda: 0.5, objectives)
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for report in self._source.reports():
            self.reports.append(report)
            self.trust.update(report, 0.0)
            self._news.set()

    async def until(self, reached: Callable[[Report], bool], what: str = "") -> Report:
        """Return the latest report, or the first one from now on, for which `reached` is true."""
        async with asyncio.timeout(10.0):
            while not (self.reports and reached(self.reports[-1])):
                self._news.clear()
                waits = asyncio.create_task(self._news.wait())
                await asyncio.wait({waits, self.task}, return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()
                assert not self.task.done(), (what, self.task)
        return self.reports[-1]

    async def until_serving(self, *addresses: str) -> Report:
        """Wait until a report without trouble has exactly these workers; return it."""
        wanted = [one if ":" in one else f"{one}:8000" for one in addresses]
        return await self.until(
            lambda r: (
                r.workers is not None and not r.trouble and serving_hosts(r) == sorted(wanted)
            ),
            f"up: {wanted}",
        )

    def trusted_workers(self) -> list[str]:
        """Return the workers that would get requests if all probes were answered and no grace time
        ended.
        """
        answers = self.trust.workers(1.0, 3600.0, lambda _: True)
        return hosts(one.spec.url for one in answers if not one.stopping)


@asynccontextmanager
async def followed_pool(
    text: str = "inferencepool:llm/chat", objectives: bool = False
) -> AsyncIterator[Any]:
    async with kubernetes_api() as api:
        one = FollowedPool(api, text, objectives)
        try:
            yield api, one
        finally:
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)
