"""Metrics that are recorded as things happen, and the registry that Prometheus scrapes.

Owns: counters and histograms of requests; the text of a scrape.
Gives: `registry.RouterMetrics`, `exposition`.
Never imports: router.fleet, router.request.
Start reading at: `registry.py`.
"""
