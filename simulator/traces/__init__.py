"""Where requests come from: readers of trace formats, generators, and the one record they give.

Owns: `Job`, the formats, the generators, the chains that engines and routers see.
Gives: `open_jobs` for any source, as a stream in order of arrival.
Never imports: the replay, the live load generator, anything that runs a request.
Start reading at: `open.py`.
"""
