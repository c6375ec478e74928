"""What the router tells Prometheus.

Owns: every metric's name, text and labels.
Gives: `registry.RouterMetrics`; `plain.PlainCounter` and `plain.PlainHistogram` to whoever counts.
Never imports: the switchboard, the command line.
Start reading at: `registry.py`.
"""
