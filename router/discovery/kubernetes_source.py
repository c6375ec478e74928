"""Reads workers from Kubernetes: the endpoints of a service, or the pods of an InferencePool."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import msgspec

from router.discovery.kubernetes_watch import (
    Annotations,
    Collection,
    Connect,
    Draw,
    FollowedCollections,
    Labels,
    Meta,
    Resource,
    WatchError,
)
from router.discovery.source import MAX_SEEN, InferencePoolSpec, KubernetesSpec, bounded
from router.engines.spec import POLL, WorkerSpec, WorkerSpecError, of_rank
from router.engines.worker_spec import parse_worker_spec
from router.fleet.sources import Report, ReportedWorker

GROUP = "inference.networking.k8s.io"
OBJECTIVES_GROUP = "inference.networking.x-k8s.io"
REVISION_LABEL = "disaggregatedset.x-k8s.io/revision"  # of pods, by default
MAX_SLICES = 256
MAX_PODS = MAX_SEEN
MAX_OBJECTIVES = 256  # most objectives of a pool
_MAX_LISTED_OBJECTIVES = 4_096  # of a namespace: the API cannot choose those of a pool


class Conditions(msgspec.Struct):
    """The conditions of an endpoint, such as whether it is ready; None means unknown."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    """An endpoint of a slice: one or several addresses of the same server."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = msgspec.field(default_factory=Conditions)


class Port(msgspec.Struct):
    """A port that all endpoints of a slice have."""

    port: int | None = None
    name: str | None = None
    protocol: str | None = None


class Slice(msgspec.Struct, rename="camel"):
    """An EndpointSlice as the Kubernetes API returns it; fields that the router does not read are
    left out.
    """

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Condition(msgspec.Struct):
    """One condition of a pod; the router reads `Ready`."""

    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct):
    """The state and address of a pod."""

    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: tuple[Condition, ...] | None = None


class Pod(msgspec.Struct):
    """A pod as the Kubernetes API returns it; fields that the router does not read are left out."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def stopping(self) -> bool:
        """True if the pod was deleted and is in its grace period."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ready(self) -> bool:
        """True if the pod's condition `Ready` is true."""
        return any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())


class Selector(msgspec.Struct, rename="camel"):
    """The labels by which an InferencePool selects its pods."""

    match_labels: dict[str, str] | None = None


class TargetPort(msgspec.Struct):
    """A port at which each pod of a pool serves."""

    number: int


class PoolFields(msgspec.Struct, rename="camel"):
    """The fields of an InferencePool's `spec` that the router reads."""

    selector: Selector = msgspec.field(default_factory=Selector)
    target_ports: tuple[TargetPort, ...] = ()


class InferencePool(msgspec.Struct):
    """An InferencePool of inference.networking.k8s.io/v1; fields that the router does not read are
    left out.
    """

    metadata: Meta = msgspec.field(default_factory=Meta)
    spec: PoolFields = msgspec.field(default_factory=PoolFields)


class PoolReference(msgspec.Struct):
    """The pool that an objective is for; the API fills in group and kind if they are missing."""

    name: str = ""
    group: str = GROUP
    kind: str = "InferencePool"


class ObjectiveFields(msgspec.Struct, rename="camel"):
    """The fields of an InferenceObjective's `spec` that the router reads."""

    pool_ref: PoolReference = msgspec.field(default_factory=PoolReference)
    priority: int | None = None


class InferenceObjective(msgspec.Struct):
    """An InferenceObjective of inference.networking.x-k8s.io/v1alpha2, as the Kubernetes API
    returns it.
    """

    metadata: Meta = msgspec.field(default_factory=Meta)
    spec: ObjectiveFields = msgspec.field(default_factory=ObjectiveFields)


