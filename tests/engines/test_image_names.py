"""Tests of the rule by which vLLM names images, against names that vLLM 0.32 itself gave."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.engines.image_names import image_names

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({}, "577231d993a115721bd4a066da2ff46e"),
        ({"processor": {"max_pixels": 1024}}, "4d85c357647f9c3b8277f7666018e493"),
        ({"media_io": {"rgba_background_color": [0, 0, 0]}}, "e10a77c850a9d0479fd2762f5f865426"),
    ],
)
def test_image_names_equal_those_of_vllm(settings: dict[str, Any], begins: str) -> None:
    as_it_is, converted = image_names(PIXEL, "org/m", "sha256", **settings)
    assert as_it_is.startswith(begins)
    assert converted != as_it_is
