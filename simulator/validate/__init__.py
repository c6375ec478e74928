"""How true the replay is: the same requests live and simulated, and what differs.

Owns: the comparison of one live run with one replay, and the words for it.
Gives: `compare`, `validate`.
Never imports: shells of the router or the engine.
Start reading at: `compare.py`.
"""