class KubernetesSource:
    """Reads workers from the endpoints of a Kubernetes service. Lifetime: as long as the
    configuration names the source.
    """

    def __init__(
        self, spec: KubernetesSpec, connect: Connect | None = None, draw: Draw = random.random
    ) -> None:
        """Make a source for the service in `spec`. `connect` connects to another API server than
        the one that the environment names.
        """
        self._spec = spec
        self._connect = connect
        self._draw = draw

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report after each list, and after each event that changes something."""
        followed = FollowedCollections(self._connect, self._draw)
        slices = followed.begin(slices_of(self._spec))
        told: Report | None = None
        try:
            while True:
                await followed.changed()
                if slices.current and slices.objects is not None:
                    report = workers_of(slices.objects.by_name, self._spec)
                    report = replace(report, trouble=slices.trouble)
                else:
                    report = Report(None, slices.trouble)
                if report != told:
                    told = report
                    yield report
        finally:
            await followed.end()


def slices_of(spec: KubernetesSpec) -> Resource[Slice]:
    """Return the EndpointSlices of the service as a resource that the router lists and watches."""
    return Resource(
        Slice,
        f"/apis/discovery.k8s.io/v1/namespaces/{spec.namespace}/endpointslices",
        "endpointslices of discovery.k8s.io",
        MAX_SLICES,
        {"labelSelector": f"kubernetes.io/service-name={spec.service}"},
    )


def workers_of(slices: Mapping[str, Slice], spec: KubernetesSpec) -> Report:
    """Return a report of the workers at the endpoints that are ready, and at those that are
    stopping.
    """
    found = _Found()
    for name, one in sorted(slices.items()):
        place = f"slice {name[:100]!r}"
        try:
            port = _port_of(one, spec.port)
        except WatchError as error:
            if one.endpoints:
                found.refused.append(f"{place}: {error}")
            continue
        for endpoint in one.endpoints or ():
            stopping = endpoint.conditions.terminating is True
            if not (stopping or endpoint.conditions.ready is not False):
                continue
            if not endpoint.addresses:
                continue
            address = endpoint.addresses[0]  # the others are the same endpoint
            host = f"{spec.service}.{spec.namespace}.svc"
            try:
                worker = spec.template.at(address, port, host)
                if spec.revision_label is not None:
                    worker = _with_revision(worker, one.metadata.labels or {}, spec.revision_label)
                found.add(worker, stopping)
            except WorkerSpecError as error:
                found.refused.append(f"{place}: {address[:100]!r}: {error}")
    return found.report()


@dataclass(slots=True)
class _Found:
    """Collects workers by their URL. A URL that several endpoints have gets the best of their
    states.
    """

    by_url: dict[str, ReportedWorker] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def add(self, worker: WorkerSpec, stopping: bool) -> None:
        before = self.by_url.get(worker.url)
        if before is None or (before.stopping and not stopping):
            self.by_url[worker.url] = ReportedWorker(worker, stopping)

    def report(self) -> Report:
        return bounded(list(self.by_url.values()), self.refused)


def _port_of(one: Slice, name: str | None) -> int:
    """Return the number of the TCP port with this name in a slice, or of its only TCP port if
    `name` is None. Raises WatchError if there is not exactly one such port.
    """
    if one.address_type not in ("IPv4", "IPv6"):
        raise WatchError(f"addresses of type {one.address_type[:40]!r}; known: IPv4, IPv6")
    ports = [p for p in one.ports or () if p.port is not None and p.protocol in (None, "TCP")]
    if name is not None:
        ports = [p for p in ports if p.name == name]
    if len(ports) != 1:
        names = ", ".join(repr(p.name) for p in one.ports or ())[:200] or "none"
        wanted = "one of these behind the service: SERVICE:PORTNAME" if name is None else repr(name)
        raise WatchError(f"wanted: {wanted}; its TCP ports: {names}")
    port = ports[0].port
    assert port is not None
    if not 0 < port <= 65_535:
        raise WatchError(f"port {port}")
    return port


_MAX_POOLS = 8  # most pools in an answer; one of them has the requested name
_MAX_PORTS = 8
_MAX_LABELS = 64
_MAX_NAME_CHARS = 253  # longest name of an object in Kubernetes
_MAX_PRIORITY = 999_999_999  # as in `picker.objectives`
_MAX_LEFT_OUT_NAMED = 5
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """The selector and ports that an InferencePool gives for its pods."""

    selector: str  # as the API takes it
    ports: tuple[int, ...]  # 1 to 8


def terms_of(pool: InferencePool) -> PoolTerms:
    """Return the selector and ports of a pool. Raises WatchError for a pool that the API should
    have rejected.
    """
    labels = pool.spec.selector.match_labels or {}
    fit = all(_KEY.fullmatch(k) and _VALUE.fullmatch(v) for k, v in labels.items())
    if not fit or not 1 <= len(labels) <= _MAX_LABELS:
        raise WatchError(f"spec.selector.matchLabels: wanted are 1 to {_MAX_LABELS} labels")
    ports = tuple(port.number for port in pool.spec.target_ports)
    if not 1 <= len(ports) <= _MAX_PORTS or len(set(ports)) != len(ports):
        raise WatchError(f"spec.targetPorts: wanted are 1 to {_MAX_PORTS} different ones")
    if not all(0 < port <= 65_535 for port in ports):
        raise WatchError("spec.targetPorts: allowed: 1..65535")
    return PoolTerms(",".join(f"{k}={v}" for k, v in sorted(labels.items())), ports)


class InferencePoolSource:
    """Reads workers from the pods of an InferencePool, and the pool's objectives; each target port
    of a pod is a worker. Lifetime: as long as the configuration names the source.
    """

    def __init__(
        self,
        spec: InferencePoolSpec,
        connect: Connect | None = None,
        draw: Draw = random.random,
        objectives: bool = False,
    ) -> None:
        """Make a source for the pool in `spec`. `connect` connects to another API server than the
        one that the environment names. `objectives` says whether to read the pool's objectives, for
        which the router needs an additional permission.
        """
        self._spec = spec
        self._wants_objectives = objectives
        self._connect = connect
        self._draw = draw
        self._terms: PoolTerms | None = None
        self._trouble = ""  # with the pool itself
        self._known: dict[str, ReportedWorker] = {}  # by URL, those not ready among them

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report whenever the workers, the objectives or the problems with the
        API change.
        """
        followed = FollowedCollections(self._connect, self._draw)
        pools = followed.begin(pools_of(self._spec))
        wanted = self._wants_objectives
        objectives = followed.begin(objectives_of(self._spec)) if wanted else None
        pods: Collection[Pod] | None = None
        told: Report | None = None
        try:
            while True:
                await followed.changed()
                if self._look_at(pools):
                    if pods is not None:
                        await followed.end(pods)
                    pods = followed.begin(pods_of(self._spec, self._terms)) if self._terms else None
                for report in self._due_reports(pools, pods):
                    if objectives is not None:
                        report = with_objectives(report, objectives, self._spec)
                    if report != told:
                        told = report
                        yield report
        finally:
            await followed.end()

    def _look_at(self, pools: Collection[InferencePool]) -> bool:
        """Use the selector and ports of the pool from now on. Return whether the selector has
        changed, so that other pods have to be followed.
        """
        if pools.objects is None or not pools.current:
            return False
        before, self._trouble = self._terms, ""
        pool = pools.objects.by_name.get(self._spec.name)
        if pool is None:
            self._terms = None
            self._trouble = f"no InferencePool {self._spec.namespace}/{self._spec.name}"
        else:
            try:
                self._terms = terms_of(pool)
            except WatchError as error:  # the earlier answer stays valid
                self._trouble = f"InferencePool {self._spec.namespace}/{self._spec.name}: {error}"
        then = before and before.selector
        return then != (self._terms and self._terms.selector)

    def _due_reports(
        self, pools: Collection[InferencePool], pods: Collection[Pod] | None
    ) -> list[Report]:
        """Return the reports that are due now. A worker whose pod or pool was deleted is reported
        as stopping before it is left out. So the fleet can tell a deletion from an outage, in which
        workers are missing without having been reported as stopping.
        """
        trouble = pools.trouble or self._trouble
        if self._terms is None:
            if pools.objects is None or not pools.current:
                return [Report(None, trouble)] if trouble else []
            report, unready = Report((), trouble), dict[str, ReportedWorker]()
        elif pods is None or pods.objects is None or not pods.current:
            trouble = (pods and pods.trouble) or trouble
            return [Report(None, trouble)] if trouble else []
        else:
            report, unready = workers_in(pods.objects.by_name, self._terms, self._spec)
            report = replace(report, trouble=pods.trouble or trouble)
        now = report.workers or ()
        here = unready | {one.spec.url: one for one in now}
        gone = [one for url, one in self._known.items() if url not in here]
        self._known = here
        if all(one.stopping for one in gone):
            return [report]
        stopping = (replace(one, stopping=True) for one in gone)
        return [replace(report, workers=(*now, *stopping)), report]


