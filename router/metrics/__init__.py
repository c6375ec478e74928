"""What the router tells Prometheus.

Owns: every metric's name, text and labels.
Gives: `registry.RouterMetrics`; `requests.RequestMetrics` to whoever serves requests.
Never imports: the dispatcher, the command line.
Start reading at: `registry.py`.
"""
