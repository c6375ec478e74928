"""Makes, from a configuration, the values that each part of the router needs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from router.body.legs import Trtllm
from router.body.scan import ScanLimits
from router.config.keys import text_of, value_at
from router.core.contract.settings import CoreSettings
from router.engines import trtllm
from router.engines.table import TRANSFERS
from router.events.sources import event_hosts
from router.fleet.context import FleetTerms
from router.http.reply import RelayLimits, Timeouts
from router.identity.families import families_of
from router.identity.identity import IdentityReader
from router.record.request_log import RequestLogTerms
from router.redis.url import shared_secret
from router.request.deadlines import Deadlines
from router.request.leg_sender import AttemptTerms
from router.request.reading import InferenceTerms
from router.settings.schema import Config
from router.tokens.encoders import TokenizerTerms
from router.tokens.probe import ProbeTerms
from router.tokens.render_calls import RenderTerms

if TYPE_CHECKING:
    from router.discovery.opening import DiscoveryTerms
    from router.replicas.settings import ReplicaTerms

log = logging.getLogger(__name__)

_PROGRESS_S = 0.25  # between two reports of an answer's growth; as replays have it
# Two intervals and the wait for others' reports are shorter than the stall time: a running stream
# never seems silent.
_PROGRESS_OF_STALL = 0.4


def core_settings(config: Config) -> CoreSettings:
    """Return the values of a configuration that the decision core needs."""
    limits, timeouts = config.limits, config.timeouts
    return CoreSettings(
        max_workers=limits.workers,
        index_entries=limits.index_entries,
        index_bytes=limits.index_bytes,
        speculative_entries=limits.speculative_entries,
        mirrored_blocks=limits.mirrored_blocks,
        inflight_requests=limits.inflight_requests,
        hold_requests=limits.hold_requests,
        queued_tokens=limits.queued_tokens,
        worker_requests=limits.worker_requests,
        worker_queued_tokens=limits.worker_queued_tokens,
        hold_s=limits.hold_s,
        sessions=limits.sessions,
        session_blocks=limits.session_blocks,
        speculative_s=timeouts.speculative_s,
        max_attempts=config.retries.attempts,
        retry_base_s=config.retries.backoff_s,
        retry_max_s=config.retries.backoff_max_s,
        retry_share=config.retries.budget_share,
        retries_per_s=config.retries.budget_per_s,
        busy_s=config.retries.busy_s,
        busy_max_s=config.retries.busy_max_s,
        ejection_failures=config.ejection.failures,
        ejection_breaks=config.ejection.breaks,
        ejection_rate=config.ejection.rate,
        ejection_requests=config.ejection.requests,
        ejection_window_s=config.ejection.window_s,
        ejection_max_share=config.ejection.max_share,
        recover_s=config.ejection.recover_s,
        panic_share=config.health.panic_share,
        stall_s=timeouts.stall_s,
        slow_start_s=config.slow_start_s,
        disaggregation=config.disaggregation,
        tpot_s=config.disaggregation_tpot_ms / 1e3,
        policy_fallback=config.policy_fallback,
        policy_slow_s=config.policy_slow_ms / 1e3,
        backlog_batches=limits.events_backlog_batches,
    )


def fleet_terms(config: Config) -> FleetTerms:
    """Return the values of a configuration that the fleet needs."""
    return FleetTerms(
        probe_s=config.timeouts.probe_s,
        load_report_s=config.intervals.load_report_s,
        health_s=config.intervals.health_s,
        backlog_batches=config.limits.events_backlog_batches,
        drain_s=config.drain_s,
        probes=config.health.probes,
        silent_s=config.health.silent_s,
        ranks=config.limits.ranks,
        models=config.limits.models,
        event_hosts=event_hosts(config.event_hosts),
        relay=RelayLimits(
            header_bytes=config.limits.header_bytes,
            progress_s=min(_PROGRESS_S, config.timeouts.stall_s * _PROGRESS_OF_STALL),
        ),
    )


def deadlines(config: Config) -> Deadlines:
    """Return the time limits for requests."""
    return Deadlines(
        deadline_header=config.deadline_header,
        ms_per_token=config.timeouts.first_byte_ms_per_token,
        whole_answer_s=config.timeouts.whole_answer_s,
        total_s=config.timeouts.total_s,
    )


def inference_terms(config: Config) -> InferenceTerms:
    """Return the limits for reading a request."""
    return InferenceTerms(
        scan=ScanLimits(
            max_messages=config.limits.messages,
            max_values=config.limits.body_values,
            max_text_bytes=config.limits.message_text_bytes,
        ),
        identity=IdentityReader(
            config.session_header,
            families_of(config.identity.families),
            config.identity.clients,
            None if config.state is None else shared_secret(config.state, config.replicas.fleet),
        ),
        explain=config.explain,
        explain_every=config.explain_every,
        deadlines=deadlines(config),
        isolate=config.tenants.isolate,
        asks_model=config.names.missing_model == "refuse",
    )


def attempt_terms(config: Config) -> AttemptTerms:
    """Return the limits for sending a request to its worker."""
    timeouts = config.timeouts
    return AttemptTerms(
        timeouts=Timeouts(
            connect_s=timeouts.connect_s,
            send_s=timeouts.send_s,
            first_byte_s=timeouts.first_byte_s,
            between_s=timeouts.between_bytes_s,
            client_s=timeouts.between_bytes_s,
        ),
        deadlines=deadlines(config),
        client_buffer_bytes=config.limits.client_buffer_bytes,
        ping_s=config.waiting.ping_s,
        tenant_header=config.tenant_header,
        forward_token_ids=config.forward_token_ids,
        transfers={**TRANSFERS, trtllm.ADAPTER.kind: _trtllm(config)},
    )


def _trtllm(config: Config) -> Trtllm:
    """Return the secrets and the router's number from TensorRT-LLM's disaggregation YAML.

    The file was read before; if it cannot be read now, the defaults are returned.
    """
    if not config.discovery:
        return Trtllm()
    from router.discovery.source import TrtllmSpec, parse_source
    from router.discovery.trtllm import read_pool

    for source in config.discovery:
        spec = parse_source(source)
        if isinstance(spec, TrtllmSpec):
            try:
                pool = read_pool(spec)
            except ValueError as error:
                log.error("%s: its key and number are not known: %s", spec, error)
                continue
            return Trtllm(pool.node_id, pool.auth_key)
    return Trtllm()


# Keys whose values must be equal on all replicas.
_ALIKE = (
    "policy",
    "session_header",
    "identity.clients",
    "identity.families",
    "tenant_header",
    "tenants.isolate",
    "tokenizer_mode",
    "harmony_date",
    "chat_content_format",
    "chat_template_kwargs",
    "chat_drops_unused_tools",
)


def replica_terms(config: Config) -> ReplicaTerms:
    """Return where this router shares its state; used only if `state` is configured."""
    from router.replicas.settings import ReplicaTerms

    return ReplicaTerms(
        url=config.state or "",
        replicas=config.replicas,
        alike={key: text_of(value_at(config, key)) for key in _ALIKE},
        tokenizer=config.tokenizer,
        api_keys_file=config.api_keys_file,
    )


def discovery_terms(config: Config) -> DiscoveryTerms:
    """Return the values that discovery sources need besides their own specifications."""
    from router.discovery.opening import DiscoveryTerms

    return DiscoveryTerms(
        redis_url=config.state,
        fleet=config.replicas.fleet,
        event_hosts=event_hosts(config.event_hosts),
        objectives=config.picker.port >= 0,
    )


def tokenizer_terms(config: Config) -> TokenizerTerms:
    """Return which tokenizer is configured, with its limits."""
    return TokenizerTerms(
        folder=config.tokenizer,
        mode=config.tokenizer_mode,
        harmony_date=config.harmony_date,
        content_format=config.chat_content_format,
        template_kwargs=config.chat_template_kwargs,
        drops_unused_tools=config.chat_drops_unused_tools,
        memo_bytes=config.limits.token_memo_bytes,
        max_chars=config.limits.tokenized_chars,
        waiting_requests=config.limits.inflight_requests,
    )


def render_terms(config: Config) -> RenderTerms:
    """Return which renderers are configured, and how long a call of one may take."""
    intervals, timeouts = config.intervals, config.timeouts
    return RenderTerms(
        urls=() if config.render == "never" else config.renderers,
        workers=config.render == "auto",
        every_s=intervals.health_s,
        probe_s=timeouts.probe_s,
        recheck_s=intervals.token_recheck_s,
        timeout_s=timeouts.render_s,
        calls=config.limits.render_calls,
    )


def token_probe_terms(config: Config) -> ProbeTerms:
    """Return at what intervals workers are asked for their token ids."""
    intervals = config.intervals
    return ProbeTerms(intervals.health_s, config.timeouts.probe_s, intervals.token_recheck_s)


def request_log_terms(config: Config) -> RequestLogTerms:
    """Return where the request log is written, with its limits."""
    return RequestLogTerms(
        file=config.request_log,
        file_bytes=config.request_log_bytes,
        folder=config.record,
        parts=config.recording,
        worker_requests=config.limits.worker_requests,
        worker_queued_tokens=config.limits.worker_queued_tokens,
    )


def admin_hosts(config: Config) -> tuple[str, ...]:
    """Return the host names, besides localhost and IP addresses, that requests to the admin port
    may use.
    """
    return (config.admin_host.lower(), *config.admin_allowed_hosts)