def pools_of(spec: InferencePoolSpec) -> Resource[InferencePool]:
    """Return the InferencePool itself as a resource that the router lists and watches."""
    return Resource(
        InferencePool,
        f"/apis/{GROUP}/v1/namespaces/{spec.namespace}/inferencepools",
        f"inferencepools of {GROUP}/v1",
        _MAX_POOLS,
        {"fieldSelector": f"metadata.name={spec.name}"},
    )


def pods_of(spec: InferencePoolSpec, terms: PoolTerms) -> Resource[Pod]:
    """Return the pods of the pool as a resource that the router lists and watches."""
    path = f"/api/v1/namespaces/{spec.namespace}/pods"
    return Resource(Pod, path, "pods", MAX_PODS, {"labelSelector": terms.selector})


def objectives_of(spec: InferencePoolSpec) -> Resource[InferenceObjective]:
    """Return the InferenceObjectives in the pool's namespace as a resource that the router lists
    and watches. Many clusters do not have this kind of object.
    """
    return Resource(
        InferenceObjective,
        f"/apis/{OBJECTIVES_GROUP}/v1alpha2/namespaces/{spec.namespace}/inferenceobjectives",
        f"inferenceobjectives of {OBJECTIVES_GROUP}/v1alpha2",
        _MAX_LISTED_OBJECTIVES,
        optional=True,
    )


