"""Collectors: each reads the counts of one part of a router when Prometheus scrapes.

Owns: the families of the core, of workers, tenants, replicas, ports and logs.
Gives: `core.router_metrics`, and a function `..._metrics` for each part.
Never imports: router.assembly, router.cli.
Start reading at: `core.py`.
"""
