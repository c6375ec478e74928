"""`warmroute top`: a live view of the fleet and its decisions, from the admin port alone.

Owns: what is asked, rates between two looks, the frame of text, the keys.
Gives: `command.top_command`.
Never imports: router.core, router.http, policies.
Start reading at: `command.py`, then `frame.py`.
"""
