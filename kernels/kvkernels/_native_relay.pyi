"""The relay's part of `_native.pyi`; no module of its own. `router.upstream` is its twin."""

from kvkernels._native import AnswerDue

class RelayPool:
    def __init__(
        self,
        max_connections: int,
        idle_s: float,
        header_bytes: int,
        chunk_line_bytes: int,
        held_bytes: int,
        held_s: float,
        tail_bytes: int,
        progress_s: float,
    ) -> None: ...
    @property
    def open(self) -> int: ...
    @property
    def idle(self) -> int: ...

class RelayTimeouts:
    def __init__(
        self,
        connect_s: float,
        send_s: float,
        first_byte_s: float,
        between_s: float,
        client_s: float,
    ) -> None: ...

class RelayEnd:
    @property
    def fault(self) -> str: ...  # as `router/http/errors.py` names them; "cancelled"; "": none
    @property
    def message(self) -> str: ...
    @property
    def status(self) -> int: ...  # 0: no head came
    @property
    def bytes_to_client(self) -> int: ...
    @property
    def started_s(self) -> float: ...  # times are of CLOCK_MONOTONIC
    @property
    def first_byte_s(self) -> float | None: ...
    @property
    def last_byte_s(self) -> float | None: ...
    @property
    def events(self) -> int: ...
    @property
    def usage(self) -> bytes: ...  # from the brace of the last usage object on
    @property
    def flaw(self) -> str: ...  # why a reply that came whole is a failure; "": it is none
    @property
    def stale(self) -> bool: ...  # a kept connection was closed, and it was to be sent once
    @property
    def refused(self) -> bool: ...  # it tells of an error that its client caused
    @property
    def held(self) -> bool: ...
    @property
    def held_head(self) -> bytes: ...
    @property
    def held_body(self) -> bytes: ...
    @property
    def reason(self) -> bytes: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def ends_with_connection(self) -> bool: ...
    @property
    def written(self) -> int: ...  # bytes to the client, head and `unsent` included
    @property
    def unsent(self) -> bytes: ...
    @property
    def journal(self) -> RelayJournal | None: ...  # of a reply that went by events

class RelayRoom:
    """`router.migration.journal` is its twin; for any thread."""

    stream_tokens: int
    tokens: int

    def __init__(self, stream_tokens: int, tokens: int) -> None: ...
    @property
    def taken(self) -> int: ...
    def take(self, more: int, of_stream: int) -> bool: ...
    def give(self, tokens: int) -> None: ...

class RelayJournalTerms:
    """`hidden` stands where ids were, empty: nothing does. `migratable_line`: of the client's head,
    with its CRLF, where the stream may go on elsewhere.
    """

    def __init__(self, room: RelayRoom, hidden: bytes, migratable_line: bytes) -> None: ...

class RelayJournal:
    """One stream's first worker; `router.migration.journal` is its twin. Gives the room of
    its ids back at its end, but for what `leave_room` leaves to the caller.
    """

    def __init__(self, terms: RelayJournalTerms) -> None: ...
    def feed(self, payload: bytes) -> bytes: ...
    def flush(self) -> bytes: ...
    def leave_room(self) -> int: ...
    @property
    def prompt(self) -> bytes: ...  # int32
    @property
    def said(self) -> bytes: ...  # int32
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prefix(self) -> bytes | None: ...
    @property
    def unfit(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    @property
    def miscounted(self) -> bool: ...
    @property
    def opened(self) -> bool: ...
    @property
    def usage_sent(self) -> bool: ...
    @property
    def failure(self) -> str: ...  # what the worker did; empty: nothing wrong

class RelayReply:
    """One reply without sockets. `feed` gives what of its bytes goes to the client, and the name of
    the fault that ended the reply.
    """

    def __init__(
        self,
        bounds: RelayPool,
        head_request: bool,
        extra_lines: bytes,
        keep_alive: bool,
        due: AnswerDue | None = None,
    ) -> None: ...
    def feed(self, data: bytes) -> tuple[bytes, str]: ...
    def close(self) -> bytes: ...  # the worker's connection ended
    @property
    def withholds(self) -> bool: ...  # nobody can say yet whether it is an answer
    @property
    def begun(self) -> bool: ...  # it is an answer
    @property
    def flaw(self) -> str: ...
    @property
    def refuses(self) -> bool: ...
    @property
    def status(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def reusable(self) -> bool: ...
    @property
    def closes(self) -> bool: ...
    @property
    def held_fault(self) -> str: ...
    @property
    def held(self) -> bool: ...
    @property
    def held_body(self) -> bytes: ...
    @property
    def head(self) -> bytes: ...
    @property
    def events(self) -> int: ...
    @property
    def usage(self) -> bytes: ...

class Relay:
    """Carries requests on a thread of its own. Each `submit`, and each `close`, returns a number
    under which `take` gives its marks: (number, seconds, status, events, end). A mark of the first
    byte has a status, one of progress has none, the last one has the end. `marks_fd` is readable
    when there are some. The client's socket is lent until the end was taken, or `cancel` called,
    which returns how many bytes the client has, whether its reply is framed by the connection's
    end, and whether it is whole: the job ends then as if nobody had given it up. With a
    `client_fd` below 0 there is no client: the end has the reply, held, if its body has at most
    `client_buffer_bytes`, else it is garbage. Raises RuntimeError once stopped, OSError where no
    thread or event file can be had.
    """

    def __init__(self) -> None: ...
    @property
    def marks_fd(self) -> int: ...
    def set_addresses(self, pool: RelayPool, hosts: list[str], port: int) -> None: ...
    def submit(
        self,
        pool: RelayPool,
        head: bytes,
        body: bytes,
        head_request: bool,
        client_fd: int,
        extra_lines: bytes,
        keep_alive: bool,
        client_buffer_bytes: int,
        timeouts: RelayTimeouts,
        tells: bool,
        journal: RelayJournalTerms | None,
        due: AnswerDue | None,
        once: bool = False,
    ) -> int: ...
    def cancel(self, job: int) -> tuple[int, bool, bool]: ...
    def take(self) -> list[tuple[int, float, int, int, RelayEnd | None]]: ...
    def abandon_silent(self, pool: RelayPool) -> None: ...
    def close(self, pool: RelayPool) -> int: ...
    def stop(self) -> None: ...
