"""Serves the page at `/ui` as one self-contained answer, the state that the page shows, and the
page of links at `/`. The page's Content Security Policy (Level 3, W3C) allows only its own style
sheet and script, named by their SHA-256. So text that workers or clients choose, such as a model's
name, can never run as a script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from router.admin.ui.state import UiState
from router.http.errors import ClientError
from router.http.messages import Request, Response

_SCRIPTS = (
    "values",
    "sparks",
    "cells",
    "fleet",
    "detail",
    "trunks",
    "decisions",
    "problems",
    "doctor",
    "app",
)
_STYLES = ("look", "parts")
_FOLDER = Path(__file__).parent
_HTML = "text/html; charset=utf-8"
_GUARDS = {
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page() -> tuple[bytes, dict[str, str]]:
    """Return the HTML page at `/ui` (UTF-8) and its headers. Raises OSError if one of its files is
    missing.
    """
    style = "\n".join(_text(f"{name}.css") for name in _STYLES)
    script = "\n".join(_text(f"{name}.js") for name in _SCRIPTS)
    script = '"use strict";\n{\n' + script + "}\n"  # a block, so that no name collides
    if "</script" in script or "</style" in style:
        raise ValueError("the page's script or style ends its own element")
    shown = _text("page.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    return shown.encode(), {
        "Content-Type": _HTML,
        "Content-Security-Policy": _policy(style, script),
        **_GUARDS,
    }


def links_page(routes: Mapping[str, Iterable[str]]) -> Response:
    """Return the page at `/` for people: a link to `/ui`, and all paths of the port with their
    methods.
    """
    style = _text("look.css")
    rows = []
    for path in sorted(routes):
        shown = f"<code>{escape(path)}</code>"
        if "GET" in routes[path] and "{" not in path:
            shown = f'<a href="{escape(path[1:] or ".")}">{shown}</a>'
        rows.append(f"<li>{', '.join(sorted(routes[path]))} {shown}</li>")
    body = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>warmroute: admin port</title>'
        f"<style>{style}</style></head><body>"
        '<header class="top"><h1>warmroute</h1><p id="summary">the admin port of a router</p>'
        '</header><main><section class="panel"><ul>'
        '<li><a href="ui">What is wrong, workers and decisions</a>: the page for people</li>'
        '<li><a href="metrics">Metrics</a>, for Prometheus</li></ul></section>'
        '<section class="panel"><h2>All paths</h2>'
        f'<p class="said">docs/reference/admin.md says what each does.</p><ul>{"".join(rows)}</ul>'
        "</section></main></body></html>"
    )
    headers = {"Content-Security-Policy": _policy(style, ""), **_GUARDS}
    return Response(200, body.encode(), headers, _HTML)


def _policy(style: str, script: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


LINKS = "/"
PAGE = "/ui"  # needs no key: the page has no data, and a browser cannot send a key yet
STATE = "/ui/state"
_HEADERS = {"Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin"}


class UiPages:
    """Handles requests for the page at `/ui` and for the state that the page shows. Lifetime:
    process.
    """

    def __init__(self, state: UiState) -> None:
        self._state = state
        self._body, self._headers = page()
        self._type = self._headers.pop("Content-Type")

    async def show(self, request: Request) -> Response:
        """Return the page at `/ui`."""
        return Response(200, self._body, dict(self._headers), self._type)

    async def state(self, request: Request) -> Response:
        """Return the state that the page shows, or only what is new since the last answer. The page
        repeats in the query `?boot=B&since=N&names=V` what the last answer contained. Status 204
        means that nothing is new.
        """
        since, version = _number(request, "since"), _number(request, "names")
        told = self._state.news_json(request.query.get("boot", ""), since, version)
        if told is None:
            return Response(204, headers=dict(_HEADERS))
        return Response(200, told, dict(_HEADERS))


def _number(request: Request, name: str) -> int:
    """Return the number in the query parameter `name`. Raises ClientError (400) if it is not a
    number.
    """
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise ClientError(400, f"`{name}` must be a whole number of at most 15 digits", name)
    return int(text)
