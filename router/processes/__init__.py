"""Many processes behind one client port, deciding as one.

Owns: starting and replacing them, what a satellite and the leader tell each other.
Gives: `supervisor.supervise`; `seat.Seat`; `leading.Leading` and `satellite.serve_clients`.
Never imports: policies' formulas, torch.
Start reading at: `supervisor.py`, then `messages.py`.
"""
