"""Reads the inputs of a KServe v2 request that matter for routing: the prompt, the session and
limits.

The code for HTTP and for gRPC decodes messages and passes their tensors to this module. The module
never refuses a request: what it cannot read is left to the worker, and the request is routed by
load alone (`Content.unread` says why).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from engine.wire.events import WireError
from engine.wire.tensors import MAX_RANK, TEXT, Buffer, Tensor, numbers, texts
from router.body.paths import Path
from router.body.scan import ScanLimits, Scanned, Sequenced, Tokens
from router.engines.triton import QUEUE_FULL, TIMED_OUT
from router.engines.triton_inputs import BY_LOAD, MAX_INT32, Roles, RolesOf, count_of
from router.http.reply import Usage

Parameters = Mapping[str, Any]

MAX_ROWS = 1_024  # prompts of a request that are looked at
MAX_TEXT_BYTES = 1 << 20  # of a prompt that are looked at
MAX_VALUES = 1 << 20  # of a tensor given as JSON, or token ids
MAX_KEY_CHARS = 1_024  # of a session, an adapter, a sequence
_IDS = frozenset({"INT32", "INT64"})
SHARED_MEMORY = "shared_memory_region"  # a tensor's parameter: its bytes are not in the message


@dataclass(frozen=True, slots=True)
class Content:
    """The inputs of one request that matter for routing. Lifetime: request.

    If a request has several prompts, one in each row, its first prompt decides.
    """

    texts: tuple[str, ...] = ()
    ids: tuple[Tokens, ...] = ()
    max_output_tokens: int | None = None
    stream: bool = False
    session: str | None = None
    sequence: Sequenced | None = None
    adapter: str | None = None
    media: str | None = None  # digest of its images: other images, other cache
    priority: int = 0  # as of `Arrival`: the lowest goes first, 0 is that of those that name none
    hold_s: float | None = None  # longest wait for a worker
    stop: bool = False  # it ends another request
    runs_on: bool = False  # as of `Roles`
    why: str = BY_LOAD.why  # the reason for its routing, for people
    unread: tuple[str, ...] = ()  # inputs that could not be read, and why


@dataclass(frozen=True, slots=True)
class KserveTarget(ABC):
    """The model and the kind of call that a KServe request names. Lifetime: request."""

    model: str
    version: str | None
    path: Path
    roles: RolesOf

    @abstractmethod
    def scanner(
        self, header: Callable[[str], str | None], apart: str | None = None
    ) -> Callable[[bytes, ScanLimits], Scanned]:
        """Return the function that reads a body for routing, as described at
        `router.request.dialect.Target`.
        """

    def scanned(self, content: Content, limits: ScanLimits, apart: str | None) -> Scanned:
        """Return the content in the form that requests of all APIs have. Everything that separates
        caches becomes a part of the salt.
        """
        salts = {
            "model": apart,
            "version": self.version,
            "adapter": content.adapter,
            "media": content.media,
        }
        told = [f"{name}={value}" for name, value in salts.items() if value is not None]
        prompts: Any = content.ids or content.texts
        return Scanned(
            model=self.model,
            stream=self.path.streams,
            prompts=prompts[: limits.max_prompts],
            session=content.session,
            cache_salt=" ".join(told) or None,
            max_output_tokens=content.max_output_tokens,
            sequence=content.sequence,
            priority=content.priority,
            hold_s=content.hold_s,
            runs_on=content.runs_on,
            stops=content.stop,
            routed_by="; ".join((content.why, *content.unread))[:512],
        )


_SAID: Mapping[str | int | None, str] = MappingProxyType(
    {
        **dict.fromkeys(("hold_queue_full", "router_full", "displaced"), QUEUE_FULL),
        "hold_timeout": TIMED_OUT,
    }
)


def triton_message(code: str | int | None, message: str) -> str:
    """Return the text of a refusal in Triton's words. Triton's clients recognize a full queue, and
    a timeout in the queue, by the beginning of the text.
    """
    words = _SAID.get(code)
    return message if words is None else f"{words}: {message}"


# Outputs by which an answer tells its tokens, where its model does: of TensorRT-LLM's backends, the
# C++ one (`return_perf_metrics`, `return_num_input_tokens` and so on), and llmapi.
_PROMPT, _ANSWER, _MISSED = "num_input_tokens", "num_output_tokens", "kv_cache_missed_block"
_REUSED = ("kv_cache_reused_blocks", "kv_cache_reused_block")
USAGE_OUTPUTS = frozenset((_PROMPT, _ANSWER, _MISSED, *_REUSED))


def usage_of(outputs: Mapping[str, Tensor], block_size: int | None) -> Usage | None:
    """Return the token counts in an answer's outputs; None if there are none. It never raises.

    `outputs` has at least those of USAGE_OUTPUTS that the answer has. `block_size` is the number of
    tokens in one of the worker's blocks. If the answer has the number of blocks that were not
    reused but no number of prompt tokens, the prompt is counted in blocks.
    """
    prompt, answer = _sum(outputs, _PROMPT), _sum(outputs, _ANSWER)
    reused = next((n for name in _REUSED if (n := _sum(outputs, name)) is not None), None)
    cached = None
    if reused is not None and block_size is not None:
        cached, missed = reused * block_size, _sum(outputs, _MISSED)
        if prompt is None and missed is not None:
            prompt = cached + missed * block_size
        if prompt is not None:  # else its blocks have another size than is believed
            cached = min(cached, prompt) if cached < prompt + block_size else None
    if prompt is None and answer is None and cached is None:
        return None
    return Usage(prompt, answer, cached)


def _sum(outputs: Mapping[str, Tensor], name: str) -> int | None:
    """Return the sum of the numbers in an output, which may be given as texts; None if the output
    is missing.
    """
    one = outputs.get(name)
    if one is None:
        return None
    try:
        found = [*_texts(one, MAX_ROWS, 32)] if one.datatype == TEXT else _integers(one)
    except WireError:
        return None
    counts = [count_of(value) for value in (found if isinstance(found, list) else found.tolist())]
    return None if not counts or None in counts else sum(filter(None, counts))


def content_of(roles: Roles, inputs: Mapping[str, Tensor], parameters: Parameters) -> Content:
    """Return the content of a request, given the roles of its inputs. It never raises, whatever a
    client sends.

    `inputs` has at least those of `roles.inputs` that the request has. `parameters` are the
    request's parameters.
    """
    reader = _Reader(inputs, parameters)
    texts, ids = reader.texts(roles.text), reader.ids(roles.ids, roles.lengths)
    sampling = reader.sampling(roles.sampling)
    most = reader.number(roles.max_tokens)
    most = count_of(sampling.get("max_tokens")) if most is None else most
    adapter = reader.key(roles.adapter)
    placed = roles.why if texts or ids else BY_LOAD.why
    return Content(
        texts=() if ids else texts,
        ids=ids,
        max_output_tokens=most,
        stream=reader.flag(roles.stream),
        session=reader.key(roles.session),
        sequence=sequence_in(parameters),
        adapter=_key(sampling.get("lora_name")) if adapter is None else adapter,
        media=reader.digest(roles.images),
        priority=_priority(parameters.get("priority"), *roles.levels),
        hold_s=_seconds(parameters.get("timeout")),
        stop=reader.flag(roles.stop),
        runs_on=roles.runs_on,
        why=placed,
        unread=tuple(reader.unread),
    )


def sequence_in(parameters: Parameters) -> Sequenced | None:
    """Return a request's place in a Triton sequence, or None if it belongs to none. A sequence's id
    is a number other than 0, or a text.
    """
    given = _key(parameters.get("sequence_id"))
    if given in (None, "0"):
        return None
    flags = (parameters.get(name) is True for name in ("sequence_start", "sequence_end"))
    return Sequenced(given, *flags)


_DEFAULT_LEVEL = 2  # where a model's config has none: 1 goes before what names no level


def _priority(value: Any, levels: int, default: int) -> int:
    """Return the router's priority for a priority of Triton, where 1 is the highest; 0 or a level
    that does not exist means the default.
    """
    level = count_of(value) or 0
    if not level or (levels and level > levels):
        return 0
    return level - (default or _DEFAULT_LEVEL)


def _seconds(value: Any) -> float | None:
    """Return a queue timeout in microseconds as seconds; None for 0, which means no limit."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value / 1e6 if whole and 0 < value < 2**63 else None


