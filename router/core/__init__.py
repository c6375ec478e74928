"""The decision core: facts in, actions out, no I/O.

Owns: the order in which a fact changes the known state, the charges and the decisions.
Gives: `core.RouterCore`; its packages are floors: contract, workers, sessions, placement.
Never imports: asyncio, sockets, clocks, logging, random; nor any part of the router that does I/O.
Start reading at: `core.py`.
"""
