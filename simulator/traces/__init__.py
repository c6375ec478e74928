"""The sources of requests: readers of trace formats and generators, which all give `Job` records.

Owns: `Job`, the formats, the generators, the chains that engines and routers see.
Gives: `spec.WorkloadSpec`, and readers whose jobs come in order of arrival
(`simulator.workloads.open` finds them).
Never imports: the replay, the live load generator, anything that runs a request.
Start reading at: `job.py`, then `formats.py`.
"""
