"""Reads requests, describes them to the decision core, and makes the bodies for the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from policies.facts import Arrival
from router.body.json_edit import with_last_field, with_values
from router.body.legs import check_no_override, splits
from router.body.paths import OTHER, Path
from router.body.scan import LONG_BYTES, ScanLimits, Scanned
from router.http.errors import ClientError
from router.http.messages import Request
from router.identity.identity import NO_CLIENT_IDENTITY, ClientIdentity, Headers, IdentityReader
from router.keys.key_file import KeyTerms
from router.record.explain import EXPLAIN_HEADER, Asked
from router.record.named import NamedModel
from router.request.deadlines import Deadlines
from router.request.dialect import Target
from router.request.in_turn import let_others_run
from router.request.prompts import Plain, Prompt, PromptReader, Shape
from router.request.quotas import check_model, priority_within, salt_of
from router.request.service import Service
from router.request.state import ReadRequest
from router.tokens.rendered_prompts import RenderRequest

_CODING = "content-encoding"
_PLAIN = frozenset({b"", b"identity"})
_EXPLAIN_VALUES: Mapping[str | None, Asked] = MappingProxyType({"1": "short", "full": "full"})

Header = Callable[[str], str | None]  # the value of a request's header, by its name


@dataclass(frozen=True, slots=True)
class InferenceTerms:
    """The limits for reading inference requests. Lifetime: process, replaced on reload."""

    scan: ScanLimits
    identity: IdentityReader
    explain: bool  # clients may ask for the reasons of a decision
    explain_every: int = 0  # every n-th request is explained in full for the operator; 0: none
    deadlines: Deadlines = field(default_factory=Deadlines)
    isolate: bool = False  # tenants share no blocks
    asks_model: bool = False  # a request must name its model, though only one is served


class Understood(NamedTuple):
    """A request that was read, before its body is edited for the worker. Lifetime: request."""

    arrival: Arrival
    prompt: Prompt
    salt: str | None  # to be added to the body
    body: bytes  # with the served model's name
    name: NamedModel | None  # the model's name and the rule that changed it; None: there is no rule


class InferenceReader:
    """Reads the headers and bodies of inference requests. Lifetime: process."""

    def __init__(self, service: Service, prompts: PromptReader, terms: InferenceTerms) -> None:
        self._service = service
        self._prompts = prompts
        self.terms = terms

    async def read(
        self,
        http: Request,
        path: Path,
        key: KeyTerms,
        target: Target | None = None,
        edits: bool = True,
    ) -> ReadRequest:
        """Read a request: return its body for the worker and its description for the decision core.

        `target` is the model and call of a request in a protocol with paths of its own, such as
        KServe v2. `edits` is True if the router writes the bodies, so that naming rules apply.
        Raises ClientError: 400 for an unreadable body, 403 for a right that the key lacks, 413 for
        a body with too many or too long values, 415 for an encoded body, 429 while too many
        requests are being read.
        """
        headers, terms, service = http.headers, self.terms, self._service
        header = headers.get
        deadline_s = terms.deadlines.deadline_s(header, service.clock())
        if path is not OTHER and target is None and header(_CODING) is not None:
            _refuse_codings(http)
        body = http.body
        named = http.query.get("model") if path is OTHER else None
        read = await self.arrival(body, path, headers, key, named, target, edits)
        arrival, prompt, salt, body, name = read
        if salt is not None and path.salt is not None:
            body = with_last_field(body, path.salt, msgspec.json.encode(salt))
        may_split = service.splits(arrival.model) and await _may_split(http, body, path, arrival)
        if deadline_s is not None or may_split:
            arrival = replace(arrival, deadline_s=deadline_s, splits=may_split)
        asked = self._explain_detail(header, arrival.request_id)
        return ReadRequest(body, path, arrival, prompt, asked, name)

    def _explain_detail(self, header: Header, request_id: int) -> Asked:
        """Return in how much detail the decision about the request must be explained.

        "short" or "full": the client asked for it. "sampled": the operator gets an explanation of
        every n-th request, and this is one of them. "no": no explanation is needed.
        """
        terms = self.terms
        if terms.explain and (asked := _EXPLAIN_VALUES.get(header(EXPLAIN_HEADER))) is not None:
            return asked
        every = terms.explain_every
        return "sampled" if every and request_id % every == 0 else "no"

    async def arrival(
        self,
        body: bytes,
        path: Path,
        headers: Headers,
        key: KeyTerms,
        named: str | None = None,
        target: Target | None = None,
        edits: bool = True,
    ) -> Understood:
        """Return a request's description for the decision core, and the other results of reading
        it.

        The caller must add the salt to the body; None means no salt. `named` is the model to use if
        the body names none. `edits` is the same as for `read`. Raises ClientError as `read` does.
        """
        terms, service, turn = self.terms, self._service, self._prompts.next_turn()
        shape = None if target is None else self._shape(headers.get, target)
        scanned = await self._prompts.scan(body, path, terms.scan, shape, turn)
        said = terms.identity.read(headers, scanned.session, scanned.agent_fields)
        asked = scanned.model or named
        model = asked or self._only_model()
        name = None
        if service.names is not None and edits and target is None and path is not OTHER and model:
            name = await service.names.choose(model, key.tenant, said.user_id, body)
        if name is None:
            if model:
                check_model(key, model)
        else:
            body, name = await _renamed(body, name, asked)
            check_model(key, model, name.model)
            model = name.model
        priority = priority_within(key, scanned.priority, said.hints.priority)
        salt = salt_of(key, scanned.cache_salt, terms.isolate) if path.computes else None
        new_salt = None if salt == scanned.cache_salt else salt
        if new_salt is not None:
            if path.salt is None:
                why = f"{path.path or 'this path'} cannot keep tenants' caches apart"
                raise ClientError(403, why, code="path_not_isolated")
            scanned = replace(scanned, cache_salt=new_salt)
        render = None
        if path.reads == "openai" and target is None:
            render = RenderRequest(path.path, body, model, scanned.cache_salt)
        prompt = await self._prompt(scanned, model, len(body), turn, render)
        if not path.computes:
            said = NO_CLIENT_IDENTITY  # it says nothing of what its session computes next
        elif not isinstance(scanned, Plain) and scanned.attribution is not None:
            self._prompts.attributions.count(key.tenant, said.session, scanned.attribution)
        arrival = self._arrival_of(scanned, prompt, model, said, key, priority, path.needs)
        if name is not None and name.revision is not None:
            arrival = replace(arrival, revision=name.revision)
        return Understood(arrival, prompt, new_salt, body, name)

    def _shape(self, header: Header, target: Target) -> Shape:
        """Return the function that reads the body of a request in a protocol with its own paths."""
        base, adapter = self._service.identity(target.model)
        alone = adapter is None and base != target.model
        return target.scanner(header, target.model if alone else None)

    async def _prompt(
        self,
        scanned: Scanned | Plain,
        model: str,
        body_bytes: int,
        turn: int,
        asked: RenderRequest | None,
    ) -> Prompt:
        """Return the prompt with its chain hashes for each block size that the model's workers use.

        `turn` is the number of the request among those that are being read; smaller numbers are
        read first. `asked` is the request as a renderer may get it; None means that no renderer may
        be asked.
        """
        service = self._service
        while True:
            sizes = service.block_sizes(model)
            base, adapter = service.identity(model)
            prompt = await self._prompts.read(
                scanned, base, sizes, adapter, body_bytes=body_bytes, turn=turn, asked=asked
            )
            await let_others_run()
            if service.block_sizes(model) <= sizes:
                return prompt  # else a worker with blocks of another size joined meanwhile

    def _arrival_of(
        self,
        scanned: Scanned | Plain,
        prompt: Prompt,
        model: str,
        said: ClientIdentity,
        key: KeyTerms,
        priority: int,
        needs: str | None,
    ) -> Arrival:
        service, only, hold_s = self._service, None, None
        if not isinstance(scanned, Plain):
            hold_s = scanned.hold_s
            if scanned.sequence is not None:  # a part of it may have a worker already
                of = model, key.tenant, scanned.sequence
                only = service.sequences.worker_of(*of)
        return Arrival(
            now_s=service.clock(),
            request_id=service.next_request_id(),
            model=model,
            prompt_tokens=prompt.tokens,
            chains=prompt.chains,
            approximate=prompt.approximate,
            max_output_tokens=scanned.max_output_tokens,
            session=said.session,
            tenant=key.tenant,
            priority=priority,
            weight=key.weight,
            stream=scanned.stream,
            longest_prompt_tokens=prompt.longest_tokens,
            needs=needs,
            only=only,
            hold_s=hold_s,
            identity=said.identity,
            expected_output_tokens=said.hints.expected_output_tokens,
        )

    def _only_model(self) -> str:
        """Return the only model that this router serves, for a request that names no model; "" if
        it serves none yet.

        Models that the operator lists in `waiting.models` count, too. Raises ClientError(400) if
        there are several models, or if the operator requires requests to name their model.
        """
        models = sorted({*self._service.models(), *self._service.waiting.terms().models})
        if len(models) > 1 or self.terms.asks_model:
            why = f"`model` is missing; this router serves: {', '.join(models) or 'none yet'}"
            raise ClientError(400, why, "model", "missing_model")
        return models[0] if models else ""


def _refuse_codings(request: Request) -> None:
    """Raise ClientError(415) if the request has a Content-Encoding other than `identity`."""
    wanted = _CODING.encode()
    values = (value for name, value in request.fields if name.lower() == wanted)
    if any(part.strip().lower() not in _PLAIN for value in values for part in value.split(b",")):
        raise ClientError(
            415,
            "compressed bodies are not read here; send it without Content-Encoding",
            _CODING,
            "unsupported_content_encoding",
            (("Accept-Encoding", "identity"),),
        )


async def _renamed(body: bytes, name: NamedModel, asked: str | None) -> tuple[bytes, NamedModel]:
    """Return the body with the name of the served model in it, and `name` with the name that the
    client used.
    """
    if asked is None:
        return body, replace(name, asked=None)
    if name.renames:
        model = {"model": msgspec.json.encode(name.model)}
        long = len(body) >= LONG_BYTES
        edited = asyncio.to_thread(with_values, body, model) if long else None
        body = with_values(body, model) if edited is None else await edited
    return body, name


async def _may_split(http: Request, body: bytes, path: Path, arrival: Arrival) -> bool:
    """Return True if one worker may prefill the request and another worker decode it.

    Raises ClientError(400) for a header that only routers may set.
    """
    check_no_override(http.fields)
    long = len(body) >= LONG_BYTES
    may = await asyncio.to_thread(splits, body, path) if long else splits(body, path)
    # Of several prompts engines hand over the KV of the first one only.
    return may and arrival.longest_prompt_tokens in (None, arrival.prompt_tokens)
