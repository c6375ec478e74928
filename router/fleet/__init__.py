"""Follows the workers: recognizes their engines, and tracks their health and load.

Owns: recognition of a worker given by URL (by the adapters of `router.engines`), load reports,
health probes, joining and leaving; one worker for each data-parallel rank; how far the router
trusts sources that list workers (a failing source must not empty the pool, a flapping one must not
disturb it).
Gives: `manager.FleetManager`, which keeps the decision core informed; `sources.Discovery`, which
keeps the fleet in line with the configuration and all sources.
Never imports: the HTTP server, policies' formulas, torch.
Start reading at: `manager.py`.
"""
