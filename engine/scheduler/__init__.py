"""In-flight batching over a paged KV cache: requests in, steps and their outputs out.

Owns: requests, settings, steps, admission, preemption, a request's blocks, why a request waits.
Gives: `Scheduler` in `scheduler.py`, its settings, steps and outputs in `types.py`, `Request` in
`request.py`, `explain` in `explain.py`. This `__init__` imports nothing.
Never imports: clocks, I/O, randomness, the server, the runner.
Start reading at: `scheduler.py`.
"""
