"""Makes the address and limits of each port from the configuration."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING

from router.http.parser import RequestLimits
from router.http.tls import Tls
from router.server.settings import GrpcPortSettings, PortSettings
from router.settings.schema import Config

if TYPE_CHECKING:
    from router.picker.settings import PickerSettings


def client_port_settings(config: Config) -> PortSettings:
    """Return the settings of the client port."""
    place = (config.host, config.port, config.reuse_port, config.tls)
    return _port_settings(config, *place)


def admin_port_settings(config: Config) -> PortSettings:
    """Return the settings of the admin port."""
    return _port_settings(config, config.admin_host, config.admin_port, False, config.admin_tls)


def _port_settings(config: Config, host: str, port: int, shared: bool, tls: Tls) -> PortSettings:
    limits, timeouts = config.limits, config.timeouts
    return PortSettings(
        host=host,
        port=port,
        shared=shared,
        tls=tls,
        connections=config.server,
        requests=RequestLimits(config.server.head_bytes, limits.header_bytes, limits.body_bytes),
        trusted=tuple(ip_network(peer) for peer in config.trusted_peers),
        client_s=timeouts.between_bytes_s,
        keep_alive_s=timeouts.keep_alive_s,
        shutdown_s=timeouts.shutdown_s,
    )


def grpc_port_settings(config: Config) -> GrpcPortSettings:
    """Return the settings of KServe's gRPC port."""
    limits, timeouts = config.limits, config.timeouts
    return GrpcPortSettings(
        host=config.host,
        port=config.grpc_port,
        shared=config.reuse_port or config.hot_restart is not None,
        tls=config.tls,
        calls=config.server.connections,
        message_bytes=limits.body_bytes,
        header_bytes=limits.header_bytes,
        handshake_s=config.server.head_s,
        handover_s=timeouts.handover_s,
        shutdown_s=timeouts.shutdown_s,
        flag="--grpc-port",
    )


def picker_settings(config: Config) -> PickerSettings:
    """Return the settings of the endpoint picker and its two ports. The port for health checks has
    no TLS, and closes at once.
    """
    from router.picker.settings import MESSAGE_BYTES, PickerSettings

    picker, grpc = config.picker, grpc_port_settings(config)
    port = replace(
        grpc,
        host=picker.host,
        port=picker.port,
        tls=config.picker_tls,
        message_bytes=config.limits.body_bytes + MESSAGE_BYTES,
        flag="--picker-port",
    )
    health = replace(
        port, port=picker.health_port, tls=Tls(), shutdown_s=0.0, flag="--picker-health-port"
    )
    return PickerSettings(
        picker=picker,
        port=port,
        health_port=health,
        body_bytes=config.limits.body_bytes,
        tenant_header=config.tenant_header,
        forwards_unknown_paths=config.unknown_paths == "forward",
    )
