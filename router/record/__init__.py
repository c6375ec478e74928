"""Records the requests of a running router, to explain its decisions and to replay them.

Owns: the account of a request; the access log, the request log (one line a request, for replays; in
a file or in `parts`), the explanation of a choice, spans, and the recording of facts (for checks).
Gives: `request_record.RequestRecord`, `request_log.RequestLog`, `explain.explanation`,
`trace.Tracer`, `trace_export.exporter`, `recorder.FactRecorder`; formats: `request_line`, `facts`;
`facts.Player`, which plays a recording to a fresh core and reports where it decides otherwise.
Never imports: aiohttp, zmq; OpenTelemetry only if `trace_export.exporter` needs it.
Start reading at: `request_record.py`, then `request_line.py`.
"""
