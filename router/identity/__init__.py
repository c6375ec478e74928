"""Reads from a request which agent of whom sends it, by what agents' clients say of themselves.

Owns: the headers and body fields of each known client, and in which order they count; hints of
priority and length in the forms of other routers.
Gives: `identity.IdentityReader`, `families.Family`, `settings.IdentitySettings`.
Never imports: sockets, the decision core, anything that keeps state.
Start reading at: `identity.py`.
"""
