"""A worker's part in moving KV: what it gives to others, what it takes, and what it tells of it."""

from __future__ import annotations

import hashlib
import logging
import socket
import uuid
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import msgspec

from engine.scheduler.request import Request
from engine.server.settings import Runner, WorkerSettings
from engine.transfer.ends import Exporter, Importer, Transport
from engine.transfer.store import KvStore, Link
from engine.transfer.wire import MODE, VERSION, TransferParams

log = logging.getLogger(__name__)


class Transfers:
    """Both ends of one worker's transfers. Lifetime: worker; `listen` first, `close` last.

    `on_failed(request, why)` is called for a request whose KV did not come where the worker's
    policy is to fail it; by default it computes its prompt.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runner: Runner,
        store: KvStore,
        transport: Transport,
        on_failed: Callable[[Request, str], None],
    ) -> None:
        self.engine_id = uuid.uuid4().hex
        self._settings = settings
        self._runner = runner
        self._store = store
        self._on_failed = on_failed
        scheduler, clock = runner.scheduler, runner.clock
        link = Link(clock, settings.link_bytes_per_s, settings.kv_latency_ms / 1e3 / settings.speed)
        self.exporter = Exporter(scheduler.exports, store, self.engine_id, clock, link, runner.wake)
        self.importer = Importer(scheduler, store, clock, transport, self._on_end)
        self.transport = transport
        runner.on_read = self.importer.read

    @property
    def group(self) -> str:
        """Whose members can read each other's KV: the same for the same model, kept alike."""
        told = msgspec.msgpack.encode((VERSION, self._store.form))
        return hashlib.sha256(told).hexdigest()[:12]

    async def listen(self) -> None:
        """Take readers. Raises OSError where the port is taken."""
        await self.exporter.listen(self._settings.host, self._settings.kv_port)

    async def close(self) -> None:
        """Leave every transfer, in both directions."""
        await self.importer.close()
        await self.exporter.close()

    def params_of(self, request: Request) -> TransferParams | None:
        """What another worker reads the KV of an ended request by; None: nobody can."""
        export = request.export
        if export is None:
            return None
        return TransferParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_engine_id=self.engine_id,
            remote_block_ids=[export.block_ids],
            remote_host=self._host,
            remote_port=self.exporter.port,
            remote_request_id=str(export.request_id),
            remote_num_tokens=len(export.prompt),
            remote_prefill_cached_tokens=export.cached_tokens,
            remote_registration_generation=export.generation,
            tp_size=1,
            pp_size=1,
            transfer_mode=MODE,
        )

    def release(self, request: Request) -> None:
        """Nobody has heard of the KV of this ended request."""
        if request.export is not None:
            self.exporter.release(request.export.request_id, request.export.generation)

    def shown(self) -> dict[str, Any]:
        """For `GET /server_info`."""
        exports, exporter, importer = self._runner.scheduler.exports, self.exporter, self.importer
        form = self._store.form
        return {
            "transport": self.transport,
            "host": self._host,
            "port": exporter.port,
            "engine_id": self.engine_id,
            "load_failure_policy": self._settings.kv_load_failure_policy,
            "layout": msgspec.structs.asdict(form) | {"block_size": self._store.block_tokens},
            "lease_s": exports.lease_s,
            "exports": len(exports),
            "exported_blocks": exports.held_blocks,
            "readers": exporter.readers,
            "imports": importer.active,
            "sent_bytes": exporter.sent_bytes_total,
            "received_bytes": importer.received_bytes_total,
        }

    @property
    def _host(self) -> str:
        """Where others reach this worker."""
        if self._settings.kv_host is not None:
            return self._settings.kv_host
        host = self._settings.host
        try:
            is_wildcard = ip_address(host).is_unspecified
        except ValueError:
            is_wildcard = not host
        return socket.gethostname() if is_wildcard else host

    def _on_end(self, request: Request, why: str | None) -> None:
        if why is not None:
            log.info("request %d: its KV was not read: %s", request.request_id, why)
            if self._settings.kv_load_failure_policy == "fail":
                self._on_failed(request, why)
        self._runner.wake()
