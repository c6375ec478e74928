"""The two ends of a KV transfer: the worker that has a prompt's KV, and the worker that reads it.
Both ends run in the event loop of their worker; only copies are made in threads. The scheduler
keeps the states: `Scheduler.take_reads`, `Scheduler.end_read`, `Scheduler.exports`. A transfer sees
tensors only through `KvStore`; `ModelledKv` has no tensors, only their sizes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import xxhash

from engine.block_pool import Tokens
from engine.pins import Export, Exports
from engine.scheduler.request import Request, State
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Read as Wanted
from engine.timed import Clock
from engine.wire.kv_transfer import (
    MAX_PART_BYTES,
    PART_BYTES,
    VERSION,
    BadMessage,
    Beat,
    Copied,
    Done,
    Form,
    Hello,
    Message,
    Part,
    Place,
    Pool,
    ReadTokens,
    Refusal,
    Refused,
    Release,
    TransferParams,
    Welcome,
    frame,
    receive,
)


class KvStore(Protocol):
    """The KV of a worker, for transfers. Lifetime: worker. If `copies` is True, `pack`, `put` and
    `copy` are called in threads of their own.
    """

    @property
    def form(self) -> Form:
        """The properties of the KV that must be the same at both ends."""

    @property
    def block_tokens(self) -> int:
        """The number of tokens of a block."""

    @property
    def pools(self) -> Sequence[Pool]:
        """The memory that other processes of this host may map; empty if there is none."""

    @property
    def copies(self) -> bool:
        """True if `pack`, `put` and `copy` copy data, which takes a while."""

    def size(self, blocks: int) -> int:
        """Return the bytes of this many blocks, with their scales."""

    def pack(self, block_ids: Sequence[int]) -> bytes | memoryview:
        """Return the KV of these blocks in the order in which it is sent, whatever the order in the
        pool.
        """

    def put(
        self, data: bytes, block_tokens: int, first_block: int, blocks: int, place: Place
    ) -> None:
        """Write KV that another worker packed: `blocks` of its blocks of `block_tokens` tokens,
        from the prompt's block `first_block` on. Raises ValueError if the data have another size.
        """

    def copy(self, welcome: Welcome, place: Place) -> int:
        """Copy directly from the other worker's pools, and return the bytes copied. Raises OSError
        or ValueError.
        """


class ModelledKv:
    """KV of a timed worker, which only has a size. Lifetime: worker."""

    pools: Sequence[Pool] = ()
    copies = False

    def __init__(self, model: str, bytes_per_token: int, block_tokens: int) -> None:
        self.form = Form(model, 1, 1, bytes_per_token, "modelled")
        self.block_tokens = block_tokens

    def size(self, blocks: int) -> int:
        return blocks * self.block_tokens * self.form.row_bytes

    def pack(self, block_ids: Sequence[int]) -> bytes | memoryview:
        return b""

    def put(
        self, data: bytes, block_tokens: int, first_block: int, blocks: int, place: Place
    ) -> None:
        if data:
            raise ValueError(f"{len(data)} bytes of KV came where only their size is modelled")

    def copy(self, welcome: Welcome, place: Place) -> int:
        raise OSError("there is no memory to map: KV is modelled")


class Link:
    """The modelled network link of a worker, which sends one part after another. Lifetime: worker.
    `bytes_per_s` is its bandwidth; None sends as fast as the sockets allow. `latency_s` passes in
    each read before its first byte. Raises ValueError for invalid values.
    """

    def __init__(self, clock: Clock, bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        if bytes_per_s is not None and not 0.0 < bytes_per_s < float("inf"):
            raise ValueError(f"a link must carry more than 0 bytes/s, got {bytes_per_s}")
        if not 0.0 <= latency_s < float("inf"):
            raise ValueError(f"a link's latency must be 0 s or more, got {latency_s}")
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0  # when all that was given to it has left

    async def open(self) -> None:
        """Wait for as long as the link's latency, at the beginning of a read."""
        if self._latency_s:
            await self._clock.sleep_until(self._clock.now_s() + self._latency_s)

    async def carry(self, size: int, since_s: float) -> float:
        """Wait until the link has carried `size` bytes, which were ready at `since_s`, and all
        bytes before them; return that time. Pass it as `since_s` of the next part, so that delays
        do not add up.
        """
        if self._bytes_per_s is None:
            return since_s
        self._free_s = left_s = max(self._free_s, since_s) + size / self._bytes_per_s
        await self._clock.sleep_until(left_s)
        return left_s


