"""The sampling parameters of a request. The module works without torch, so that servers can check
requests without it. Names and neutral values are those of OpenAI's API and of vLLM's
`SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

MAX_CHOICES = 64
MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_INT32 = 2**31 - 1
_MASK = (1 << 64) - 1


class InvalidParam(ValueError):  # noqa: N818 - an answer, not a failure
    """Raised for a sampling parameter out of its range; `field` names it, `message` is
    for people.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.message = message


_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_INTEGERS = (
    ("top_k", -1, MAX_INT32),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("min_tokens", 0, MAX_INT32),
)
_OPTIONAL = ("seed", "logprobs")
_ABOVE_LEAST = ("top_p", "repetition_penalty")  # the least value itself is refused


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules by which the tokens of one request are chosen and end; lifetime: request. Raises
    InvalidParam for a value out of range.

    `temperature` is 0 (greedy) to 100. `top_k` is the number of likeliest tokens that are kept; 0
    or -1 keeps all. `top_p`, in (0, 1], keeps the least set of likely tokens that has this mass.
    `min_p`, in [0, 1], is the share of the likeliest token's probability that a token must have.
    `repetition_penalty`, in (0, 100], divides positive and multiplies negative logits of tokens in
    prompt or output. `presence_penalty` and `frequency_penalty`, from -2 to 2, are subtracted from
    the logit of a token in the output, once or for each time that it occurs. `seed` is -2^63 to
    2^64-1; with None, the code that queues the request draws one. `stop` has strings that end the
    text, and `stop_token_ids` has tokens that end it. `logprobs` is how many of the likeliest
    tokens are returned besides the chosen one; with None, not even the chosen one is. `n` is the
    number of choices. With `ignore_eos`, the model's own end of text does not end the answer. The
    answer does not end before it has `min_tokens` tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, least, most in _NUMBERS:
            _check_number(name, getattr(self, name), least, most)
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_integer(name, value, low, high)
        _check_stops(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParam("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} ids")
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, MAX_INT32)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check_against(self, max_output_tokens: int, vocab: int) -> None:
        """Raise InvalidParam if a parameter contradicts the limit of this request's output or the
        vocabulary of the model.
        """
        if self.min_tokens > max_output_tokens:
            raise InvalidParam(
                "min_tokens",
                f"must be at most max_tokens ({max_output_tokens}), got {self.min_tokens}",
            )
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, vocab - 1)

    def stop_tokens(self, end_of_text: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end this request, for `Request.stop_tokens`; `end_of_text` has the
        model's own end tokens.
        """
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids.union(end_of_text)

    def choices(self, drawn_seed: int) -> list[SamplingParams]:
        """Return the parameters of each of the request's `n` choices, each with its own seed;
        `drawn_seed` is used if the request has no seed. The first choice keeps the seed, so that it
        is the answer of `n` = 1.
        """
        seed = drawn_seed if self.seed is None else self.seed
        return [replace(self, n=1, seed=choice_seed(seed, index)) for index in range(self.n)]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed (uint64) of the choice number `index`: the seed itself for 0, then the
    following numbers of splitmix64.
    """
    seed &= _MASK
    return mix(seed + index * 0x9E3779B97F4A7C15 & _MASK) if index else seed


def mix(value: int) -> int:
    """Return splitmix64's finalizer of a uint64, which maps numbers one to one (Steele, Lea, Flood,
    2014).
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _check_number(field: str, value: float, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not least <= value <= most:
        raise InvalidParam(field, f"must be {least:g}..{most:g}, got {value!r}")
    if value == least and field in _ABOVE_LEAST:
        raise InvalidParam(field, f"must be above {least:g} and at most {most:g}, got {value!r}")


def _check_integer(field: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidParam(field, f"must be an integer {least}..{most}, got {value!r}")


def _check_stops(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(one, str) for one in stop):
        raise InvalidParam("stop", "must be a tuple of strings")
    if len(stop) > MAX_STOPS:
        raise InvalidParam("stop", f"must have at most {MAX_STOPS} strings, got {len(stop)}")
    for one in stop:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            raise InvalidParam(
                "stop", f"strings must have 1..{MAX_STOP_CHARACTERS} characters, got {len(one)}"
            )
