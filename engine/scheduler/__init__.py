"""In-flight batching over a paged KV cache: requests in, steps and their outputs out.

Owns: requests, settings, steps, admission, preemption, a request's blocks, why a request waits.
Gives: `scheduler.Scheduler`, its types, requests and explanations. This face
imports nothing.
Never imports: clocks, I/O, randomness, the server, the runner.
Start reading at: `scheduler.py`.
"""
