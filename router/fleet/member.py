"""Follows one worker: recognizes its engine, reads its KV events, probes its health and reports its
load.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, NoReturn

import aiohttp

from engine.wire.events import WireError
from policies.facts import Probed, Role, Silence, Suspension, WorkerChange
from router.core.workers.table import Worker
from router.engines.adapter import (
    EngineReply,
    KvTransfers,
    RankLoad,
    UnrecognizedError,
    fetch,
    is_paused,
    trouble_with,
)
from router.engines.spec import WorkerSpec
from router.engines.table import adapter_of
from router.events.delivery import FeedContext
from router.events.feed import Feed, open_feed
from router.fleet.context import FRESH, End, FleetContext, refused
from router.fleet.engine_version import EngineQuestion, Told, get_by_relay
from router.fleet.load_reports import SeenFigures, report_loads
from router.fleet.member_states import MEMBER_STATES, MemberState
from router.fleet.recognize import (
    NoSuchRankError,
    Recognized,
    recognize,
    with_models,
    with_revision,
    with_role,
    with_thresholds,
)
from router.fleet.upstreams import upstream_at
from router.fleet.wanted import Leaving, NamedWorker, Turning
from router.http.errors import out_of_files
from router.http.reply import Sends
from router.upstream.fallback import Upstream

log = logging.getLogger(__name__)


_SWITCH_S = 300.0  # an engine may rebuild itself for another role
_SAID_BYTES = 500  # of its answer
_LOOK_S = 1.0  # between two looks at an engine that denied a model
_DENIED_MAX_S = 60.0  # for so long at most its list is not believed against its answers
_TELLS_S = 0.5  # for its version: a request waits for it
_ADAPTERS_S = 5.0  # between two looks at which LoRA adapters an engine has, which never says so
_EVENTS: Mapping[End, str] = MappingProxyType(
    {"asleep": "it falls asleep", "paused": "it is paused"}
)  # by how following it ended; else "it fails"
_SILENT_S = 1.0  # before an address that did not answer is tried again; the pause then doubles


@dataclass(slots=True)
class Denial:
    """The record that an engine answered not to have a model. Lifetime: until the engine answers
    for the model, or no longer lists it.
    """

    at_s: float
    times: int = 0  # in a row

    def outlasts(self, now_s: float) -> bool:
        """Return whether the engine's denial is still believed more than its list of models that
        has the model.
        """
        return now_s < self.at_s + min(_LOOK_S * 2.0 ** (self.times - 1), _DENIED_MAX_S)


Fits = Callable[["Member", tuple[int, ...]], bool]


class Member:
    """One worker of the fleet; its task `run` follows the engine until it is cancelled. Lifetime:
    worker.
    """

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec,
        named: NamedWorker,
        context: FleetContext,
        fits: Fits,
        served_by_others: Callable[[int, Iterable[str]], bool],
    ) -> None:
        """Make a worker that is not recognized yet.

        `fits` decides whether `spec` suits an engine with these ranks; it may change `spec`, or let
        the member leave. `served_by_others` returns whether workers other than this one serve all
        of the models.
        """
        self.worker_id = worker_id
        self.spec = spec
        self.named = named
        self.recognized: Recognized | None = None
        self.rank: int | None = None  # its engine's data-parallel rank, where it is one of several
        self.feed: Feed | None = None
        self.trouble = ""  # why it is not ready, for people
        self.draining = False
        self.leave: Leaving | None = None  # to be removed once idle
        self.parting = False  # its removal has begun
        self.turning: Turning | None = None  # to take another role once idle
        # The role that it took while it served, which replaces the configured one.
        self.turned: Role | None = None
        self.transfers = KvTransfers()  # as its engine last reported
        self.silent_since_s: float | None = None  # it has left all probes unanswered since
        self.abandoned = 0  # how often all that waited there for a first byte was given up
        self.state: MemberState = "starting"
        self.figures = SeenFigures(worker_id, spec.name)
        self._unknown_adapter = asyncio.Event()  # it has one in use of which we do not know
        self.denials: dict[str, Denial] = {}  # by model
        self._denied = asyncio.Event()  # it denied one that is to be looked for
        self._question = EngineQuestion(context.clock)
        self._outdated = asyncio.Event()  # its engine reports another version than the known one
        self._settled = asyncio.Event()  # and it was recognized since, or found to be down
        self._adapts = False  # it serves LoRA adapters, by its load figures
        self._advice = ""  # as last given
        self._models_trouble = ""  # why the models that it has now are not known
        self._context = context
        self._fits = fits
        self._served_by_others = served_by_others
        self.grpc: Sends | None = None  # to where its engine speaks it
        self._former: list[Sends] = []  # under earlier options; their requests may end
        self._asker: Sends | None = None  # of its version alone
        self._closed = False
        self.upstream = self._upstream()

    async def close(self) -> None:
        """Close the worker's connections."""
        self._closed = True
        for one in self._connections():
            await one.aclose()

    def _connections(self) -> list[Sends]:
        extra = (one for one in (self.grpc, self._asker) if one is not None)
        return [*self._former, self.upstream, *extra]

    @property
    def advice(self) -> str:
        """Advice for the worker's operator on what to know or to change; "" if there is
        no advice.
        """
        own = "" if self.recognized is None else self.recognized.advice
        models = self._models_trouble or self._model_advice
        return "; ".join(filter(None, (own, models, self.figures.trouble)))

    @property
    def _model_advice(self) -> str:
        refused = 0 if self.recognized is None else self.recognized.refused_models
        return f"{refused} of its models are not served: raise limits.models" if refused else ""

    @property
    def leaving(self) -> bool:
        """True if the worker is to be removed once it is idle."""
        return self.leave is not None

    @property
    def kind(self) -> str | None:
        """The engine's kind, or None if it is not known yet."""
        return None if self.recognized is None else self.recognized.kind

    @property
    def transfer(self) -> str:
        """The method by which the worker exchanges KV with other workers, a key of
        `router.engines.table.TRANSFERS`.
        """
        return "" if self.recognized is None else self.recognized.transfer

    async def run(self) -> None:
        """Recognize the worker, follow it until it is down, and then recognize it again, until
        cancelled.
        """
        while True:
            recognized = with_thresholds(await self._recognized(), self.spec)
            recognized = with_revision(recognized, self.spec)
            self._outdated.clear()
            self._move("it is recognized", recognized)
            self._settled.set()
            end = await self._follow(recognized)
            if end != "anew":
                self._settled.set()
            if end == "more":
                continue
            self._put_down(_EVENTS.get(end, "it fails"))
            if end == "anew":  # it serves, though not with the cache we knew
                self._move("it is recognized")
            elif end == "broken":
                await asyncio.sleep(self._context.terms.health_s)
            else:
                self.abandon_silent()

    def abandon_silent(self) -> None:
        """Abandon those requests at the worker whose clients have received nothing, if another
        worker can serve them.
        """
        if self.recognized is not None and self._replaceable(self.recognized):
            self.abandoned += 1
            for one in self._connections():
                one.abandon_silent()

    async def answer_probe(self, within_s: float | None) -> None:
        """Probe the worker's health at once, and report the result to the core.

        Only a new answer for this rank counts, and a probe that hangs does not delay it.
        """
        if self.recognized is None:
            return
        context, health = self._context, self.recognized.health
        limit_s = max(context.terms.probe_s if within_s is None else within_s, health.least_s)
        url, began_s = f"{self.spec.url}{health.path}", context.clock()
        try:
            well = await _status(context.http, url, limit_s) < health.below
        except (aiohttp.ClientError, TimeoutError) as error:
            if out_of_files(error):  # this is no fault of the worker
                return
            if isinstance(error, TimeoutError) and context.pauses.overlaps_probe(began_s, limit_s):
                return
            well = False
        context.report_fact(Probed(context.clock(), self.worker_id, well))

    def _replaceable(self, recognized: Recognized) -> bool:
        """Return whether other workers serve all models of this worker; if not, its requests should
        wait for it.
        """
        return self._served_by_others(self.worker_id, recognized.facts.models)

    async def _follow(self, recognized: Recognized) -> End:
        """Read the worker's KV events, probe it and scrape its metrics until one of these tasks
        ends. Return how that task ended.

        A defect in one task does not end the following of the worker: it is logged, and all tasks
        start again.
        """
        tasks: list[asyncio.Task[End]] = [asyncio.create_task(self._until_down(recognized))]
        if recognized.loads is not None:
            tasks.append(asyncio.create_task(self._report_loads(recognized)))
            tasks.append(asyncio.create_task(self._look_for_adapters()))
        tasks.append(asyncio.create_task(self._look_after_denials()))
        tasks.append(asyncio.create_task(self._until_outdated()))
        if recognized.silent:
            tasks.append(asyncio.create_task(self._until_more_answers(recognized.silent)))
        if recognized.pause_url is not None:
            tasks.append(asyncio.create_task(self._until_paused(recognized.pause_url)))
        if recognized.source is not None:
            self.feed = self._open_feed(recognized)
            tasks.append(asyncio.create_task(_endless(self.feed)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
        finally:
            self.feed = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            if (error := task.exception()) is not None:
                line = "worker %d (%s): the router failed to follow it"
                log.error(line, self.worker_id, self.spec.name, exc_info=error)
                self.trouble = f"the router failed to follow it: {error!r}"
                return "broken"
        return ended[0].result()  # the result of the probes counts first: they know best

    def respec(self, spec: WorkerSpec) -> None:
        """Use the thresholds, the weight and the revision of `spec` from now on; its other options
        are unchanged.
        """
        spec = self.spec = self.as_turned(spec)
        if self.recognized is not None:
            self.amend(with_revision(with_thresholds(self.recognized, spec), spec))

    def recognize_again_with(self, spec: WorkerSpec) -> None:
        """Use the options in `spec`, which require that `run` recognizes the worker again.

        The worker gets no new requests until then. Its running requests continue.
        """
        before, self.spec = self.spec, spec
        self.turning = self.turned = None
        tls = spec.server_name, spec.insecure
        if tls != (before.server_name, before.insecure):
            self._former.append(self.upstream)
            self.upstream = self._upstream()
            if self._asker is not None:
                self._former.append(self._asker)
                self._asker = None
        if self.grpc is not None and (*tls, spec.grpc) != (
            *(before.server_name, before.insecure),
            before.grpc,
        ):
            self._former.append(self.grpc)
            self.grpc = None
        if self.answers:
            self.trouble = "its options were changed: it is recognized anew"
            self._put_down("its options change")

    @property
    def role(self) -> Role:
        """The present role of the worker, by its options or its engine's own report."""
        return self.spec.role if self.recognized is None else self.recognized.facts.role

    def as_turned(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the options `spec` with the role to which the worker has changed since it was
        listed.
        """
        return spec if self.turned is None else replace(spec, role=self.turned)

    def turn(self, role: Role, by: str) -> None:
        """Give the worker another role from now on; its engine needs no message about it."""
        log.info("worker %d (%s): role %s, by %s", self.worker_id, self.spec.name, role, by)
        self.turned = role
        self.spec = replace(self.spec, role=role)
        if self.recognized is not None:
            self.amend(with_role(replace(self.recognized, own_role=role), self.spec))

    async def turned_engine(self, role: Role, by: str) -> None:
        """Give the worker the role to which its engine has switched, and ask the engine for its
        facts again.
        """
        terms, spec = self._context.terms, replace(self.spec, role=role)
        with suppress(UnrecognizedError, WireError, aiohttp.ClientError, TimeoutError):
            # Reported figures replace the known ones; missing ones keep them.
            self.recognized = await recognize(
                self._context.http, spec, terms.probe_s, terms.event_hosts, terms.models
            )
        self.turn(role, by)

    async def look_again(self) -> bool:
        """Ask the engine for its present list of models. Return whether it answered; if not, the
        models known before stay valid.
        """
        known, terms = self.recognized, self._context.terms
        if known is None:
            return False
        with suppress(aiohttp.ClientError, TimeoutError):
            try:
                found = await with_models(
                    self._context.http, known, self.spec, terms.probe_s, terms.models
                )
            except (UnrecognizedError, WireError) as error:
                self._note_models_trouble(str(error))
                return False
            self._models_trouble = ""
            if self.recognized is known and found != known:
                self.amend(found)
            return True
        return False

    def _note_models_trouble(self, trouble: str) -> None:
        """Note why the engine's list of models cannot be used, so that the worker keeps its earlier
        models.
        """
        if trouble != self._models_trouble:
            line = "worker %d (%s): it keeps its earlier models: %s"
            log.warning(line, self.worker_id, self.spec.name, trouble)
        self._models_trouble = trouble

    async def confirm(self) -> bool:
        """Ask the engine for its version, and return whether it is the version that was recognized.

        If it is another version, this recognizes the worker again, which may take as long as a
        probe. An engine that does not answer in time counts as unchanged: a request to it will fail
        anyway.
        """
        known = self.recognized
        if known is None:
            return False
        if await self._check_version(known) != "other":
            return True
        if self.recognized is known and self.answers:
            self._settled.clear()
            self._outdated.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._context.terms.probe_s):
                await self._settled.wait()
        return False

    async def _check_version(self, known: Recognized) -> Told:
        """Ask the engine for its version over a connection that no request uses; return "same",
        "other" or "unknown".
        """
        if self._closed:  # it was removed, and is not followed any more
            return "unknown"
        if self._asker is None:
            self._asker = self._upstream()
        limit_s = min(self._context.terms.probe_s, _TELLS_S)
        ask_it = partial(get_by_relay, self._asker, known.reported_version.path, limit_s)
        return await self._question.put(ask_it, known.reported_version)

    def _upstream(self) -> Upstream:
        context = self._context
        return upstream_at(
            self.spec, context.clock, context.trust, context.relay, context.terms.relay
        )

    async def _until_outdated(self) -> End:
        await self._outdated.wait()
        self.trouble = "its engine has another version: it is recognized again"
        return "anew"

    async def switch_engine(self, path: str, role: Role) -> str:
        """Tell the engine its new role (SGLang's `/pd_role_switch`). Return the reason if it
        refused, or "".
        """
        timeout = aiohttp.ClientTimeout(total=_SWITCH_S)
        url = f"{self.spec.url}{path}"
        try:
            async with self._context.http.post(
                url, json={"new_role": role}, timeout=timeout, allow_redirects=False
            ) as reply:
                said = (await reply.content.read(_SAID_BYTES)).decode(errors="replace")
                return "" if reply.status == 200 else f"POST {path}: {reply.status}: {said}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"POST {path}: {str(error) or type(error).__name__}"

    def amend(self, recognized: Recognized) -> None:
        """Replace the known facts of the worker by those in `recognized`, and report them to the
        core.
        """
        self._know(recognized)
        self._report_state(recognized)

    def _know(self, recognized: Recognized) -> None:
        before = 0 if self.recognized is None else self.recognized.refused_models
        self.recognized, self.rank = recognized, recognized.address
        if recognized.refused_models and not before:
            log.warning("worker %d (%s): %s", self.worker_id, self.spec.name, self._model_advice)
        open_grpc = self._context.grpc
        if self.grpc is None and recognized.grpc is not None and open_grpc is not None:
            self.grpc = open_grpc(recognized.grpc, self.spec)

    @property
    def ready(self) -> bool:
        """True if the worker may get new requests: it answers, and is not draining. A worker whose
        latest probes got no answer still counts as ready.
        """
        return self.answers and not self.draining

    @property
    def answers(self) -> bool:
        """True if the router has recognized the worker, and the worker has not failed since. A
        worker whose latest probes got no answer still counts as answering.
        """
        return self.state in ("serving", "silent")

    def drain(self, by: str) -> None:
        """Send the worker no new requests; running ones finish. `by` says in the log who asked for
        it.
        """
        log.info("worker %d (%s) is draining, by %s", self.worker_id, self.spec.name, by)
        was_ready, self.draining = self.ready, True
        if self.turning is not None:
            self.turning.drained = True
        if was_ready:
            self._report_state()

    def undrain(self, by: str) -> None:
        """Send the worker requests again, in the role that it has."""
        if self.turning is not None and not self.turning.switching:
            self.turning = None
        log.info("worker %d (%s) is no longer draining, by %s", self.worker_id, self.spec.name, by)
        was_draining, self.draining = self.draining, False
        if was_draining and self.answers:
            self._report_state()

    async def _recognized(self) -> Recognized:
        terms = self._context.terms
        failures = 0  # in a row; one that began anew serves meanwhile, and nothing else probes it
        while True:
            spec = self.spec
            try:
                recognized = await recognize(
                    self._context.http, spec, terms.probe_s, terms.event_hosts, terms.models
                )
                fits = self._fits(self, recognized.ranks)
            except NoSuchRankError as error:
                fits = self._fits(self, error.ranks)
                self._not_recognized(str(error))
            except (UnrecognizedError, WireError, aiohttp.ClientError, TimeoutError) as error:
                fits = False
                failures += 1
                silent = isinstance(error, TimeoutError)
                self._not_recognized(await trouble_with(spec.url, error, terms.probe_s))
                if self.answers and (
                    refused(error)
                    or (self._silent_for_long(failures) if silent else failures >= terms.probes)
                ):
                    self._put_down("it fails")
                    self._settled.set()
                    self.abandon_silent()
            else:
                if fits:
                    recognized = self._with_changed_role(recognized)
                    self._announce(recognized)
                    self._know(recognized)
                    self.trouble = ""
                    self._end_silence()
                    return recognized
            if fits or self.spec == spec:
                await asyncio.sleep(terms.health_s)
            elif self.answers:  # asked at once: till then nobody can name its rank
                self._move("its options change")

    def _with_changed_role(self, recognized: Recognized) -> Recognized:
        """Return `recognized` with the role to which the worker has changed since it was listed. If
        its engine was restarted with the role of its command line, that role counts again.
        """
        if self.turned is None or recognized.own_role in ("both", self.turned):
            return recognized
        if adapter_of(recognized.kind).role_switch is None:
            return with_role(replace(recognized, own_role=self.turned), self.spec)
        line = "worker %d (%s) reports that its role is %s again"
        log.warning(line, self.worker_id, self.spec.name, recognized.own_role)
        self.turned = None
        self.spec = replace(self.spec, role=recognized.own_role)
        return with_role(recognized, self.spec)

    def _not_recognized(self, trouble: str) -> None:
        if trouble != self.trouble:
            # Of a worker that was recognized before, another line says that it is down.
            level = logging.WARNING if self.recognized is None else logging.INFO
            line = "worker %d (%s) is not recognized: %s"
            log.log(level, line, self.worker_id, self.spec.name, trouble)
        self.trouble = trouble

    def _announce(self, recognized: Recognized) -> None:
        back = "worker %d (%s) is back: %s"
        joined = "worker %d (%s) joined: %s"
        line = joined if self.recognized is None else back
        log.info(line, self.worker_id, self.spec.name, recognized)
        if recognized.advice not in ("", self._advice):
            self._advice = recognized.advice
            log.warning("worker %d (%s): %s", self.worker_id, self.spec.name, self._advice)

    def _open_feed(self, recognized: Recognized) -> Feed:
        assert recognized.source is not None
        context = self._context
        feeds = FeedContext(
            http=context.http,
            zmq=context.zmq,
            clock=context.clock,
            report_fact=context.report_fact,
            readers=context.readers,
            timeout_s=context.terms.probe_s,
            backlog_batches=context.terms.backlog_batches,
            first_seq=context.first_seq(self.worker_id),
            wants_snapshot=partial(context.wants_snapshot, self.worker_id),
            claim=context.claim,
            borrow=context.borrow,
            worker_name=self.spec.name,
        )
        return open_feed(recognized.source, self.worker_id, recognized.facts.models[0], feeds)

    def log_down(self) -> None:
        """Log that the worker counts as down, and why."""
        log.warning("worker %d (%s) is down: %s", self.worker_id, self.spec.name, self.trouble)

    def _put_down(self, event: str) -> None:
        self.silent_since_s = None
        self.log_down()
        self._move(event)

    async def _until_down(self, recognized: Recognized) -> End:
        failures, context = 0, self._context
        where = f"GET {recognized.health.path}"
        while True:
            await asyncio.sleep(context.terms.health_s)
            began_s, silent = context.clock(), False
            try:
                self.trouble = await self._complaint()
            except (aiohttp.ClientError, TimeoutError) as error:
                if out_of_files(error):
                    line = "worker %d (%s): not probed: %s"
                    log.error(line, self.worker_id, self.spec.name, error)
                    continue
                silent = isinstance(error, TimeoutError)
                if silent and context.pauses.overlaps_probe(began_s, context.terms.probe_s):
                    continue
                self.trouble = f"{where}: {str(error) or type(error).__name__}"
                if refused(error):
                    return "down"
            failures = failures + 1 if self.trouble else 0
            if silent:
                if self._silent_for_long(failures):
                    return "down"
            elif failures >= context.terms.probes:
                return "down"
            else:
                self._end_silence()
                if recognized.facts.group is not None and not failures:
                    await self._look_at_version()

    async def _look_at_version(self) -> None:
        """Ask the engine for its version, and have the worker recognized again if it changed. Only
        workers that transfer KV to or from other workers are asked.
        """
        known = self.recognized
        if known is not None and await self._check_version(known) == "other":
            self._outdated.set()

    def _silent_for_long(self, probes: int) -> bool:
        """Tell the decision core that a worker has not answered one more probe.

        probes: how many probes in a row got no answer.
        Return True if the worker has been silent for so long that it now counts as down.
        """
        if not self.answers:  # its options changed while it was probed
            return False
        now_s, terms = self._context.clock(), self._context.terms
        self.state = MEMBER_STATES[self.state, "a probe gets no answer"]
        if self.silent_since_s is None:
            self.silent_since_s = now_s
            log.warning(
                "worker %d (%s) is silent: %s", self.worker_id, self.spec.name, self.trouble
            )
        self._context.report_fact(Silence(now_s, self.worker_id, probes, terms.probes))
        return now_s - self.silent_since_s >= terms.silent_s

    def _end_silence(self) -> None:
        """Note that the worker answered a probe, which ends a silence."""
        if self.silent_since_s is not None:
            now_s, since_s = self._context.clock(), self.silent_since_s
            self.silent_since_s = None
            if self.state == "silent":
                self.state = MEMBER_STATES[self.state, "a probe is answered"]
            line = "worker %d (%s) answers again, after %.1f s"
            log.warning(line, self.worker_id, self.spec.name, now_s - since_s)
            self._context.report_fact(Silence(now_s, self.worker_id, 0))

    async def _complaint(self) -> str:
        """Return what is wrong with the worker by its own health check; "" if nothing is."""
        assert self.recognized is not None
        context, health = self._context, self.recognized.health
        url = f"{self.spec.url}{health.path}"
        ask = partial(_status, context.http, url, max(context.terms.probe_s, health.least_s))
        fresh_s = context.terms.health_s * FRESH
        status: int = await context.answers.to(url).get(ask, context.clock, fresh_s)
        return "" if status < health.below else f"GET {health.path} answered {status}"

    async def _report_loads(self, recognized: Recognized) -> End:
        end, self.trouble = await report_loads(
            self.worker_id, self.spec.rank, recognized, self.figures, self._context, self._note
        )
        return end

    async def _look_for_adapters(self) -> NoReturn:
        """Find LoRA adapters that the engine loaded or unloaded since it was recognized.

        Load reports name the adapters in use; the list of all adapters is read from time to time.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ADAPTERS_S):
                    await self._unknown_adapter.wait()
            refuses = self.recognized is not None and self.recognized.refused_models
            if self._adapts or refuses:  # the limit may be another one by now
                await self.look_again()
            if self._unknown_adapter.is_set():  # what is told and not listed is not asked for again
                await asyncio.sleep(_ADAPTERS_S)
                self._unknown_adapter.clear()

    def deny(self, model: str) -> None:
        """Note that the engine answered that it does not have `model`: requests prefer other
        workers until its list of models was checked.
        """
        known = self.recognized
        if known is None or model not in known.facts.models:
            return
        denial = self.denials.setdefault(model, Denial(0.0))
        denial.at_s, denial.times = self._context.clock(), min(denial.times + 1, 16)
        if model not in known.facts.denied:
            if denial.times == 1:
                line = "worker %d (%s) answered that it does not have the model %r: checking"
                log.warning(line, self.worker_id, self.spec.name, model)
            self._set_denied(known.facts.denied | {model})
        self._denied.set()

    def note_model_served(self, model: str) -> None:
        """Note that the engine answered a request for `model`, so it has the model."""
        self.denials.pop(model, None)
        if self.recognized is not None and model in self.recognized.facts.denied:
            self._set_denied(self.recognized.facts.denied - {model})

    def _set_denied(self, models: frozenset[str]) -> None:
        assert self.recognized is not None, "it serves"
        facts = replace(self.recognized.facts, denied=models)
        self.amend(replace(self.recognized, facts=facts))

    async def _look_after_denials(self) -> NoReturn:
        """Read the engine's list of models at once when it answered not to have one, and then once
        a second until no model is in doubt.

        The list is believed later each time that an answer contradicts it.
        """
        while True:
            await self._denied.wait()
            self._denied.clear()
            looked = await self.look_again()
            if (known := self.recognized) is not None and looked:
                now_s, facts = self._context.clock(), known.facts
                for model in self.denials.keys() - set(facts.models):
                    del self.denials[model]
                doubted = frozenset(m for m in facts.denied if m in self.denials
                                    and self.denials[m].outlasts(now_s))  # fmt: skip
                if doubted != facts.denied:
                    self._set_denied(doubted)
            if self.recognized is not None and self.recognized.facts.denied:
                self._denied.set()
            await asyncio.sleep(_LOOK_S)

    async def _until_more_answers(self, silent: frozenset[str]) -> End:
        """Ask again at those further addresses of the engine that did not answer at first, because
        the engine may have been slow or still starting. Return "more" when one answers.
        """
        terms, wait_s = self._context.terms, _SILENT_S
        where = ", ".join(map(_with_key, sorted(silent)))
        line = "worker %d (%s) does not answer at %s; the router asks again"
        log.warning(line, self.worker_id, self.spec.name, where)
        while True:
            await asyncio.sleep(wait_s)
            wait_s *= 2.0
            with suppress(UnrecognizedError, WireError, aiohttp.ClientError, TimeoutError):
                found = await recognize(
                    self._context.http, self.spec, terms.probe_s, terms.event_hosts, terms.models
                )
                if begun := sorted(silent - found.silent):
                    line, where = "worker %d (%s) answers at %s now", ", ".join(begun)
                    log.info(line, self.worker_id, self.spec.name, where)
                    return "more"

    def _note(self, load: RankLoad) -> None:
        """Keep the KV transfer counts of a load report, log KV that was read too late, and note
        adapters that are not known yet.
        """
        self._adapts = load.adapters is not None
        known = self.recognized
        if known is not None and not (load.adapters or set()) <= set(known.facts.models):
            self._unknown_adapter.set()
        late = load.transfers.late - self.transfers.late
        self.transfers = load.transfers
        if late > 0:
            log.error(
                "worker %d (%s): KV was fetched %d times after it had been freed: as many answers "
                "of workers that decode may be wrong; see docs/disaggregation.md",
                self.worker_id,
                self.spec.name,
                late,
            )

    async def _until_paused(self, url: str) -> End:
        """Ask the engine regularly whether it is paused, and return "paused" when it is. This is
        separate from load reports because the engine answers it only between two steps.
        """
        context = self._context
        while True:
            await context.until_scrape(is_busy=False)  # a request of ours ends the quiet
            timeout = aiohttp.ClientTimeout(total=context.terms.probe_s)
            question = partial(fetch, context.http, url, timeout)
            fresh_s = context.scrape_interval_s * FRESH
            with suppress(WireError, aiohttp.ClientError, TimeoutError):
                answer: EngineReply = await context.answers.to(url).get(
                    question, context.clock, fresh_s
                )
                if answer.status == 200 and is_paused(answer.body):
                    self.trouble = "its engine is paused"
                    return "paused"

    def _move(self, event: str, recognized: Recognized | None = None) -> None:
        """Change the worker's state as `event` demands, and tell the decision core.

        recognized: what a new probe found out about the worker, or None.
        """
        state = self.state = MEMBER_STATES[self.state, event]
        suspended = state if state == "asleep" or state == "paused" else None
        self._report_state(recognized, suspended)

    def _report_state(
        self, recognized: Recognized | None = None, suspended: Suspension | None = None
    ) -> None:
        state: Literal["ready", "draining", "down"] = "down"
        if self.answers:
            state = "draining" if self.draining else "ready"
        facts = None if recognized is None else recognized.facts
        now_s = self._context.clock()
        self._context.report_fact(
            WorkerChange(now_s, self.worker_id, state, facts, suspended=suspended)
        )


def skipped_events(member: Member, worker: Worker | None) -> Counter[str]:
    """Return the number of the worker's KV events that changed nothing, by reason.

    Reasons that engines are known to cause are counted from 0 on, so that a rate shows the first
    event.
    """
    counts = Counter[str]()
    if member.feed is not None:
        counts.update(dict.fromkeys(("bad_tokens", "other_block_size", "unknown_names"), 0))
        counts.update(member.feed.counters.skips)
    if worker is not None:
        counts.update(worker.kv.skips())
    return counts


def _with_key(address: str) -> str:
    """Return an address that does not answer, with what is missing there and the key for it."""
    if "://" in address:
        return f"{address} (metrics; if they are elsewhere, give metrics=URL)"
    return f"{address} (gRPC; if it is elsewhere, give grpc=HOST:PORT; if there is none, grpc=none)"


async def _status(http: aiohttp.ClientSession, url: str, timeout_s: float) -> int:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with http.get(url, timeout=timeout, allow_redirects=False) as reply:
        return reply.status


async def _endless(feed: Feed) -> End:
    await feed.run()
    return "broken"
