"""Parts of the configuration follow it, and are not made anew while it stays."""

from __future__ import annotations

import msgspec

from router.config.schema import Config
from router.config.terms import Standing, attempt_terms, inference_terms


def test_a_part_is_kept_as_long_as_its_configuration() -> None:
    now = [Config()]
    terms = Standing(inference_terms, lambda: now[0])
    first = terms()
    assert first == inference_terms(Config())
    assert terms() is first
    now[0] = msgspec.structs.replace(Config(), session_header="x-other")
    assert terms().session_header == "x-other"
    now[0] = Config()
    assert terms() == first


def test_parts_are_each_their_own() -> None:
    config = Config()
    one, other = Standing(attempt_terms, lambda: config), Standing(inference_terms, lambda: config)
    assert (one(), other()) == (attempt_terms(config), inference_terms(config))
