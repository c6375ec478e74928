"""Finds out which agent sent a request, from the request's headers and body."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from policies.facts import UNIDENTIFIED, Identity, user_id_of
from router.http.errors import ClientError
from router.identity.body_fields import Fields, read_body, values_in
from router.identity.families import CLIENTS, ROUTER_IDS, Family, Ids, read_headers
from router.identity.hints import NO_HINTS, PRIORITY_HEADERS, Hints, hints_in
from router.identity.ids import id_in


class Headers(Protocol):
    """Gives access to the headers of a request."""

    def get(self, name: str) -> str | None:
        """Return the first value of a header, or None. The name's case does not matter."""

    def among(self, names: frozenset[str]) -> dict[str, str] | None:
        """Return the first value of each header whose lower-case name is in `names`, by lower-case
        name, or None.
        """


class ClientIdentity(NamedTuple):
    """The session, identity and hints that a client gives with a request. Lifetime: request."""

    session: str | None
    identity: Identity = UNIDENTIFIED
    hints: Hints = NO_HINTS

    @property
    def user_id(self) -> str | None:
        """The id that all requests of one person have in common, or None if there is none."""
        return user_id_of(self.session, self.identity)


NO_CLIENT_IDENTITY = ClientIdentity(None)


class IdentityReader:
    """Finds the session, agent and person of a request, without keeping state. Lifetime: process,
    replaced on reload.

    The sources count in this order, and a later one adds only what is missing: the operator's
    session header, ids of other routers, the headers of one client family, fields of the body.
    `prompt_cache_key` is read as a cache group, and `user` and `safety_identifier` as a person.
    They do not name a session, because a main agent shares its key with all its sub-agents, and a
    chat page sends the same user for everybody.
    """

    def __init__(
        self,
        session_header: str,
        added: tuple[Family, ...] = (),
        clients: bool = True,
        shared_secret: str | None = None,
    ) -> None:
        """session_header: the operator's, in small letters.

        added: families that the operator defines; they count before the known ones.
        clients: False if only the operator's header and families, and the body's `session_id`,
        `prompt_cache_key` and `user`, are to be read.
        shared_secret: what all routers that share state have in common. All ids are then digests
        made with it, so that the shared state has no id of a client in it. None: ids are as sent.
        """
        self._key = None
        if shared_secret is not None:
            secret = shared_secret.encode("utf-8", "surrogatepass")
            self._key = blake2b(secret, digest_size=32, person=b"client ids").digest()
        self.session_header = session_header
        router_ids = ROUTER_IDS if clients else ()
        self._router_ids = len(router_ids)
        self._families = (*router_ids, *added, *(CLIENTS if clients else ()))
        self._reads_all = clients
        self._places: dict[str, tuple[int, ...]] = {}  # of a header's families in `_families`
        for place, family in enumerate(self._families):
            for name in family.headers():
                self._places[name] = (*self._places.get(name, ()), place)
        self._names = frozenset((*self._places, session_header))
        if clients:
            self._names |= {*PRIORITY_HEADERS, *_FAIRNESS_HEADERS}

    def read(
        self, headers: Headers, session_id: str | None, fields: Fields | None
    ) -> ClientIdentity:
        """Return the session, the identity and the hints of a request.

        `session_id` is the body's field of this name; `fields` are the fields of the body that
        `body_fields` reads, or None. The operator's session header and `session_id` may have any
        form. Raises ClientError(400) if the session header has more than 1,024 characters.
        """
        said = self._read(headers, session_id, fields)
        if self._key is None or said is NO_CLIENT_IDENTITY:
            return said
        session, identity = said.session, said.identity
        if identity is not UNIDENTIFIED:
            group, parent = self._digest(identity.group), self._digest(identity.parent)
            cache_group, user = self._digest(identity.cache_group), self._digest(identity.user)
            identity = Identity(group, parent, cache_group, user, identity.final)
        return ClientIdentity(self._digest(session), identity, said.hints)

    def _digest(self, text: str | None) -> str | None:
        if text is None:
            return None
        data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, key=self._key or b"", digest_size=_DIGEST_BYTES).hexdigest()

    def _read(
        self, headers: Headers, session_id: str | None, fields: Fields | None
    ) -> ClientIdentity:
        found = headers.among(self._names)
        if found is None and not fields:
            return NO_CLIENT_IDENTITY if session_id is None else ClientIdentity(session_id)
        found = found or {}
        named = found.get(self.session_header) or None
        if named is not None and len(named) > _MAX_SESSION_CHARS:
            raise ClientError(400, f"{self.session_header} is too long", code="string_too_long")
        if named is not None and len(found) == 1 and not fields:
            return ClientIdentity(named)
        return self._combine(found, named, session_id, fields or {})

    def _combine(
        self, found: Mapping[str, str], named: str | None, session_id: str | None, fields: Fields
    ) -> ClientIdentity:
        ids = Ids(session=named)
        self._add_headers(found, ids)
        if session_id:
            ids.add(session_id, None, None)
        values: Mapping[str, Any] = {}
        if fields:
            if not self._reads_all:
                fields = {name: value for name, value in fields.items() if name in _ALWAYS_READ}
            values = values_in(fields)
            read_body(values, ids)
        hints = NO_HINTS
        if self._reads_all and (values or not found.keys().isdisjoint(PRIORITY_HEADERS)):
            hints = hints_in(found, values)
        return ClientIdentity(ids.session, _identity(ids), hints)

    def _add_headers(self, found: Mapping[str, str], ids: Ids) -> None:
        """Add to `ids` the ids in headers of other routers, and then those in the headers of one
        client family.
        """
        places = {place for name in found for place in self._places.get(name, ())}
        for place in sorted(places):
            read = read_headers(self._families[place], found)
            if read is not None:
                ids.add(read.session, read.group, read.parent)
                ids.final = ids.final or read.final
                if place >= self._router_ids:
                    break
        for name in _FAIRNESS_HEADERS:
            if name in found:
                ids.user = ids.user or id_in(found[name])


_DIGEST_BYTES = 16
_MAX_SESSION_CHARS = 1_024  # longest session id taken from the operator's header, characters
_ALWAYS_READ = frozenset({"prompt_cache_key", "user"})
# llm-d's headers for the id to which a request is counted (gateway API inference extension).
_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")


def _identity(ids: Ids) -> Identity:
    parent = None if ids.parent == ids.session else ids.parent
    if not (ids.group or parent or ids.cache_group or ids.user or ids.final):
        return UNIDENTIFIED
    return Identity(ids.group, parent, ids.cache_group, ids.user, ids.final)
