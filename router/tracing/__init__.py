"""The trace of a request: what it waited for and why it went where it went, as OpenTelemetry spans.

Owns: W3C trace context, what is sampled, a traced request's moments, its spans, their export.
Gives: `trace.Tracer`, `trace.Trace`, `export.exporter`.
Never imports: aiohttp; OpenTelemetry only where `export.exporter` is asked for it.
Start reading at: `trace.py`.
"""
