"""Finds out why cache hits behind a router are zero or low, and the one flag that would change it.

Owns: the facts reported by a running router and its engines; the causes, each a pure function from
these facts to a finding; their order; the report.
Gives: `examine_routing` (`router/doctor/routing/examine.py`): `warmroute doctor --routing URL`.
Never imports: router.core, router.server, router.request, router.admin.
Start reading at: `catalogue.py`, whose table names all causes; `facts.py` has the facts on which
they rest.
"""
