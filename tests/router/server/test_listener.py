"""Tests of the limit on connections: it also obeys the number of files that the process
may open.
"""

from __future__ import annotations

import logging

from router.server.listener import connections_for


def test_the_connection_limit_leaves_two_files_per_connection(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert connections_for(100, files=1_024) == 100
    assert not caplog.records
    most = connections_for(16_384, files=4_096)
    assert 2 * most < 4_096
    assert "less than server.connections" in caplog.text


def test_at_least_64_connections_are_allowed_with_few_files() -> None:
    assert connections_for(16_384, files=256) == 64
