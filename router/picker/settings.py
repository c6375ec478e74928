"""Defines the configuration keys of the endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass

from router.config.extras import Picker
from router.server.settings import GrpcPortSettings

MESSAGE_BYTES = 1 << 20  # of a message, in addition to a body


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """The endpoint picker's configuration section, with its two ports and its limits. Lifetime:
    until the next reload.
    """

    picker: Picker
    port: GrpcPortSettings
    health_port: GrpcPortSettings  # where `picker.health_port` is given
    body_bytes: int  # of the largest body of a request
    tenant_header: str
    forwards_unknown_paths: bool