def with_objectives(
    report: Report, objectives: Collection[InferenceObjective], spec: InferencePoolSpec
) -> Report:
    """Return the report with the priorities of the pool's latest objectives, and with a text about
    objectives that cannot be used.
    """
    report = replace(report, trouble=report.trouble or objectives.trouble)
    if objectives.objects is None:
        return report
    priorities, left_out = priorities_in(objectives.objects.by_name, spec)
    refused = (left_out, *report.refused) if left_out else report.refused
    return replace(report, refused=refused, objectives=priorities)


def priorities_in(
    objectives: Mapping[str, InferenceObjective], spec: InferencePoolSpec
) -> tuple[dict[str, int], str]:
    """Return the priorities of the pool's objectives by name, and a line on the objectives that are
    left out, with reasons. In Kubernetes a higher number goes first, in this router a lower one, so
    the sign is reversed.
    """
    found: dict[str, int] = {}
    left_out: list[str] = []
    pool = PoolReference(spec.name)
    for name, one in sorted(objectives.items()):
        if one.spec.pool_ref != pool or one.metadata.deletion_timestamp is not None:
            continue
        priority = one.spec.priority or 0
        if not 1 <= len(name) <= _MAX_NAME_CHARS:
            left_out.append(f"{name[:40]!r}: a name has 1 to {_MAX_NAME_CHARS} characters")
        elif abs(priority) > _MAX_PRIORITY:
            most = _MAX_PRIORITY
            left_out.append(f"{name[:100]!r}: priority {priority}; allowed: {-most}..{most}")
        elif len(found) == MAX_OBJECTIVES:
            left_out.append(f"{name[:100]!r}: at most {MAX_OBJECTIVES} are taken")
        else:
            found[name] = -priority
    if not left_out:
        return found, ""
    first = "; ".join(left_out[:_MAX_LEFT_OUT_NAMED])
    return found, f"InferenceObjectives left out: {len(left_out)}; {first}"


