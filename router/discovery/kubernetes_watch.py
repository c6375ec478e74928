"""Lists objects of a Kubernetes API once, and then watches them. A watch that breaks is continued
from the latest version. The objects are listed again only if the server has forgotten that version
(410) or sends an invalid answer. While the API is unreachable, the latest known objects stay valid.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar

import aiohttp
import msgspec

from router.engines.worker_spec import MAX_SPEC_CHARACTERS

_MAX_PORTS_CHARACTERS = 1_000
OLD = 410  # "Gone": the requested version is too old, so list everything again


Labels = dict[str, str | None]


class Annotations(msgspec.Struct):
    """The annotations of a pod that say how to reach it. If the annotation for `ports` is missing,
    its older name is used.
    """

    worker: str | None = msgspec.field(default=None, name="warmroute.io/worker")
    ports: str | None = msgspec.field(default=None, name="llm-d.ai/active-ports")
    older_ports: str | None = msgspec.field(
        default=None, name="inference.networking.k8s.io/active-ports"
    )

    def __post_init__(self) -> None:
        """Cut each value just beyond its limit, so that too long values can still be detected."""
        self.worker = self.worker and self.worker[: MAX_SPEC_CHARACTERS + 1]
        self.ports = self.ports and self.ports[:_MAX_PORTS_CHARACTERS]
        self.older_ports = self.older_ports and self.older_ports[:_MAX_PORTS_CHARACTERS]


class Meta(msgspec.Struct, rename="camel"):
    """The metadata of a Kubernetes object, without the fields that the router does not read."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None
    next_page: str = msgspec.field(default="", name="continue")  # of a list


class Named(Protocol):
    """Any object of the Kubernetes API."""

    @property
    def metadata(self) -> Meta:
        """The metadata of the Kubernetes object."""


Kind = TypeVar("Kind", bound=Named)


class Listed(msgspec.Struct, Generic[Kind]):
    """The API server's answer to a list request, or one page of the answer."""

    metadata: Meta
    items: tuple[Kind, ...] | None = None


