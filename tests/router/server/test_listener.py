"""Tests of the limit on connections: it also obeys the number of files that the process
may open.
"""

from __future__ import annotations

import logging

from router.server.listener import connections_for


def test_there_are_files_for_every_connection_and_one_to_its_worker(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert connections_for(100, files=1_024) == 100
    assert not caplog.records
    most = connections_for(16_384, files=4_096)
    assert 2 * most < 4_096
    assert "instead of server.connections" in caplog.text


def test_few_files_are_no_reason_to_serve_nobody() -> None:
    assert connections_for(16_384, files=256) == 64
