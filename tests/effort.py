"""How hard property tests try: `make test-all` sets TEST_EFFORT to try that many times harder."""

from __future__ import annotations

import os

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
