"""Metrics of requests, recorded when events happen, and the registry that Prometheus scrapes.

Owns: counters and histograms of requests; the text of a scrape.
Gives: `registry.RouterMetrics`, `exposition`.
Never imports: router.fleet, router.request.
Start reading at: `registry.py`.
"""
