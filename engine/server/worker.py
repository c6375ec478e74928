"""A worker: it joins scheduler, cache, runner, events and counters. HTTP handlers use it to `start`
an answer, to `abandon` it, and to look at the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.block_pool import BlockPool
from engine.pins import Export
from engine.sampling.params import SamplingParams
from engine.sampling.stops import StopText
from engine.scheduler.explain import Explanation, RequestSummary, explain, request_summary, waiting
from engine.scheduler.request import Request, State
from engine.scheduler.types import Output, Refused, Step
from engine.server.answers import Answer, Choice
from engine.server.events import EventLog, KvPublisher
from engine.server.metrics import Counters, StepLog, StepRecords, WorkerCollector
from engine.server.options import RequestOptions
from engine.server.settings import Runner, ServedModel, WorkerSettings, timed
from engine.transfer import Exporter, Importer, KvStore, Link, Transport
from engine.wire.kv_transfer import MODE, VERSION, TransferParams
from engine.wire.tokens import Tokenizer
from kvkernels import chain_seed

Tokens = npt.NDArray[np.int32]

log = logging.getLogger(__name__)

_SHOWN_IDS = 16  # of a prompt, to the decoder of its answer


class Transfers:
    """The KV transfers of one worker: it sends KV to other workers and reads KV from them.

    Lifetime: worker; call `listen` first, `close` last. `on_failed(request, why)` is called for a
    request whose KV did not arrive if the worker's policy is to fail it; by default the worker
    computes its prompt.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runner: Runner,
        store: KvStore,
        transport: Transport,
        on_failed: Callable[[Request, str], None],
        on_free: Callable[[Export], None],
    ) -> None:
        self.engine_id = uuid.uuid4().hex
        self._settings = settings
        self._runner = runner
        self._store = store
        self._on_failed = on_failed
        # By connection: the KV that its latest answer named, until it is certain that the answer
        # was read.
        self._unread_answers: dict[object, tuple[int, int]] = {}
        scheduler, clock = runner.scheduler, runner.clock
        link = Link(clock, settings.link_bytes_per_s, settings.kv_latency_ms / 1e3 / settings.speed)
        self.exporter = Exporter(scheduler.exports, store, self.engine_id, clock, link, on_free)
        self.importer = Importer(scheduler, store, clock, transport, self._on_end)
        self.transport = transport
        runner.on_read = self.importer.read

    @property
    def group(self) -> str:
        """The name of the group of workers that can read each other's KV: they have the same model
        and store its KV alike.
        """
        told = msgspec.msgpack.encode((VERSION, self._store.form))
        return hashlib.sha256(told).hexdigest()[:12]

    async def listen(self) -> None:
        """Accept connections of workers that read KV. Raises OSError if the port is taken."""
        await self.exporter.listen(self._settings.host, self._settings.kv_port)

    async def close(self) -> None:
        """End every transfer, in both directions."""
        await self.importer.close()
        await self.exporter.close()

    def params_of(self, request: Request) -> TransferParams | None:
        """Return the parameters with which another worker reads the KV of an ended request; None if
        none can.
        """
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
        """Free the KV of an ended request whose answer nobody received."""
        if request.export is not None:
            self.exporter.release(request.export.request_id, request.export.generation)

    def answer_sent(self, connection: object, request: Request) -> None:
        """Record that an answer that names the KV of this request was sent on `connection`."""
        if (export := request.export) is not None:
            self._unread_answers[connection] = export.request_id, export.generation

    def answer_read(self, connection: object) -> None:
        """Record that the client has read the answer that was sent on `connection`, if any, because
        another request came on it.
        """
        self._unread_answers.pop(connection, None)

    def lost(self, connection: object, error: BaseException | None) -> None:
        """Record that `connection` ended; it has an `error` if the client did not read
        everything.
        """
        told = self._unread_answers.pop(connection, None)
        if told is not None and error is not None:
            self.exporter.release(*told)

    def shown(self) -> dict[str, Any]:
        """Return the data of the transfers for `GET /server_info`."""
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
        """Return the host name at which other workers reach this worker."""
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