HELLO_S = 5.0  # from connecting to the first message
STALL_S = 30.0  # without a message of the holder, while it sends
BEATS = 6  # in a lease
WAIT_LEASES = 10  # for so long a reader may wait for room
MAX_READERS = 4096
Transport = Literal["tcp", "shm"]
T = TypeVar("T")

log = logging.getLogger(__name__)


def digest(prompt: Tokens) -> int:
    """Return a digest of the token ids, by which two workers check that their tokenizers gave the
    same tokens for a prompt.
    """
    return xxhash.xxh3_64_intdigest(prompt.tobytes())


class Exporter:
    """Sends the KV of prompts that this worker has computed to workers that read it. Lifetime:
    worker. `on_free` is called when an export's blocks are released. If a prompt is still being
    computed, its blocks are sent as they become ready: call `stepped` after each step.
    """

    def __init__(
        self,
        exports: Exports,
        store: KvStore,
        engine_id: str,
        clock: Clock,
        link: Link,
        on_free: Callable[[Export], None],
    ) -> None:
        self.engine_id = engine_id
        self.sent_bytes_total = 0
        self.sent_total = 0  # prompts read whole and in time
        self.late_total = 0  # reads that ended after their lease was over: their readers were told
        self.refused: Counter[str] = Counter()  # by reason
        self._exports = exports
        self._store = store
        self._clock = clock
        self.link = link
        self._on_free = on_free
        self._lent: set[int] = set()  # generations that have a reader
        self._readers: set[asyncio.Task[None]] = set()
        self._step = asyncio.Event()  # set by the next step
        self._server: asyncio.Server | None = None

    @property
    def readers(self) -> int:
        """The number of open connections of readers."""
        return len(self._readers)

    @property
    def port(self) -> int:
        """The port on which readers connect."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def listen(self, host: str, port: int) -> None:
        """Accept connections of readers from now on. Raises OSError if the port is taken."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=1 << 20)

    async def close(self) -> None:
        """Disconnect all readers, which then compute their prompts themselves."""
        if self._server is not None:
            self._server.close()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def release(self, request_id: int, generation: int) -> bool:
        """Free an export that nobody will read. Return False if it is not held."""
        export = self._exports.find(request_id, generation)
        return export is not None and self._free(export)

    def release_named(self, name: str) -> bool:
        """Free KV by the name that the router gave it in its request. Return False if it is not
        held.
        """
        export = self._exports.named(name)
        return export is not None and self._free(export)

    def _free(self, export: Export) -> bool:
        was_held = self._exports.release(export)
        if was_held:
            self._on_free(export)
        return was_held

    def stepped(self) -> None:
        """Wake the transfers that wait for blocks, because a step may have computed more
        of them.
        """
        if self._lent:
            self._step.set()
            self._step = asyncio.Event()

    async def _accept(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            async with asyncio.timeout(HELLO_S):
                first = await receive(stream)
            if isinstance(first, Release):
                if first.engine_id == self.engine_id:
                    self.release(first.request_id, first.generation)
            elif isinstance(first, Hello):
                await self._greet(first, stream, writer)
            else:
                raise BadMessage(f"{type(first).__name__} where a reader says hello")
        except (BadMessage, asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            log.debug("a reader of KV left: %r", error)
        finally:
            self._readers.discard(task)
            writer.close()

    async def _greet(
        self, hello: Hello, stream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        export = self._found(hello)
        if isinstance(export, Refusal):
            self.refused[export.reason] += 1
            writer.write(frame(export))
            await writer.drain()
            return
        self._lent.add(export.generation)
        try:
            await self._lend(export, stream, writer)
        finally:
            # Whatever the result, this reader reads no more.
            self._lent.discard(export.generation)
            self._free(export)

    def _found(self, hello: Hello) -> Export | Refusal:
        """Return the export that a reader asks for, or the refusal to send it."""
        mine, its = self._store.form, hello.form
        if hello.version != VERSION:
            return _refusal("version", f"this worker speaks version {VERSION}")
        if hello.engine_id != self.engine_id:
            return _refusal("engine", "another worker is here now: it was started anew")
        if mine != its:
            return _refusal("model", _difference(mine, its))
        if self.readers > MAX_READERS:
            return _refusal("busy", f"{MAX_READERS} readers at once")
        export = self._exports.find(hello.request_id, hello.generation)
        if export is None:
            return _refusal("unknown", "its KV was given back: its lease is over, or it was read")
        if len(export.prompt) != hello.tokens or digest(export.prompt) != hello.prompt:
            return _refusal("prompt", "both workers made other tokens of the prompt")
        if export.generation in self._lent:
            return _refusal("in_use", "another worker reads it")
        return export

    async def _lend(
        self,
        export: Export,
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serve the reader of an export until it has ended or is gone."""
        exports, sending = self._exports, None
        # Memory is mapped once and whole, but a prompt that is being computed becomes ready block
        # by block.
        pools = [] if export.is_computing else list(self._store.pools)
        block_ids = export.block_ids if pools else []
        welcome = Welcome(self._store.block_tokens, exports.lease_s, block_ids, pools)
        writer.write(frame(welcome))
        # Two workers that wait for room in each other's leases must not do so for ever.
        until_s = self._clock.now_s() + WAIT_LEASES * exports.lease_s
        try:
            while True:
                now_s = self._clock.now_s()
                if sending is not None or now_s < until_s:
                    exports.extend(export, now_s)
                async with asyncio.timeout(exports.lease_s):
                    message = await receive(stream)
                if isinstance(message, Release):
                    return
                if isinstance(message, Copied):
                    self._finish(export, writer, 0)
                elif isinstance(message, ReadTokens):
                    if sending is not None or not self._can_read(export, message):
                        raise BadMessage("a read that cannot be")
                    if not message.is_mapped:
                        sending = asyncio.create_task(self._send(export, message, writer))
                elif not isinstance(message, Beat):
                    raise BadMessage(f"{type(message).__name__} from a reader")
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _can_read(self, export: Export, read: ReadTokens) -> bool:
        return 0 <= read.start < read.stop <= len(export.prompt)

    async def _send(self, export: Export, read: ReadTokens, writer: asyncio.StreamWriter) -> None:
        """Send the blocks that hold the tokens of `read`, in parts."""
        store, exports, sent = self._store, self._exports, 0
        first, last = read.start // store.block_tokens, -(-read.stop // store.block_tokens)
        each = max(1, PART_BYTES // store.size(1))
        start = first
        try:
            await self.link.open()
            left_s = self._clock.now_s()
            while start < last:
                if not self._has(export, start):
                    await self._wait_for(export, start, writer)
                    left_s = self._clock.now_s()
                if not exports.is_held(export):
                    break
                is_whole = export.ready_tokens >= len(export.prompt)
                ready = last if is_whole else export.ready_tokens // store.block_tokens
                stop = min(start + each, last, ready)
                data = await _apart(store, store.pack, export.block_ids[start:stop])
                left_s = await self.link.carry(store.size(stop - start), left_s)
                writer.write(frame(Part(start, stop, len(data))))
                if data:
                    writer.write(data)
                await writer.drain()
                exports.extend(export, self._clock.now_s())
                sent += store.size(stop - start)
                start = stop
            self._finish(export, writer, sent)
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("KV could not be sent")
            writer.close()  # its reader sees that no more data follow

    def _has(self, export: Export, block: int) -> bool:
        """Return whether the KV of a block of the export is computed."""
        needed = min((block + 1) * self._store.block_tokens, len(export.prompt))
        return export.ready_tokens >= needed

    async def _wait_for(self, export: Export, block: int, writer: asyncio.StreamWriter) -> None:
        """Wait until the KV of a block is computed or never will be, and send signs of life
        meanwhile.
        """
        while self._exports.is_held(export) and not self._has(export, block):
            try:
                async with asyncio.timeout(self._exports.lease_s / BEATS):
                    await self._step.wait()
            except TimeoutError:
                writer.write(frame(Beat()))

    def _finish(self, export: Export, writer: asyncio.StreamWriter, sent: int) -> None:
        """Tell the reader whether the KV that it read was this prompt's KV to the end."""
        valid = self._exports.is_held(export)
        self.sent_bytes_total += sent
        self.sent_total += valid
        self.late_total += not valid
        writer.write(frame(Done(valid, sent)))


def _refusal(reason: Refused, message: str) -> Refusal:
    return Refusal(reason, message)


def _difference(mine: Form, its: Form) -> str:
    """Return a text that names the fields in which the two workers differ, with both values."""
    names = [name for name in Form.__struct_fields__ if getattr(mine, name) != getattr(its, name)]
    found = [f"{name} {getattr(mine, name)!r:.40} and {getattr(its, name)!r:.40}" for name in names]
    return f"the KV here differs from the reader's: {', '.join(found)}"


async def _apart(store: KvStore, call: Callable[..., T], *given: Any) -> T:
    """Return the result of `call`. It runs in a thread if the store copies data, so that steps
    continue meanwhile.
    """
    if store.copies:
        return await asyncio.to_thread(call, *given)
    return call(*given)


async def _unbroken(copy: Coroutine[Any, Any, T]) -> T:
    """Return the result of `copy`. If this task is cancelled, first wait until `copy` has ended,
    because until then it writes to memory that no other request may get.
    """
    job = asyncio.ensure_future(copy)
    try:
        return await asyncio.shield(job)
    finally:
        while not job.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((job,))


def _forget(incoming: asyncio.Future[Message]) -> None:
    """Cancel the wait for a message that is no longer needed, and ignore its error."""
    if not incoming.cancel() and not incoming.cancelled():
        incoming.exception()


async def _release(params: TransferParams) -> None:
    """Tell the worker that has the KV that nobody will read it. If that worker cannot be reached,
    it frees the KV when the lease ends.
    """
    message = Release(
        params.remote_engine_id or "",
        int(params.remote_request_id or 0),
        params.remote_registration_generation or 0,
    )
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(HELLO_S):
            _, writer = await asyncio.open_connection(params.remote_host, params.remote_port)
            try:
                writer.write(frame(message))
                await writer.drain()
            finally:
                writer.close()


def _valid(message: Message) -> int:
    """Return the number of bytes of a read that ended well. Raises BadMessage or NotRead if it did
    not end well.
    """
    if not isinstance(message, Done):
        raise BadMessage(f"{type(message).__name__} among the parts of a read")
    if not message.valid:
        raise NotRead("late", "the lease was over before all was read")
    return message.sent_bytes


class NotRead(Exception):  # noqa: N818 - how a transfer ends
    """Raised if no KV was read. `reason` is a code that is counted, `message` is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Import:
    """One request whose prompt's KV is at another worker. Lifetime: from its arrival until its KV
    arrives.
    """

    request: Request
    params: TransferParams
    room: asyncio.Future[Wanted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None


class Importer:
    """Reads the KV of prompts from the workers that computed them. Lifetime: worker. A connection
    is opened when a request arrives, and keeps the KV alive while the request waits for room.
    `on_end` is called when a request can continue: with None if its KV arrived, else with the
    reason why it must compute its prompt.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: KvStore,
        clock: Clock,
        transport: Transport,
        on_end: Callable[[Request, str | None], None],
    ) -> None:
        self.received_bytes_total = 0
        self.received_total = 0
        self.mapped_total = 0  # of these, copied from the other worker's mapped memory
        self.failed: Counter[str] = Counter()  # by reason
        self.wait_s_total = 0.0  # from reserved blocks to their KV
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._transport: Transport = transport
        self._on_end = on_end
        self._imports: dict[int, _Import] = {}  # by request id
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        """The number of requests that have not got their KV yet."""
        return len(self._imports)

    def begin(self, request: Request, params: TransferParams) -> None:
        """Begin to fetch the KV of `request`, which was just added with `imports`: connect to the
        worker that has the KV.
        """
        one = _Import(request, params)
        self._imports[request.request_id] = one
        one.task = asyncio.create_task(self._run(one))

    def read(self, wanted: Wanted) -> None:
        """Let a request's transfer read the missing KV, now that its blocks are reserved."""
        self._imports[wanted.request.request_id].room.set_result(wanted)

    def drop(self, request_id: int) -> None:
        """Cancel the transfer of a request that has ended. The request's blocks are released once
        nothing writes to them.
        """
        one = self._imports.get(request_id)
        if one is not None and one.task is not None:
            one.task.cancel()

    def give_up(self, params: TransferParams) -> None:
        """Tell the worker that has the KV of a refused request that nobody will read it."""
        if params.lacks is None:
            task = asyncio.create_task(_release(params))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Cancel all transfers."""
        tasks = [one.task for one in self._imports.values() if one.task is not None]
        for task in [*tasks, *self._releases]:
            task.cancel()
        await asyncio.gather(*tasks, *self._releases, return_exceptions=True)

    async def _run(self, one: _Import) -> None:
        why: NotRead | None = None
        try:
            await self._fetch(one)
        except NotRead as error:
            why = error
        except asyncio.CancelledError:
            why = NotRead("dropped", "its request ended first")
        except TimeoutError:
            why = NotRead("timeout", "the worker that has the KV says nothing more")
        except (BadMessage, OSError, asyncio.IncompleteReadError) as error:
            why = NotRead("connection", f"the worker that has the KV left: {error!r:.200}")
        except Exception as error:
            log.exception("KV could not be read")
            why = NotRead("error", f"{error!r:.200}")
        self._end(one, why)

    def _end(self, one: _Import, why: NotRead | None) -> None:
        request, room = one.request, one.room
        del self._imports[request.request_id]
        if room.done() and room.result().start < room.result().stop:
            self._scheduler.end_read(request.request_id, self._clock.now_s(), arrived=why is None)
        else:
            self._scheduler.forget_import(request.request_id)
        if why is None:
            cached_tokens = one.params.remote_prefill_cached_tokens
            if cached_tokens is not None and room.done():
                request.cached_tokens = cached_tokens
            self.received_total += 1
        else:
            self.failed[why.reason] += 1
        is_over = request.state is State.FINISHED
        self._on_end(request, None if why is None or is_over else str(why))

    async def _fetch(self, one: _Import) -> None:
        """Connect to the other worker, wait until there is room for the KV, and read it. Raises
        NotRead, and errors of sockets.
        """
        stream, writer = await self._connect(one.params)
        try:
            welcome = await self._hello(one, stream, writer)
            beat_s = welcome.lease_s / BEATS
            incoming = asyncio.ensure_future(receive(stream))
            try:
                while not one.room.done():
                    await asyncio.wait(
                        (one.room, incoming), timeout=beat_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    if incoming.done():
                        raise BadMessage(f"{type(incoming.result()).__name__} before any read")
                    writer.write(frame(Beat()))
                wanted = one.room.result()
                if wanted.start < wanted.stop:
                    begun_s = self._clock.now_s()
                    if not await self._copy(wanted, welcome, incoming, stream, writer):
                        writer.write(frame(ReadTokens(wanted.start, wanted.stop)))
                        await self._read(wanted, welcome, incoming, stream, writer)
                    self.wait_s_total += self._clock.now_s() - begun_s
                writer.write(frame(Release()))
                await writer.drain()
            finally:
                _forget(incoming)
        finally:
            writer.close()

    async def _connect(
        self, params: TransferParams
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(HELLO_S):
            return await asyncio.open_connection(
                params.remote_host, params.remote_port, limit=1 << 20
            )

    async def _hello(
        self, one: _Import, stream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Welcome:
        params, request = one.params, one.request
        hello = Hello(
            params.remote_engine_id or "",
            int(params.remote_request_id or 0),
            params.remote_registration_generation or 0,
            request.prompt_tokens,
            digest(request.prompt),
            self._store.form,
        )
        writer.write(frame(hello))
        async with asyncio.timeout(HELLO_S):
            answer = await receive(stream)
        if isinstance(answer, Refusal):
            raise NotRead(answer.reason, answer.message)
        if not isinstance(answer, Welcome) or not 1 <= answer.block_tokens <= 1 << 16:
            raise BadMessage(f"{type(answer).__name__} as an answer to hello")
        return answer

    async def _read(
        self,
        wanted: Wanted,
        welcome: Welcome,
        incoming: asyncio.Future[Message],
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Receive the parts of the KV. The last message says whether they were valid."""
        store, block_ids = self._store, wanted.request.block_ids
        message, come = await self._next(incoming, stream, writer, welcome), wanted.start
        while isinstance(message, Part):
            first = message.start * welcome.block_tokens
            is_next = first <= come < message.stop * welcome.block_tokens
            if not is_next or not 0 <= message.size <= MAX_PART_BYTES:
                raise BadMessage(f"blocks {message.start}..{message.stop} after {come} tokens")
            async with asyncio.timeout(STALL_S):
                data = await stream.readexactly(message.size)
            come = min(message.stop * welcome.block_tokens, wanted.stop)
            part = Place(block_ids, max(first, wanted.start), come)
            blocks = message.stop - message.start
            taken = data, welcome.block_tokens, message.start, blocks, part
            await _unbroken(_apart(store, store.put, *taken))
            writer.write(frame(Beat()))
            incoming = asyncio.ensure_future(receive(stream))
            message = await self._next(incoming, stream, writer, welcome)
        sent_bytes = _valid(message)
        if come < wanted.stop:
            raise BadMessage(f"the KV of {come} tokens came, {wanted.stop} were asked for")
        self.received_bytes_total += sent_bytes

    async def _copy(
        self,
        wanted: Wanted,
        welcome: Welcome,
        incoming: asyncio.Future[Message],
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Copy the KV directly from the other worker's memory, and ask it whether the KV was valid
        to the end. Return False if the memory cannot be mapped, because the worker is on another
        host.
        """
        if self._transport != "shm" or not welcome.pools:
            return False
        place = Place(wanted.request.block_ids, wanted.start, wanted.stop)
        writer.write(frame(ReadTokens(wanted.start, wanted.stop, is_mapped=True)))
        try:
            copied = await _unbroken(_apart(self._store, self._store.copy, welcome, place))
        except (OSError, ValueError) as error:
            log.debug("the holder's memory cannot be mapped, KV comes by tcp: %s", error)
            return False
        writer.write(frame(Copied()))
        _valid(await self._next(incoming, stream, writer, welcome))
        self.received_bytes_total += copied
        self.mapped_total += 1
        return True

    async def _next(
        self,
        incoming: asyncio.Future[Message],
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: Welcome,
    ) -> Message:
        """Return the next message, and send signs of life until it arrives. Raises TimeoutError."""
        beat_s = welcome.lease_s / BEATS
        left_s = max(STALL_S, 2 * beat_s)
        try:
            while True:
                if not (await asyncio.wait((incoming,), timeout=beat_s))[0]:
                    left_s -= beat_s
                    if left_s < 0:
                        raise TimeoutError
                    writer.write(frame(Beat()))
                elif isinstance(incoming.result(), Beat):
                    left_s = max(STALL_S, 2 * beat_s)
                    incoming = asyncio.ensure_future(receive(stream))
                else:
                    return incoming.result()
        finally:
            _forget(incoming)