def workers_in(
    pods: Mapping[str, Pod], terms: PoolTerms, spec: InferencePoolSpec
) -> tuple[Report, dict[str, ReportedWorker]]:
    """Return a report of the workers whose pods are ready or stopping, and, by URL, those whose
    pods are not ready.
    """
    found = _Found()
    unready: dict[str, ReportedWorker] = {}
    for name, pod in sorted(pods.items()):
        address = pod.status.pod_ip
        if not address:
            continue
        for rank, port in enumerate(terms.ports):
            if port not in _active(pod, terms.ports):
                continue
            try:
                worker = _worker_of(pod, address, port, rank, spec)
            except (WorkerSpecError, WatchError) as error:
                found.refused.append(f"pod {name[:100]!r}: {error}")
                break
            if pod.stopping or pod.ready:
                found.add(worker, pod.stopping)
            else:
                unready[worker.url] = ReportedWorker(worker)
    return found.report(), unready


def _with_revision(worker: WorkerSpec, labels: Labels, key: str) -> WorkerSpec:
    """Return the worker with the revision in the pod's label `key`, unless the source names a
    revision. Raises WorkerSpecError for an invalid revision.
    """
    named = labels.get(key)
    return worker if worker.revision or not named else replace(worker, revision=named)


def _active(pod: Pod, ports: tuple[int, ...]) -> frozenset[int]:
    """Return the pool's ports that the pod's annotation lists; all ports if it has no
    annotation.
    """
    notes = pod.metadata.annotations or Annotations()
    text = notes.older_ports if notes.ports is None else notes.ports
    if text is None:
        return frozenset(ports)
    named = {part.strip() for part in text.split(",")}
    return frozenset(port for port in ports if str(port) in named)


_ROLE_LABEL = "llm-d.ai/role"
# Roles of llm-d's pods; a pod that only encodes serves none of the router's requests.
_ROLES: Mapping[str, Literal["both", "prefill", "decode"]] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "encode-decode": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
}
_POD_KEYS = (  # that a pod may say of itself
    *("kind", "model", "block_size", "kv_tokens", "events", "replay", "topic", "role", "group"),
    *("revision", "transfer", "bootstrap_port"),
    *("max_requests", "max_queued_tokens", "max_kv_fraction", "weight"),
)


def _worker_of(pod: Pod, address: str, port: int, rank: int, spec: InferencePoolSpec) -> WorkerSpec:
    """Return the worker at one port of a pod. Its options come from the source, the label of its
    role, and the pod's annotation. `rank` is the position of the port among the pool's ports; it is
    added to the ports of KV events, as for data-parallel ranks. Raises WorkerSpecError or
    WatchError for invalid options.
    """
    labels = pod.metadata.labels or {}
    options = (pod.metadata.annotations or Annotations()).worker
    worker = spec.template.at(address, port, f"{spec.name}.{spec.namespace}.svc")
    if (role := labels.get(_ROLE_LABEL)) is not None:
        if role not in _ROLES:
            known = ", ".join(_ROLES)
            raise WatchError(f"{_ROLE_LABEL} is {role[:40]!r}; known: {known}")
        worker = replace(worker, role=_ROLES[role])
    worker = _with_revision(worker, labels, spec.revision_label or REVISION_LABEL)
    if not options:
        return worker
    host = f"[{address}]" if ":" in address else address
    own = parse_worker_spec(f"{worker.url},{options.replace('tcp://*:', f'tcp://{host}:')}")
    said = {e.name for e in fields(own) if getattr(own, e.name) != e.default} - {"url"}
    for name in said - set(_POD_KEYS):
        raise WatchError(f"warmroute.io/worker has {name}; allowed: {', '.join(_POD_KEYS)}")
    for name in ("events", "replay"):
        where = getattr(own, name)
        if where not in (None, "none", POLL) and not where.startswith(f"tcp://{host}:"):
            raise WatchError(f"warmroute.io/worker: {name} is at its own pod: tcp://*:PORT")
    own = replace(of_rank(own, rank), rank=None)
    return replace(worker, **{name: getattr(own, name) for name in said})
