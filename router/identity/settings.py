"""Defines the keys of the configuration section `identity`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class IdentitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings by which the router finds out which agent and which person sent a request.
    Lifetime: until the next reload.
    """

    clients: Annotated[
        bool,
        Meta(
            description=(
                "whether the router reads the session ids of known agents and other routers; "
                "false: only `session_header`, `identity.families` and the body's `session_id`, "
                "`prompt_cache_key` and `user`"
            )
        ),
    ] = True
    families: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "headers from which the router reads the ids of further clients: "
                "NAME:session=HEADER,group=HEADER,parent=HEADER,final=HEADER"
            )
        ),
    ] = ()
