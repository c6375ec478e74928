"""The short way from a body to its chains, for bodies that are plain; `scan.py` reads any.

Natively, in one pass, without an object for each message: what is read here is what `scan.py` and
`prompts.py` would have read. Whatever they would refuse, and what is rare, is left to them.
"""

from __future__ import annotations

from kvkernels import PromptText, scan_request
from policies.record import record
from router.http.scan import ScanLimits


@record
class Plain:
    """One request's body, as `Scanned`, but for the prompts. Lifetime: request."""

    text: PromptText
    model: str | None
    stream: bool
    session: str | None
    cache_salt: str | None
    priority: int
    max_output_tokens: int | None
    tokens: int  # of all prompts
    longest_tokens: int
    has_ids: bool  # token ids, else text: four bytes count as one token


def plain_scan(body: bytes, path: str, limits: ScanLimits) -> Plain | None:
    """The request of `body`, sent to `path`; None where `scan` must read it. Pure."""
    found = scan_request(
        body, limits.max_messages, limits.max_prompts, limits.max_choices, limits.max_key_chars
    )
    if found is None:
        return None
    text, fields = found
    model, stream, session, salt, priority, most, prompts, messages, tokens, longest, ids = fields
    if path.endswith("/chat/completions"):
        if not messages:
            return None
    elif not prompts and path.endswith("/completions"):
        return None
    return Plain(text, model, stream, session, salt, priority, most, tokens, longest, ids)
