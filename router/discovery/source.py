"""A source of workers as an operator names it (`KIND:WHERE,key=value,...`), and what it reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from router.engines.spec import POLL, WorkerSpec, WorkerSpecError
from router.engines.worker_spec import worker_spec_of
from router.fleet.sources import Report, ReportedWorker

FORMS = (
    "file:PATH, dns:NAME:PORT[,every=5][,scheme=https], redis, "
    "kubernetes:NAMESPACE/SERVICE[:PORTNAME], inferencepool:NAMESPACE/NAME, "
    "trtllm:PATH[,listen=HOST:PORT][,token_file=FILE]"
)
SCHEMES = ("http", "https")
MAX_CHARACTERS = 4_096
EVERY_S = (0.1, 3_600.0)
_EXAMPLE = "worker.invalid"  # stands for the workers in what all of them are given
_OF_ONE = ("url", "rank", "replay", "topic", "metrics", "server_name")  # never of all
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_DNS = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


class SourceSpecError(ValueError):
    """Raised for a source that cannot be used; the message says why, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Template:
    """The options that all workers of one source share."""

    spec: WorkerSpec

    def at(self, host: str, port: int, name: str | None = None) -> WorkerSpec:
        """Return the worker at an address. `name` is the name in the worker's certificate. Raises
        WorkerSpecError for an invalid address.
        """
        scheme = self.spec.url.partition(":")[0]
        shown = f"[{host}]" if ":" in host else host
        named = name if scheme == "https" and not self.spec.insecure else None
        return replace(self.spec, url=f"{scheme}://{shown}:{port}", server_name=named)

    @property
    def options(self) -> str:
        """The options as text, as an operator writes them after a source."""
        url, _, options = str(self.spec).partition(",")
        scheme = [] if url.startswith("http:") else ["scheme=https"]
        return ",".join(["", *scheme, *([options] if options else [])])


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Names as a source a file of workers, which is read again whenever it changes."""

    path: str

    def __str__(self) -> str:
        return f"file:{self.path}"


@dataclass(frozen=True, slots=True)
class DnsSpec:
    """Names as a source a DNS name with several addresses, each of which is a worker."""

    name: str
    port: int  # 1..65535
    every_s: float  # between two questions
    template: Template

    def __str__(self) -> str:
        return f"dns:{self.name}:{self.port},every={self.every_s:g}{self.template.options}"


@dataclass(frozen=True, slots=True)
class RedisSpec:
    """Names as a source the workers that announce themselves in the Redis of `state`."""

    def __str__(self) -> str:
        return "redis"


@dataclass(frozen=True, slots=True)
class KubernetesSpec:
    """Names as a source the endpoints of a Kubernetes service."""

    namespace: str
    service: str
    port: str | None  # by name; None: the only one there is
    template: Template
    revision_label: str | None = None  # of its slices, that names their revision; None: none does

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        options = f"{_shown_label(self.revision_label)}{self.template.options}"
        return f"kubernetes:{self.namespace}/{self.service}{port}{options}"


@dataclass(frozen=True, slots=True)
class InferencePoolSpec:
    """Names as a source the pods of an InferencePool; each target port of a pod is a worker."""

    namespace: str
    name: str
    template: Template
    revision_label: str | None = None  # of its pods, that names their revision; None: the usual

    def __str__(self) -> str:
        options = f"{_shown_label(self.revision_label)}{self.template.options}"
        return f"inferencepool:{self.namespace}/{self.name}{options}"


@dataclass(frozen=True, slots=True)
class TrtllmSpec:
    """Names as a source TensorRT-LLM's disaggregation YAML, and the store at which its workers may
    announce themselves.
    """

    path: str
    host: str = ""  # where the store listens; empty: loopback
    port: int = 0  # and its port; 0: as `disagg_cluster.cluster_uri` says
    token_file: str | None = None  # its first line is the bearer token that workers need

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        listen = f",listen={host}:{self.port}" if self.host else ""
        token = "" if self.token_file is None else f",token_file={self.token_file}"
        return f"trtllm:{self.path}{listen}{token}"


SourceSpec = FileSpec | DnsSpec | RedisSpec | KubernetesSpec | InferencePoolSpec | TrtllmSpec


def parse_source(text: str) -> SourceSpec:
    """Return the source that a text describes; `str` of the source gives an equal text. Raises
    SourceSpecError for an invalid text.
    """
    if len(text) > MAX_CHARACTERS:
        raise SourceSpecError(f"longer than {MAX_CHARACTERS} characters")
    kind, colon, where = text.partition(":")
    if kind == "file" and where:
        return FileSpec(where)
    if text == "redis":
        return RedisSpec()
    if kind == "dns" and colon:
        return _dns(where)
    if kind == "kubernetes" and colon:
        return _kubernetes(where)
    if kind == "inferencepool" and colon:
        return _inference_pool(where)
    if kind == "trtllm" and where:
        return _trtllm(where)
    raise SourceSpecError(f"{text[:80]!r} is no source of workers; allowed: {FORMS}")


def _dns(where: str) -> DnsSpec:
    place, options = _options(where)
    name, colon, port = place.rpartition(":")
    if not colon or not _DNS.fullmatch(name):
        raise SourceSpecError(f"dns:{place} is not of the form dns:NAME:PORT")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= 65_535):
        raise SourceSpecError(f"dns:{place}: the port is {port[:20]!r}; allowed: 1..65535")
    every = options.pop("every", "5")
    try:
        every_s = float(every)
    except ValueError:
        every_s = -1.0
    if not EVERY_S[0] <= every_s <= EVERY_S[1]:
        raise SourceSpecError(f"every is {every[:20]!r}; allowed: 0.1..3600 seconds")
    return DnsSpec(name, int(port), every_s, _template(options))


def _kubernetes(where: str) -> KubernetesSpec:
    place, options = _options(where)
    namespace, slash, rest = place.partition("/")
    service, colon, port = rest.partition(":")
    names = [namespace, service, *([port] if colon else [])]
    if not slash or not all(_LABEL.fullmatch(name) for name in names):
        raise SourceSpecError(
            f"kubernetes:{place} is not of the form kubernetes:NAMESPACE/SERVICE[:PORTNAME]"
        )
    label = _revision_label(options)
    return KubernetesSpec(namespace, service, port or None, _template(options), label)


def _inference_pool(where: str) -> InferencePoolSpec:
    place, options = _options(where)
    namespace, slash, name = place.partition("/")
    if not slash or not all(_LABEL.fullmatch(one) for one in (namespace, name)):
        raise SourceSpecError(
            f"inferencepool:{place} is not of the form inferencepool:NAMESPACE/NAME"
        )
    label = _revision_label(options)
    return InferencePoolSpec(namespace, name, _template(options), label)


def _trtllm(where: str) -> TrtllmSpec:
    path, options = _options(where)
    listen, token_file = options.pop("listen", None), options.pop("token_file", None)
    if options or not path or token_file == "":
        wrong = ", ".join(options) or "an empty name"
        raise SourceSpecError(f"trtllm:{path} has {wrong}; options: listen, token_file")
    if listen is None:
        return TrtllmSpec(path, token_file=token_file)
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= 65_535):
        raise SourceSpecError(f"listen is {listen[:80]!r}; allowed: HOST:PORT")
    return TrtllmSpec(path, host, int(port), token_file)


def _options(where: str) -> tuple[str, dict[str, str]]:
    place, *given = (part.strip() for part in where.split(","))
    options: dict[str, str] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or key in options:
            raise SourceSpecError(f"{one!r} {'is given twice' if equals else 'is not key=value'}")
        options[key] = value
    return place, options


def _revision_label(options: dict[str, str]) -> str | None:
    """Take the option `revision_label` out of a source's options, and return its value."""
    label = options.pop("revision_label", None)
    if label is not None and not _LABEL_KEY.fullmatch(label):
        raise SourceSpecError(f"revision_label is {label[:80]!r}; allowed: the key of a label")
    return label


