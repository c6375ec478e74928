"""Where requests come from: readers of trace formats, generators, and the one record they give.

Owns: `Job`, the formats, the generators, the chains that engines and routers see.
Gives: `spec.WorkloadSpec`, and readers whose jobs come in order of arrival
(`simulator.workloads.open` finds them).
Never imports: the replay, the live load generator, anything that runs a request.
Start reading at: `job.py`, then `formats.py`.
"""
