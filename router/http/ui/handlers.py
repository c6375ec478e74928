"""`/ui` and `/ui/state` on the admin port."""

from __future__ import annotations

from aiohttp import web

from router.http.errors import ClientError
from router.http.ui.page import page
from router.http.ui.state import UiState

PAGE = "/ui"  # without a key: there is no data in it, and a browser has none to send yet
STATE = "/ui/state"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class UiPages:
    """Lifetime: process."""

    def __init__(self, state: UiState) -> None:
        self._state = state
        self._body, self._headers = page()

    def add_to(self, app: web.Application) -> None:
        """Serve both paths."""
        app.router.add_get(PAGE, self.show)
        app.router.add_get(STATE, self.state)

    async def show(self, request: web.Request) -> web.StreamResponse:
        """The page."""
        return web.Response(body=self._body, headers=self._headers)

    async def state(self, request: web.Request) -> web.StreamResponse:
        """All there is to show; with `?boot=B&since=N&names=V`, as it was told last, what is new.

        204: nothing is.
        """
        since, version = _number(request, "since"), _number(request, "names")
        told = self._state.told(request.query.get("boot", ""), since, version)
        if told is None:
            return web.Response(status=204, headers=_HEADERS)
        return web.Response(body=told, content_type="application/json", headers=_HEADERS)


def _number(request: web.Request, name: str) -> int:
    """Raises ClientError (400)."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise ClientError(400, f"`{name}` must be a whole number of at most 15 digits", name)
    return int(text)