def _shown_label(label: str | None) -> str:
    return "" if label is None else f",revision_label={label}"


def _template(options: dict[str, str]) -> Template:
    scheme = options.pop("scheme", "http")
    if scheme not in SCHEMES:
        raise SourceSpecError(f"scheme is {scheme[:20]!r}; allowed: {', '.join(SCHEMES)}")
    for key in options:
        if key in _OF_ONE or (key == "events" and options[key] not in ("none", POLL)):
            raise SourceSpecError(f"{key}={options[key]} is of one worker; a source has several")
    try:
        return Template(worker_spec_of({"url": f"{scheme}://{_EXAMPLE}", **options}))
    except WorkerSpecError as error:
        own = ", ".join(e.name for e in fields(WorkerSpec) if e.name not in _OF_ONE)
        raise SourceSpecError(f"{error}; options: every, scheme, {own}") from error


MAX_SEEN = 4_096  # most workers of one source, and of a router
_REFUSED_MAX = 100


def bounded(seen: list[ReportedWorker], refused: list[str], trouble: str = "") -> Report:
    """Return a report of at most `MAX_SEEN` workers; the report names the others as left out."""
    if len(seen) > MAX_SEEN:
        first = seen[MAX_SEEN].spec.name
        refused = [f"{len(seen) - MAX_SEEN} workers beyond {MAX_SEEN}, from {first}", *refused]
        seen = seen[:MAX_SEEN]
    if len(refused) > _REFUSED_MAX:
        more = len(refused) - _REFUSED_MAX
        refused = [*refused[:_REFUSED_MAX], f"and {more} more"]
    return Report(tuple(seen), trouble, tuple(refused))