def _key(value: Any) -> str | None:
    """Return a name or a number as text; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**64 else None
    return value if 0 < len(value) <= MAX_KEY_CHARS else None


_OBJECT = msgspec.json.Decoder(dict[str, Any])


class _Reader:
    """Reads the inputs of one request by name, and notes those that it cannot read. Lifetime:
    request.
    """

    def __init__(self, inputs: Mapping[str, Tensor], parameters: Parameters) -> None:
        self._inputs = inputs
        self._parameters = parameters
        self.unread: list[str] = []

    def texts(self, name: str | None) -> tuple[str, ...]:
        """Return the prompts in a text input, each cut to the length that the router reads."""
        found = self._read(name, lambda one: tuple(_texts(one, MAX_ROWS, MAX_TEXT_BYTES)), ())
        return tuple(text for text in found if text)

    def ids(self, name: str | None, lengths: str | None) -> tuple[Tokens, ...]:
        """Return the token ids of each prompt in an input; the input `lengths` has the number of
        tokens of each.
        """
        rows = self._read(name, _rows, None)
        if rows is None:
            return ()
        ends = self._read(lengths, lambda one: _integers(one, MAX_ROWS).tolist(), [])
        if len(ends) < len(rows):
            ends = [rows.shape[1]] * len(rows)
        cut = (row[: max(end, 0)] for row, end in zip(rows, ends, strict=False))
        return tuple(row for row in cut if len(row))

    def number(self, name: str | None) -> int | None:
        """Return the number of tokens in an input; None if it is missing."""
        return count_of(self._scalar(name))

    def flag(self, name: str | None) -> bool:
        """Return whether an input or parameter that is a flag is set."""
        value = self._scalar(name)
        return isinstance(value, int) and value != 0

    def key(self, name: str | None) -> str | None:
        """Return the input that identifies a session or an adapter as text; None if it is missing
        or 0.
        """
        value = _key(self._scalar(name))
        return None if value == "0" else value

    def sampling(self, name: str | None) -> Mapping[str, Any]:
        """Return the sampling parameters, from a text input that has them as JSON, or else from the
        request's own parameters.
        """
        text = self._scalar(name)
        if not isinstance(text, str):
            return self._parameters
        try:
            return _OBJECT.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            self.unread.append(f"{name}: no JSON object")
            return self._parameters

    def digest(self, names: Iterable[str]) -> str | None:
        """Return a digest of the images in the inputs `names`; None if there are no images."""
        state, any_found = xxhash.xxh3_64(), False
        for name in names:
            one = self._inputs.get(name)
            if one is not None:
                any_found = True
                state.update(_bytes_of(one))
        return state.hexdigest() if any_found else None

    def _scalar(self, name: str | None) -> Any:
        """Return the first element of an input; if the input is missing, the request's parameter of
        this name.
        """
        if name is None:
            return None
        return self._read(name, _first_of, self._parameters.get(name))

    def _read(self, name: str | None, read: Any, default: Any) -> Any:
        one = None if name is None else self._inputs.get(name)
        if one is None:
            return default
        try:
            return read(one)
        except WireError as error:
            self.unread.append(f"{name}: {error}")
            return default


def _bytes_of(one: Tensor) -> Buffer:
    if one.raw is not None:
        return one.raw
    try:
        return msgspec.json.encode(one.listed)
    except (msgspec.MsgspecError, TypeError, RecursionError, UnicodeError):
        return b""


def _first_of(one: Tensor) -> Any:
    if one.datatype == TEXT:
        return next(_texts(one, 1, 1 << 16), None)
    found = _integers(one, 1)
    return int(found[0]) if len(found) else None


def _texts(one: Tensor, most: int, most_bytes: int) -> Iterator[str]:
    """Yield the first `most` elements of a text tensor, each cut to `most_bytes`. Raises WireError.

    Halves of surrogate pairs are replaced, because they cannot be encoded as UTF-8 and hashed.
    """
    for value in texts(one, most):
        data = value[:most_bytes]
        if isinstance(data, str):
            data = data.encode("utf-8", "replace")[:most_bytes]
        yield str(data, "utf-8", "replace")


def _integers(one: Tensor, most: int = MAX_VALUES) -> npt.NDArray[Any]:
    """Return the first elements of a tensor of integers or booleans as a flat array. Raises
    WireError.
    """
    found = numbers(one, most)
    if found.dtype.kind == "f":
        raise WireError(f"is {one.datatype}, no integer")
    return found


def _rows(one: Tensor) -> Tokens:
    """Return the token ids in a tensor that has one prompt in each row. Raises WireError."""
    if one.datatype not in _IDS:
        raise WireError(f"is {one.datatype[:16]}, not INT32 or INT64")
    if not 1 <= len(one.shape) <= MAX_RANK or min(one.shape) < 1:
        raise WireError("has a shape that holds nothing")
    ids = _integers(one)
    width = one.shape[-1]
    count = min(len(ids) // width, MAX_ROWS)
    if not count:
        raise WireError("has fewer values than its shape, or too many")
    ids = ids[: count * width].reshape(count, width)
    if ids.min() < 0:
        raise WireError("has ids below 0")
    if ids.max() > MAX_INT32:
        return ids.astype(np.int64)  # a copy: in the message they may lie at any address
    return ids.astype(np.int32, copy=False)