class Worker:
    """The parts of one worker. Lifetime: process; create it inside a running event loop."""

    def __init__(
        self, settings: WorkerSettings, tokenizer: Tokenizer, served: ServedModel | None = None
    ) -> None:
        """Join the parts of a worker. `served` is the model of a worker that computes; without it,
        time passes as the profile says.
        """
        self.settings = settings
        self.tokenizer = tokenizer
        self.model = settings.model_name
        self.draining = False
        self._step_log = None if settings.step_log is None else StepLog(settings.step_log)
        self.counters = Counters()
        self.pool = BlockPool(
            settings.blocks,
            settings.block_size,
            host_blocks=settings.host_blocks,
            groups=settings.cache_groups,
        )
        self.served = served or timed(settings, tokenizer.vocab)
        self.runner = self.served.make_runner(self.pool, self._on_step, self._on_failed)
        self.transfers: Transfers | None = None  # its KV stays where it is
        if settings.kv_transport != "none" and self.served.store is not None:
            store, transport = self.served.store, settings.kv_transport
            self.transfers = Transfers(
                settings, self.runner, store, transport, self._on_unread, self._on_free
            )
        self.steps = StepRecords(self.runner.scheduler)
        self._log = EventLog(self.pool, time.time)
        self.publisher = KvPublisher(
            self._log, settings.host, settings.events_port, settings.replay_port
        )
        self.metrics = WorkerCollector(
            *(self.counters, self.runner, self.steps, self.model, self.served.backends),
            (self.transfers.exporter, self.transfers.importer) if self.transfers else None,
        )
        self._choices: dict[int, tuple[Answer, Choice]] = {}  # unfinished, by request id
        self._ids = itertools.count()
        self.idle = asyncio.Event()  # set while no request is unfinished
        self.idle.set()

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus output that can be served."""
        return self.runner.scheduler.max_sequence_tokens

    @property
    def unfinished(self) -> int:
        """The number of sequences that are not answered completely yet."""
        return len(self._choices)

    @property
    def kv_seq(self) -> int:
        """The number of the last batch of KV events; -1 before the first batch."""
        return self._log.next_seq - 1

    def start(
        self,
        answer: Answer,
        prompts: Sequence[Tokens],
        sampling: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Queue `sampling.n` sequences for each prompt. Raises Refused if one of them is refused,
        and then queues none.
        """
        seed = chain_seed(self.model, None, options.salt)
        deadline_s = self.runner.clock.now_s() + options.timeout_s
        # A timed worker's tokens do not depend on them.
        each = sampling.choices(secrets.randbits(64))
        imports, exports = self._transfer(answer, options.transfer, len(prompts) * len(each))
        try:
            for index, (prompt, params) in enumerate(product(prompts, each)):
                request = Request(
                    next(self._ids),
                    prompt,
                    options.output_tokens,
                    options.priority,
                    seed,
                    stop_tokens=params.stop_tokens(self.served.end_of_text),
                    sampling=params,
                    deadline_s=deadline_s,
                    tenant=options.tenant,
                    retention=options.retention,
                    imports=imports is not None,
                    exports=exports,
                    exports_early=exports and self.settings.kv_overlap,
                    export_name=None if options.transfer is None else options.transfer.transfer_id,
                )
                self.runner.submit(request)
                if imports is not None and self.transfers is not None:
                    self.transfers.importer.begin(request, imports)
                self._begin(answer, request, index, options.salt)
        except Refused as refusal:
            self.counters.refused[refusal.reason] += 1
            self.abandon(answer)
            raise

    def _transfer(
        self, answer: Answer, params: TransferParams | None, sequences: int
    ) -> tuple[TransferParams | None, bool]:
        """Return where the KV of a request is, if it can be read, and whether the KV of its answer
        is kept for other workers. A stream cannot say where its KV is, and only one of several
        sequences could be read.
        """
        transfers = self.transfers
        if params is None or transfers is None:
            return None, False
        exports = params.do_remote_decode and sequences == 1 and not answer.is_stream
        if not params.do_remote_prefill:
            return None, exports
        lacks = params.lacks if sequences == 1 else "several"
        if lacks is None:
            return params, exports
        transfers.importer.failed[lacks] += 1
        transfers.importer.give_up(params)
        return None, exports

    def kv_of(self, answer: Answer) -> dict[str, Any] | None:
        """Return the parameters with which another worker reads the KV of an answer; None if no
        worker can.
        """
        if self.transfers is None or len(answer.choices) != 1:
            return None
        params = self.transfers.params_of(answer.choices[0].request)
        return None if params is None else msgspec.structs.asdict(params)

    def give_up(self, params: TransferParams | None) -> None:
        """Tell the worker that has the KV in `params` that nobody will read it, because the request
        was refused.
        """
        if self.transfers is not None and params is not None and params.do_remote_prefill:
            self.transfers.importer.give_up(params)

    def release_named(self, name: str) -> bool:
        """Free the KV to which a router gave this name; return False if no KV has that name, now or
        later.
        """
        assert self.transfers is not None
        if self.transfers.exporter.release_named(name):
            return True
        for _, choice in self._choices.values():
            if choice.request.export_name == name and choice.request.exports:
                # The request still runs: when it ends, the worker will not keep its KV.
                choice.request.exports = False
                return True
        return False

    def _begin(self, answer: Answer, request: Request, index: int, salt: str | None) -> None:
        choice = Choice(
            request,
            index,
            self.tokenizer.stream(request.prompt[-_SHOWN_IDS:].tolist(), not answer.shows_special),
            self.runner.clock.now_s(),
            StopText.of(request.sampling),
        )
        answer.choices.append(choice)
        answer.unfinished += 1
        self._choices[request.request_id] = (answer, choice)
        self.idle.clear()
        if salt:
            self._log.add_salted(request, salt)

    def abandon(self, answer: Answer, why: str = "abort") -> None:
        """Stop the sequences of `answer` that still run, because its client is gone, or
        it was cut.
        """
        for choice in answer.choices:
            request_id = choice.request.request_id
            if self.transfers is not None:
                self.transfers.importer.drop(request_id)
                if not answer.was_sent:
                    self.transfers.release(choice.request)
            if self._choices.pop(request_id, None) is not None:
                self.runner.cancel(request_id)
                self._log.forget_salted(request_id)
                self.counters.finished[why] += 1
                self.counters.fail.add(self.runner.clock.now_s() - choice.submitted_s)
        if not self._choices:
            self.idle.set()

    def cut_all(self) -> None:
        """Abandon all answers and let the waiting handlers go on, at the end of the grace
        period.
        """
        for answer, _choice in list(self._choices.values()):
            self.abandon(answer)
            answer.cut()

    def close(self) -> None:
        """Close the sockets, and write the buffered rest of the step log."""
        self.publisher.close()
        if self._step_log is not None:
            self._step_log.close()

    def on_slow_client(self) -> None:
        """Count a client that left too much of its stream unread."""
        self.counters.slow_clients += 1

    def reset_cache(self) -> None:
        """Drop every cached block, and publish the event of that at once."""
        self.pool.clear()
        self._publish()

    def snapshot(self) -> bytes:
        """Return the visible contents of the cache with the number of the last batch of events;
        unpublished changes are published first.
        """
        self._publish()
        return self._log.snapshot()

    def explain(self, name: str) -> list[Explanation]:
        """Return the states of the unfinished sequences of an answer, by its id or the X-Request-Id
        in it.
        """
        runner = self.runner
        now_s = runner.clock.now_s()
        return [
            explain(runner.scheduler, choice.request, runner.step_s, now_s)
            for answer, choice in self._choices.values()
            if name in (answer.answer_id, answer.answer_id.partition("-")[2])
        ]

    def overview(self, most: int) -> list[RequestSummary]:
        """Return up to `most` unfinished requests: waiting ones in the order of the queue, then the
        others.
        """
        scheduler, now_s = self.runner.scheduler, self.runner.clock.now_s()
        queue = waiting(scheduler)
        others = [one for one in scheduler.requests.values() if one.state is not State.WAITING]
        found = []
        for place, request in enumerate((*queue, *others)[:most]):
            answer, _ = self._choices.get(request.request_id, (None, None))
            name = answer.answer_id if answer is not None else ""
            position = place if place < len(queue) else None
            found.append(request_summary(request, name, position, now_s))
        return found

    def _on_step(self, step: Step, outputs: list[Output], now_s: float) -> None:
        # Publish blocks first: a client that reads the answer's end may request its blocks at once.
        self._publish()
        if self._step_log is not None:
            self._step_log.note(step, self.runner.step_s)
        if self.transfers is not None:
            self._answer_early(step)
        counters = self.counters
        counters.generation_tokens += len(outputs)
        logprobs = self.runner.logprobs
        for request, token, ended in outputs:
            answer, choice = self._choices[request.request_id]
            text = answer.text_of(choice, token, ended)
            finished = ended
            if choice.is_stopped:
                # The scheduler knows no text: the string that ends it is found here.
                finished = request.finish_reason = "stop"
                if ended is None:
                    self.runner.cancel(request.request_id)
            if choice.last_token_s:
                counters.gap_s.observe(now_s - choice.last_token_s)
            else:
                counters.ttft_s.observe(now_s - choice.submitted_s)
                counters.prompt_tokens += request.prompt_tokens
            choice.last_token_s = now_s
            if finished:
                del self._choices[request.request_id]
                self._log.forget_salted(request.request_id)
                counters.finished[finished] += 1
                counters.e2e_s.observe(now_s - choice.submitted_s)
                counters.ended(request, now_s, time.time())
            answer.on_token(choice, token, text, finished, logprobs.get(request.request_id))
        if not self._choices:
            self.idle.set()
        runner = self.runner
        if runner.split.graph is not None:
            counters.graph_steps[runner.split.graph] += 1
            counters.padded_rows += runner.split.padded_rows
        if runner.split.int8 is not None:
            counters.int8_steps[runner.split.int8] += 1
        counters.shared_prefix_groups += runner.split.shared_prefix_groups
        counters.kv_bytes_saved += runner.split.kv_bytes_saved
        self.steps.note(step, runner.split, runner.clock.now_s() - now_s, time.time())

    def _on_failed(self, requests: Sequence[Request], why: str) -> None:
        """Fail the answers of requests that the runner could not finish, with all their choices."""
        for request in requests:
            answer, _ = self._choices.get(request.request_id, (None, None))
            if answer is not None:
                is_late = request.finish_reason == "timeout"
                self.abandon(answer, "timeout" if is_late else "error")
                answer.fail(why, 504 if is_late else 500)

    def _answer_early(self, step: Step) -> None:
        """Let other workers read the blocks that the step has computed. Where the first chunk of a
        prompt is computed, send the answer that names its KV.
        """
        assert self.transfers is not None
        self.transfers.exporter.stepped()
        for request, _, _ in step.chunks:
            answer, _ = self._choices.get(request.request_id, (None, None))
            if request.export is not None and request.is_prefilling and answer is not None:
                answer.answer_early()

    def _on_free(self, export: Export) -> None:
        """Stop a request that computes its prompt only for readers, because no reader is left."""
        answer, choice = self._choices.get(export.request_id, (None, None))
        if answer is not None and choice is not None and choice.request.export is export:
            self._choices.pop(export.request_id)
            self.runner.cancel(export.request_id)
            self._log.forget_salted(export.request_id)
            self.counters.finished["abort"] += 1
            if not self._choices:
                self.idle.set()
            answer.fail("the KV that was asked for is not wanted any more")
        self.runner.wake()

    def _on_unread(self, request: Request, why: str) -> None:
        """Fail a request whose KV did not arrive, if the worker's settings forbid to compute its
        prompt.
        """
        self.runner.cancel(request.request_id)
        self._on_failed((request,), f"the prompt's KV did not come from another worker: {why}")

    def _publish(self) -> None:
        batch = self._log.flush()
        if batch is not None:
            self.publisher.publish(batch)
