"""Why Redis does not do what it is asked, in words for people; without secrets."""

from __future__ import annotations

from types import MappingProxyType

from redis import exceptions as redis

from router.replicas.redis_url import redacted

_MOST_CHARS = 200
_MOVING = "moves our keys to another node"

# A part of an error's text, and what it means.
_TEXTS = MappingProxyType(
    {
        "Authentication required": "asks for a password: give it in `state`",
        "without any password": "has no password, and one is given: take it out of `state`",
        "WRONGTYPE": "has something else under a key of this fleet: delete it, or choose another "
        "`replicas.fleet`",
        "MISCONF": "refuses writes, for it cannot save to its disk",
        "NOREPLICAS": "refuses writes, for it has too few replicas",
        "unknown command": "does not know a command that is needed: it must be Redis 6.2 or later",
        "DB index is out of range": "has no such database: correct `state`",
        "max number of clients": "has no room for another client",
        "No master found": "is unknown: no sentinel names a master of this service",
        "onnection refused": "cannot be reached: the connection is refused",
        "Connect call failed": "cannot be reached: the connection is refused",
        "CERTIFICATE_VERIFY_FAILED": "shows a certificate that is not believed",
        "Name or service not known": "cannot be found: its name has no address",
        "closed by server": "has closed the connection",
        "imeout": "does not answer",
    }
)
# And what classes of errors mean: redis-py takes the reply's code off their texts.
_CLASSES = (
    (TimeoutError, "does not answer"),
    (redis.TimeoutError, "does not answer"),
    (redis.AuthenticationError, "refuses the user or password: correct `state`"),
    (
        redis.NoPermissionError,
        "lets this user not do what is needed (docs/reference/wire.md)",
    ),
    (redis.ReadOnlyError, "is a read-only replica: name the master, or use redis+sentinel://"),
    (redis.OutOfMemoryError, "is out of memory (maxmemory): it needs more, or not to be shared"),
    (redis.BusyLoadingError, "is loading its data"),
    (redis.MovedError, "is one node of a cluster: use redis+cluster://"),
    (redis.AskError, _MOVING),
    (redis.TryAgainError, _MOVING),
    (redis.MasterDownError, "is a replica without its master"),
    (redis.ClusterDownError, "is a cluster that is down"),
)


def reason_of(error: BaseException) -> str:
    """What to say of Redis, as in `redis://HOST:6379 ...`."""
    text = redacted(" ".join(str(error).split()))
    for part, meaning in _TEXTS.items():
        if part in text:
            return meaning
    for kind, meaning in _CLASSES:
        if isinstance(error, kind):
            return meaning
    return f"fails: {type(error).__name__}: {text[:_MOST_CHARS]}"
