"""Collectors of metrics: each reads the counts of one part of the router at a Prometheus scrape.

Owns: the families of the core, of workers, tenants, replicas, ports and logs.
Gives: `core.router_metrics`, and a function `..._metrics` for each part.
Never imports: router.assembly, router.cli.
Start reading at: `core.py`.
"""
