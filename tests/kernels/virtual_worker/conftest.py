"""Fixtures for tests of the virtual workers, in Python and native."""

from __future__ import annotations

from typing import cast

import pytest

import kvkernels
from tests.kernels.virtual_worker.virtual_pair import Twin
from tests.oracles.virtual_worker import VirtualWorker


@pytest.fixture(params=["plain", "native"])
def make(request: pytest.FixtureRequest) -> type[Twin]:
    """Return the class of a virtual worker, first the plain one and then the native one."""
    if request.param == "plain":
        return VirtualWorker
    return cast(type[Twin], kvkernels.VirtualWorker)
