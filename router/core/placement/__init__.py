"""Places requests: which workers may take one, what each choice costs, and which requests wait.

Owns: admission, the hold queue, eligibility, ejection of failing workers, the hits of each worker,
the policy's choice under a guard, two legs of one request, retries.
Gives: `chooser`, `admission`, `hold_queue`, `eligible`, `health`, `retries`.
Never imports: asyncio, sockets, clocks, logging, random.
Start reading at: `chooser.py`, then `eligible.py`.
"""