class Event(msgspec.Struct):
    """An event of a watch, which the API server sends as one line."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Marked(msgspec.Struct):
    """An object of which the router reads only the name and version."""

    metadata: Meta


class Status(msgspec.Struct):
    """The object in an ERROR event of a watch."""

    code: int = 0
    reason: str = ""
    message: str = ""


class TooOldError(Exception):
    """Raised if the API server no longer has the requested version; the objects must be listed
    again.
    """


class WatchError(ValueError):
    """Raised for an answer that does not come from a Kubernetes API, or that cannot be used."""


class NotInstalledError(WatchError):
    """Raised if the API does not know the kind of the requested objects."""


@dataclass(frozen=True, slots=True)
class Resource(Generic[Kind]):
    """A kind of Kubernetes object, and which objects of it to list and watch."""

    kind: type[Kind]
    path: str
    name: str  # plural and group, for people
    most: int
    selectors: Mapping[str, str] = field(default_factory=dict)  # `labelSelector`, `fieldSelector`
    optional: bool = False  # an API that does not know the kind is well

    def decode_list(self, data: bytes) -> Listed[Kind]:
        """Decode the answer to a list request. Raises WatchError for an invalid answer."""
        try:
            listed = msgspec.json.decode(data, type=Listed[self.kind])  # type: ignore[name-defined]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise WatchError(f"no list of {self.name}: {error}") from error
        assert isinstance(listed, Listed)
        return listed


class Objects(Generic[Kind]):
    """All objects of a resource after the latest event. Lifetime: from one list to the next."""

    def __init__(self, resource: Resource[Kind], version: str, items: Iterable[Kind]) -> None:
        """Take the objects of one list answer, as of `version`. Raises WatchError if there are too
        many objects.
        """
        self.version = version
        self.by_name: dict[str, Kind] = {one.metadata.name: one for one in items}
        self._resource = resource
        self._check_number()

    def apply(self, line: bytes) -> bool:
        """Apply one event of a Kubernetes watch, and return True if an object was added, modified
        or deleted. `line` is the event as JSON. Raises TooOldError if the API server no longer has
        the version from which the watch starts. Raises WatchError for any other error, or an event
        that cannot be read.
        """
        one: Kind | Marked
        try:
            event = msgspec.json.decode(line, type=Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                if status.code == OLD:
                    raise TooOldError(status.message)
                raise WatchError(f"the watch ended: {status.code} {status.reason[:80]}")
            whole = event.type in ("ADDED", "MODIFIED")
            kind: type[Any] = self._resource.kind if whole else Marked
            one = msgspec.json.decode(event.object, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise WatchError(f"no event of {self._resource.name}: {error}") from error
        self.version = one.metadata.resource_version or self.version
        if event.type == "BOOKMARK":
            return False
        if isinstance(one, Marked):
            self.by_name.pop(one.metadata.name, None)
        else:
            self.by_name[one.metadata.name] = one
            self._check_number()
        return True

    def _check_number(self) -> None:
        most = self._resource.most
        if len(self.by_name) > most:
            raise WatchError(f"more than {most} {self._resource.name}")


MISSING = (
    "kubernetes_asyncio is not installed: pip install 'kubernetes_asyncio>=36' "
    "(or '.[kubernetes]' in the checkout)"
)
_AGAIN_S = (0.2, 5.0)  # after a failure; doubles, and half of it is drawn
_LASTING_S = 1.0  # a watch that was open and quiet for so long counts as working, seconds
_ANSWER_S = 10.0  # timeout for a page of a list, or for the headers of a watch, seconds
_WATCH_S = 60  # the server ends a watch after this time; it continues from its latest version
_SILENT_S = _WATCH_S + 15.0
_PAGE = 500  # objects in one page of a list
_MAX_LIST_BYTES = 32 << 20  # of one page
_MAX_LINE_BYTES = 4 << 20

log = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[Any]]  # an ApiClient
Draw = Callable[[], float]  # 0..1


class Collection(Generic[Kind]):
    """Keeps the objects of a resource up to date with the API. `objects` is None before the first
    list. `trouble` says what is wrong, and is empty if nothing is wrong. `current` is True if the
    API is reachable and the objects are its latest. Lifetime: as long as the resource is followed.
    """

    def __init__(
        self, resource: Resource[Kind], connect: Connect, changed: Callable[[], None], draw: Draw
    ) -> None:
        """Make a collection without objects. `changed` is called after each change of a public
        attribute. `draw` returns random numbers for the lengths of pauses.
        """
        self.objects: Objects[Kind] | None = None
        self.trouble = ""
        self.current = False
        self._resource = resource
        self._connect = connect
        self._changed = changed
        self._draw = draw
        self._pause_s = _AGAIN_S[0]
        self._stale = True  # a list is needed before a watch
        self._told_missing = False  # of an optional kind

    async def follow(self) -> NoReturn:
        """Follow the API until cancelled. A failure sets `trouble`, and the request is
        tried again.
        """
        while True:
            try:
                client = await self._connect()
                try:
                    await self._until_broken(client)
                finally:
                    await client.close()
            except ImportError as error:
                if not (error.name or "").startswith("kubernetes_asyncio"):
                    raise
                trouble = MISSING
            except WatchError as error:
                self._stale = True
                trouble = str(error)
                if self._resource.optional and isinstance(error, NotInstalledError):
                    if not self._told_missing:
                        log.info("Kubernetes API: %s", error)
                    self._told_missing, trouble = True, ""
            except (OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
                trouble = str(error) or type(error).__name__
            except Exception as error:  # the library's own kinds, which are imported lazily
                if not type(error).__module__.startswith("kubernetes_asyncio"):
                    raise
                trouble = _reason(error)
            self.trouble, self.current = trouble and f"Kubernetes API: {trouble}", False
            self._changed()
            await self._rest()

    async def _until_broken(self, client: Any) -> NoReturn:
        while True:
            if self._stale or self.objects is None:
                self.objects = await self._list(client)
                self._stale, self.current, self._told_missing = False, True, False
                self._changed()
            try:
                lasted = await self._watch(client, self.objects)
            except TooOldError:
                self._stale, lasted = True, False
            if not lasted:  # a server that ends each watch at once is not asked without a pause
                await self._rest()

    async def _rest(self) -> None:
        await asyncio.sleep(self._pause_s * (1.0 + self._draw()) / 2.0)
        self._pause_s = min(2.0 * self._pause_s, _AGAIN_S[1])

    async def _watch(self, client: Any, objects: Objects[Kind]) -> bool:
        """Watch from the latest version until the watch ends, and return whether the watch
        delivered anything. Raises TooOldError if the API server no longer has that version.
        """
        async with asyncio.timeout(_ANSWER_S):
            reply = await self._request(
                client,
                watch="true",
                resourceVersion=objects.version,
                allowWatchBookmarks="true",
                timeoutSeconds=_WATCH_S,
            )
        loop = asyncio.get_running_loop()
        began_s, of_use = loop.time(), False
        try:
            self._check(reply.status)
            if self.trouble or not self.current:
                self.trouble, self.current = "", True
                self._changed()
            async for line in _lines(reply.content):
                changed = objects.apply(line)
                of_use = True
                if changed:
                    self._changed()
        finally:
            reply.close()
            if of_use := of_use or loop.time() - began_s >= _LASTING_S:
                self._pause_s = _AGAIN_S[0]
        return of_use

    async def _list(self, client: Any) -> Objects[Kind]:
        """Return the objects of all pages of a list. Raises WatchError for an invalid answer, or
        TooOldError if a page was requested too late.
        """
        items: list[Kind] = []
        page = ""
        while True:
            more = {"continue": page} if page else {}
            async with asyncio.timeout(_ANSWER_S):
                reply = await self._request(client, limit=_PAGE, **more)
                try:
                    self._check(reply.status)
                    data = bytearray()
                    async for part in reply.content.iter_any():
                        data += part
                        if len(data) > _MAX_LIST_BYTES:
                            raise WatchError(f"a list of more than {_MAX_LIST_BYTES} bytes")
                finally:
                    reply.close()
            listed = self._resource.decode_list(bytes(data))
            items.extend(listed.items or ())
            page = listed.metadata.next_page
            if not page or len(items) > self._resource.most:
                return Objects(self._resource, listed.metadata.resource_version, items)

    async def _request(self, client: Any, **options: Any) -> aiohttp.ClientResponse:
        reply = await client.call_api(
            self._resource.path,
            "GET",
            query_params=[*self._resource.selectors.items(), *options.items()],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=_SILENT_S,
        )
        assert isinstance(reply, aiohttp.ClientResponse)
        return reply

    def _check(self, status: int) -> None:
        """Raise TooOldError or WatchError for a bad status, or OSError if the same request may
        succeed a little later.
        """
        name = self._resource.name
        if status == OLD:
            raise TooOldError("410")
        if status in (401, 403):
            raise WatchError(f"{status}: the account may not list and watch {name} here")
        if status == 404:
            raise NotInstalledError(f"404: it knows no {name}: is that kind installed?")
        if status == 429 or status >= 500:
            raise OSError(f"it answers {status}")
        if status != 200:
            raise WatchError(f"it answers {status}")


async def _connect() -> Any:
    """Return an ApiClient with the configuration of the pod's service account, or else of
    kubeconfig.
    """
    # Half a second of reading modules, which must not stop the event loop.
    client = await asyncio.to_thread(import_module, "kubernetes_asyncio.client")
    config = await asyncio.to_thread(import_module, "kubernetes_asyncio.config")
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    return client.ApiClient()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an answer without their line ends. Raises WatchError for a line that is
    too long.
    """
    rest = bytearray()
    async for part in content.iter_any():
        rest += part
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > _MAX_LINE_BYTES:
            raise WatchError(f"an event of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield bytes(line)


def _reason(error: Exception) -> str:
    """Return a short text about an error, because the text of the library's errors contains whole
    answers.
    """
    status = getattr(error, "status", None)
    return f"it answers {status}" if status else f"{type(error).__name__}: {str(error)[:200]}"


class FollowedCollections:
    """The collections that a source follows at the same time. Lifetime: one run of a source."""

    def __init__(self, connect: Connect | None, draw: Draw) -> None:
        self._connect = connect or _connect
        self._draw = draw
        self._news = asyncio.Event()
        self._tasks: dict[Collection[Any], asyncio.Task[NoReturn]] = {}

    def begin(self, resource: Resource[Kind]) -> Collection[Kind]:
        """Begin to follow one more resource, and return its collection."""
        one = Collection(resource, self._connect, self._news.set, self._draw)
        task = asyncio.create_task(one.follow(), name=f"watch {resource.path}")
        task.add_done_callback(lambda _: self._news.set())
        self._tasks[one] = task
        return one

    async def changed(self) -> None:
        """Wait until one of the collections has changed. If following a collection failed because
        of a defect, raise its error.
        """
        await self._news.wait()
        self._news.clear()
        for task in self._tasks.values():
            if task.done():
                task.result()

    async def end(self, *ones: Collection[Any]) -> None:
        """Stop following the given collections, or all collections if none is given."""
        tasks = [self._tasks.pop(one) for one in ones or tuple(self._tasks)]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
