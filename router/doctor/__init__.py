"""Finds out why a pool of engines does not batch, or its caches are not hit, and what to change.

Owns: readings of engines' configuration, statistics and gauges; what two of them tell; the 39
  causes; the order of judgement; a bounded probe load; the report. Why a router's cache hits are
  low is a room of its own, `routing/`, which nothing here imports.
Gives: `examine` (`router/doctor/examine.py`), which is `warmroute doctor` as a library call.
Never imports: router.core, router.server, router.admin.
Start reading at: `judge.py`, whose table names all causes; `evidence.py` says what they argue from.
"""
