"""Finds out why a pool of engines does not batch, or why its caches are not hit, and what to
change.

Owns: readings of engines' configuration, statistics and gauges; what several readings show
together; the 39 causes; their order; a bounded probe load; the report. Why a router's cache hits
are low is a package of its own, `routing/`, which nothing here imports.
Gives: `examine` (`router/doctor/examine.py`), which is `warmroute doctor` as a library call.
Never imports: router.core, router.server, router.admin.
Start reading at: `judge.py`, whose table names all causes; `evidence.py` has the evidence on which
they rest.
"""
