"""Finds out which agent of which person sends a request, by the ids that agents' clients send.

Owns: the headers and body fields of each known client, and in which order they count; hints of
priority and length in the forms of other routers.
Gives: `identity.IdentityReader`, `families.Family`, `settings.IdentitySettings`.
Never imports: sockets, the decision core, anything that keeps state.
Start reading at: `identity.py`.
"""
