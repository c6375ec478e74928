"""A router takes over from the one before it, without a moment in which nobody listens.

Owns: listening sockets and who has them, what one router leaves to the next, systemd's notices.
Gives: `sockets.listening_at`, `taking.take_over`, `handing.Handing`, `successor`, `notices.notify`.
Never imports: policies, router.core, router.http.
Start reading at: `handing.py`, then `taking.py`.
"""
