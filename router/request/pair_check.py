"""Checks that both workers of a request still have the same model revision, before the second leg
is sent.

The prefill leg alone does no harm. Before a leg is sent that depends on the other worker's version,
both engines are asked for theirs. If one reports another version than before, its worker is
recognized again, and the core chooses workers again.
"""

from __future__ import annotations

import asyncio

from router.fleet.member import Member


def group_of(member: Member) -> str | None:
    """Return the name of the group from whose workers a worker takes KV; the name contains their
    revision.
    """
    return None if member.recognized is None else member.recognized.facts.group


async def is_one_revision(prefill: Member, decode: Member, group: str | None) -> bool:
    """Return True if both workers are in `group`, and the versions of their engines did not change.

    Both engines are asked at the same time. A worker that has changed is recognized again before
    this returns, if that does not take long.
    """
    if group_of(prefill) != group or group_of(decode) != group:
        return False
    same = await asyncio.gather(prefill.confirm(), decode.confirm())
    # A worker may have been recognized again while the other one was asked.
    return all(same) and group_of(prefill) == group == group_of(decode)
