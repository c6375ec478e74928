"""One inference request, read and identified; `attempts.py` gets it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from policies.facts import Arrival
from router.body.json_edit import with_last_field
from router.body.legs import check_no_override, splits
from router.body.paths import OTHER, Path
from router.body.scan import LONG_BYTES, ScanLimits, Scanned
from router.http.errors import ClientError
from router.http.messages import Answer, Request
from router.keys.key_file import KeyTerms
from router.record.explain import EXPLAIN_HEADER, Asked
from router.request.attempts import Attempts, AttemptTerms, Deadlines, cohort
from router.request.dialect import Target
from router.request.moving import Movers
from router.request.prompts import Plain, Prompt, PromptReader
from router.request.quotas import Tenants, check_model, priority_within, salt_of
from router.request.request import InferenceRequest
from router.request.service import Service

_HEADER = "content-encoding"
_PLAIN = frozenset({b"", b"identity"})


def refuse_codings(request: Request) -> None:
    """Raises ClientError, status 415, for a Content-Encoding other than `identity`."""
    named = _HEADER.encode()
    told = (value for name, value in request.fields if name.lower() == named)
    if any(part.strip().lower() not in _PLAIN for value in told for part in value.split(b",")):
        raise ClientError(
            415,
            "compressed bodies are not read here; send it without Content-Encoding",
            _HEADER,
            "unsupported_content_encoding",
            (("Accept-Encoding", "identity"),),
        )


_ASKED: Mapping[str | None, Asked] = MappingProxyType({"1": "short", "full": "full"})


@dataclass(frozen=True, slots=True)
class InferenceTerms:
    """Bounds of reading inference requests. Lifetime: process, replaced on reload."""

    scan: ScanLimits
    session_header: str
    explain: bool  # clients may ask for the reasons of a decision
    explain_every: int = 0  # every n-th request is explained in full for the operator; 0: none
    deadlines: Deadlines = field(default_factory=Deadlines)
    isolate: bool = False  # tenants share no blocks


class Inference:
    """Handles every inference path. Lifetime: process."""

    def __init__(
        self,
        service: Service,
        prompts: PromptReader,
        tenants: Tenants,
        attempts: Attempts,
        terms: InferenceTerms,
    ) -> None:
        self._service = service
        self._prompts = prompts
        self.tenants = tenants
        self.attempts = attempts
        self.terms = terms

    def renew(self, terms: InferenceTerms, attempts: AttemptTerms, movers: Movers | None) -> None:
        """Read, try and move requests by these from now on."""
        self.terms = terms
        self.attempts.renew(attempts, movers)

    async def handle(self, http: Request, target: Target | None = None) -> Answer:
        """Answer one request. Raises ClientError for what is the client's own fault."""
        with InferenceRequest(self._service, http) as request:
            return await self.answer(request, target)

    async def answer(self, request: InferenceRequest, target: Target | None) -> Answer:
        """Answer a request that has begun; `target`: what it asks for on a path of a dialect's.
        Raises ClientError for what is the client's own fault.
        """
        request.identify(self.tenants.key_of(request.http))
        await self._read(request, target)
        request.ask()
        return request.answered(await self.attempts.answer(request))

    async def _read(self, request: InferenceRequest, target: Target | None) -> None:
        """Read and understand it. Raises ClientError."""
        http, header, terms = request.http, request.http.headers.get, self.terms
        deadline_s = terms.deadlines.deadline_s(header, self._service.clock())
        path = request.path_of(target)
        if path is not OTHER and target is None and header("content-encoding") is not None:
            refuse_codings(http)
        body = http.body
        request.was_read(body, path)
        named = http.query.get("model") if path is OTHER else None
        arrival, prompt, salt = await self.arrival(body, path, header, request.terms, named, target)
        request.spend(arrival.prompt_tokens)
        if salt is not None and path.salt is not None:
            body = with_last_field(body, path.salt, msgspec.json.encode(salt))
        if deadline_s is not None:
            arrival = replace(arrival, deadline_s=deadline_s)
        if self._service.splits(arrival.model):
            check_no_override(http.fields)
            long = len(body) >= LONG_BYTES
            may = await asyncio.to_thread(splits, body, path) if long else splits(body, path)
            # Of several prompts engines hand over the KV of the first one only.
            one = arrival.longest_prompt_tokens in (None, arrival.prompt_tokens)
            arrival = replace(arrival, splits=may and one)
        explain = self._asked(http, arrival.request_id)
        request.understood(body, arrival, prompt, explain)

    def _asked(self, http: Request, request_id: int) -> Asked:
        """Who wants to read why: the client, the operator (of every n-th request), or nobody."""
        wanted = http.headers.get(EXPLAIN_HEADER) if self.terms.explain else None
        if wanted in _ASKED:
            return _ASKED[wanted]
        every = self.terms.explain_every
        return "sampled" if every and request_id % every == 0 else "no"

    async def arrival(
        self,
        body: bytes,
        path: Path,
        header: Callable[[str], str | None],
        key: KeyTerms,
        named: str | None = None,
        target: Target | None = None,
    ) -> tuple[Arrival, Prompt, str | None]:
        """The request as the core takes it, its prompt, and a salt that its worker must be told.

        `named`: its model, where the body names none; `target`: of a path of a dialect's. Raises
        ClientError.
        """
        terms, turn = self.terms, self._prompts.next_turn()
        if target is None:
            scanned = await self._prompts.scan(body, path, terms.scan, turn=turn)
        else:
            base, adapter = self._service.identity(target.model)
            alone = adapter is None and base != target.model
            read = target.scanner(header, target.model if alone else None)
            scanned = await self._prompts.scan(body, path, terms.scan, read, turn)
        model = scanned.model or named or self._only_model()
        if model:
            check_model(key, model)
        priority = priority_within(key, scanned.priority)
        salt = salt_of(key, scanned.cache_salt, terms.isolate) if path.computes else None
        told = None if salt == scanned.cache_salt else salt
        if told is not None:
            if path.salt is None:
                why = f"{path.path or 'this path'} cannot keep tenants' caches apart"
                raise ClientError(403, why, code="path_not_isolated")
            scanned = replace(scanned, cache_salt=told)
        while True:
            sizes = self._service.block_sizes(model)
            base, adapter = self._service.identity(model)
            prompt = await self._prompts.read(
                scanned, base, sizes, adapter, body_bytes=len(body), turn=turn
            )
            await cohort()
            if self._service.block_sizes(model) <= sizes:
                break  # else a worker with blocks of another size joined meanwhile
        session = header(terms.session_header) or scanned.session
        if session is not None and len(session) > terms.scan.max_key_chars:
            raise ClientError(400, f"{terms.session_header} is too long", code="string_too_long")
        if not path.computes:
            session = None  # it says nothing of what its session computes next
        arrival = self._arrival_of(scanned, prompt, model, session, key, priority, path.needs)
        return arrival, prompt, told

    def _arrival_of(
        self,
        scanned: Scanned | Plain,
        prompt: Prompt,
        model: str,
        session: str | None,
        key: KeyTerms,
        priority: int,
        needs: str | None,
    ) -> Arrival:
        return Arrival(
            now_s=self._service.clock(),
            request_id=self._service.next_request_id(),
            model=model,
            prompt_tokens=prompt.tokens,
            chains=prompt.chains,
            approximate=prompt.approximate,
            max_output_tokens=scanned.max_output_tokens,
            session=session,
            tenant=key.tenant,
            priority=priority,
            weight=key.weight,
            stream=scanned.stream,
            longest_prompt_tokens=prompt.longest_tokens,
            needs=needs,
            only=self._sequence_worker(scanned, model, key),
            hold_s=None if isinstance(scanned, Plain) else scanned.hold_s,
        )

    def _sequence_worker(self, scanned: Scanned | Plain, model: str, key: KeyTerms) -> int | None:
        """The only worker that may go on with its sequence."""
        if isinstance(scanned, Plain) or scanned.sequence is None:
            return None
        return self._service.sequences.worker_of(model, key.tenant, scanned.sequence)

    def _only_model(self) -> str:
        """A request may leave out the model where there is one only; "" while none is known: that
        is no fault of the client's, and the core has an answer for it.
        """
        models = self._service.models()
        if len(models) > 1:
            why = f"`model` is missing; this router serves: {', '.join(models)}"
            raise ClientError(400, why, "model", "missing_model")
        return models[0] if models else ""
