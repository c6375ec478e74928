"""Several workers on one device: each its own process, its own port, its own share of the memory.

Owns: what every instance may take, their ports, their lives: started, restarted, ended together.
Gives: `supervisor.supervise`, `shares.share_out`. This face imports nothing.
Never imports: torch, the server, the router, aiohttp.
Start reading at: `supervisor.py`.
"""
