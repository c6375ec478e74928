"""A configuration, cut into what each part of the router needs of it."""

from __future__ import annotations

from router.config import Config
from router.core.settings import CoreSettings
from router.fleet_io.context import FleetTerms
from router.http.inference import InferenceTerms
from router.http.relay.reply import RelayLimits, Timeouts
from router.http.scan import ScanLimits


def core_settings(config: Config) -> CoreSettings:
    """The core's part of a configuration."""
    limits, timeouts = config.limits, config.timeouts
    return CoreSettings(
        max_workers=limits.workers,
        index_entries=limits.index_entries,
        index_bytes=limits.index_bytes,
        speculative_entries=limits.speculative_entries,
        mirrored_blocks=limits.mirrored_blocks,
        inflight_requests=limits.inflight_requests,
        hold_requests=limits.hold_requests,
        hold_s=limits.hold_s,
        sessions=limits.sessions,
        session_blocks=limits.session_blocks,
        speculative_s=timeouts.speculative_s,
        ejection_failures=config.ejection.failures,
        recover_s=config.ejection.recover_s,
        policy_fallback=config.policy_fallback,
        policy_slow_s=config.policy_slow_ms / 1e3,
        backlog_batches=limits.events_backlog_batches,
    )


def fleet_terms(config: Config) -> FleetTerms:
    """The fleet's part of a configuration."""
    return FleetTerms(
        probe_s=config.timeouts.probe_s,
        load_report_s=config.intervals.load_report_s,
        health_s=config.intervals.health_s,
        backlog_batches=config.limits.events_backlog_batches,
        relay=RelayLimits(header_bytes=config.limits.header_bytes),
    )


def inference_terms(config: Config) -> InferenceTerms:
    """The data plane's part of a configuration."""
    timeouts = config.timeouts
    return InferenceTerms(
        scan=ScanLimits(max_messages=config.limits.messages),
        timeouts=Timeouts(
            connect_s=timeouts.connect_s,
            first_byte_s=timeouts.first_byte_s,
            between_s=timeouts.between_bytes_s,
            client_s=timeouts.between_bytes_s,
        ),
        client_buffer_bytes=config.limits.client_buffer_bytes,
        session_header=config.session_header,
        explain=config.explain,
        explain_every=config.explain_every,
        forward_token_ids=config.forward_token_ids,
    )
