"""Records the metrics of requests, and collects all metrics for Prometheus.

Owns: counters and histograms of requests; the text of a scrape.
Gives: `registry.RouterMetrics`, `exposition`.
Never imports: router.fleet, router.request.
Start reading at: `registry.py`.
"""
