"""Finds out from the configuration of a Triton model which of its inputs is the prompt, the output
limit and so on. The names of inputs are those of Triton's TensorRT-LLM backend
(`inflight_batcher_llm`, `llmapi`) and of its vLLM backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from engine.wire.events import WireError

MAX_INPUTS = 256  # of a model, or of a request
MAX_STEPS = 64  # of an ensemble
MAX_INT32 = 2**31 - 1
# By the names that models give them, the first one found counts.
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text_input", "QUERY", "prompt"),
        "ids": ("input_ids",),
        "lengths": ("input_lengths",),
        "max_tokens": (
            *("max_tokens", "request_output_len", "sampling_param_max_tokens"),
            "REQUEST_OUTPUT_LEN",
        ),
        "stream": ("stream", "streaming"),
        "session": ("session_id",),
        "adapter": ("lora_task_id", "lora_id", "lora_name"),
        "stop": ("stop",),
        "sampling": ("sampling_parameters",),
    }
)
_IMAGES = ("image_bytes", "image_url_input", "image_url", "image")
_OF_PROMPTS = frozenset({"text", "ids", "lengths"})
_ENGINES = ("tensorrtllm", "vllm")  # backends


class _Tensor(msgspec.Struct):
    name: str
    data_type: str = ""


class _Step(msgspec.Struct):
    """One model of an ensemble. Both maps of the step map the model's own tensor names to tensor
    names of the ensemble.
    """

    model_name: str
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class _Ensemble(msgspec.Struct):
    step: list[_Step] = []


class _Policy(msgspec.Struct):
    decoupled: bool = False


class _Batching(msgspec.Struct):
    """The priority levels of a model's batcher. The JSON of protobuf may contain these numbers as
    texts.
    """

    priority_levels: Any = 0
    default_priority_level: Any = 0


class ModelConfig(msgspec.Struct):
    """The part of a model's configuration that determines the roles of the model's inputs.
    Lifetime: while a worker is recognized.
    """

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    input: list[_Tensor] = []
    ensemble_scheduling: _Ensemble | None = None
    dynamic_batching: _Batching | None = None
    sequence_batching: dict[str, Any] | None = None
    model_transaction_policy: _Policy | None = None

    @property
    def decoupled(self) -> bool:
        """True if a request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled

    @property
    def levels(self) -> tuple[int, int]:
        """The number of priority levels, and the level of requests without a priority. Both are 0
        if the model has no priority levels.
        """
        batching = self.dynamic_batching
        if batching is None or not (levels := count_of(batching.priority_levels)):
            return 0, 0
        return levels, min(count_of(batching.default_priority_level) or 1, levels)

    @property
    def steps(self) -> list[_Step]:
        """The steps of an ensemble; empty if the model is not an ensemble."""
        return self.ensemble_scheduling.step if self.ensemble_scheduling else []


_CONFIG = msgspec.json.Decoder(ModelConfig)


def config_of(body: bytes) -> ModelConfig:
    """Return the model configuration in a server's JSON answer. Raises WireError if the answer is
    malformed.
    """
    try:
        config = _CONFIG.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a model's config: {error}") from error
    if len(config.input) > MAX_INPUTS or len(config.steps) > MAX_STEPS:
        raise WireError(f"a model's config has over {MAX_INPUTS} inputs, or {MAX_STEPS} steps")
    return config


@dataclass(frozen=True, slots=True)
class Roles:
    """The names of a model's inputs by role; a name is None if no input has the role. Lifetime:
    worker.
    """

    text: str | None = None  # BYTES, each element a prompt
    ids: str | None = None  # of tokens, each row a prompt
    lengths: str | None = None  # how many ids of each row count
    max_tokens: str | None = None
    stream: str | None = None
    session: str | None = None
    adapter: str | None = None
    stop: str | None = None  # true: ends the request that has the same id
    sampling: str | None = None  # a JSON object as text, in which there are others of these
    images: tuple[str, ...] = ()
    decoupled: bool = False
    sequences: bool = False  # requests of a sequence must meet the same server
    # True if a request may run on after its client has left: the model has steps, or may call
    # another model.
    runs_on: bool = False
    levels: tuple[int, int] = (0, 0)  # as of `ModelConfig`
    why: str = "by load alone"  # how it was found, for people
    there: tuple[str, ...] = ()  # the names of all inputs; empty: unknown

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that the router has to read."""
        named = (getattr(self, name) for name in _NAMES)
        return frozenset(name for name in (*named, *self.images) if name is not None)


ROLES = tuple(_NAMES)  # that an operator may give, by name
BY_LOAD = Roles()
RolesOf = Callable[[str], Roles]  # by a model's name
# For a server that reports no configuration: inputs by their usual names.
_USUAL: dict[str, Any] = {role: names[0] for role, names in _NAMES.items()}
USUAL = Roles(images=_IMAGES, why="usual names", **_USUAL)


def usual_roles(model: str) -> Roles:
    """Return the usual roles of inputs, for a model whose configuration is unknown."""
    return USUAL


def roles_of(
    config: ModelConfig, others: Mapping[str, ModelConfig] = MappingProxyType({})
) -> Roles:
    """Return the roles of a model's inputs. `others` has the configurations of other models of the
    same server, by name.
    """
    roles = _ensemble(config, others) if config.steps else None
    return replace(roles or _named(config), runs_on=_runs_on(config, others))


def _runs_on(config: ModelConfig, others: Mapping[str, ModelConfig]) -> bool:
    """Return whether a request of the model keeps running after it was cancelled. Triton cancels
    the requested model, but not the running step of an ensemble, nor models that a Python model
    calls (BLS).
    """
    if config.steps:
        return True
    if config.backend != "python" or _computes(config):
        return False
    return any(_computes(one) for one in others.values())


def overridden(roles: Roles, given: Mapping[str, str]) -> Roles:
    """Return the roles, with those that the operator set in place of others. An empty name means
    that no input has the role.
    """
    if not given:
        return roles
    if given.keys() & {"text", "ids"}:  # one prompt, and it is the one that was given
        roles = replace(roles, text=None, ids=None, lengths=None)
    told: dict[str, Any] = {name: value or None for name, value in given.items()}
    changed = replace(roles, **told)
    prompt = changed.ids or changed.text
    return replace(changed, why=f"configured: {prompt}" if prompt else "configured: by load alone")


def given_roles(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of inputs that the operator set for roles, by model; each line is
    `MODEL:ROLE=INPUT`. Raises ValueError for a malformed line.
    """
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        model, _, pair = line.rpartition(":")
        role, equals, name = pair.partition("=")
        if not model or not equals or role not in ROLES:
            allowed = ", ".join(ROLES)
            raise ValueError(f"{line[:200]!r} is not MODEL:ROLE=INPUT; roles: {allowed}")
        found.setdefault(model, {})[role] = name
    return found


def _named(config: ModelConfig) -> Roles:
    """Return the roles that follow from the names of the inputs. If no name is known, the first
    text input is the prompt.
    """
    there = {one.name: one.data_type for one in config.input}
    found = {
        role: name for role, names in _NAMES.items() if (name := _first(names, there)) is not None
    }
    if found.get("text") and there[found["text"]] not in ("TYPE_STRING", ""):
        del found["text"]
    what = config.backend or config.platform or "model"
    prompt = found.get("ids") or found.get("text")
    why = f"{what}: {prompt}"
    if prompt is None:
        texts = [name for name, kind in there.items() if kind == "TYPE_STRING"]
        rest = [name for name in texts if name not in found.values() and name not in _IMAGES]
        if rest:
            found["text"] = rest[0]
            why = f"{what}: {rest[0]}, the first text"
        else:
            why = BY_LOAD.why
    images = tuple(name for name in _IMAGES if name in there)
    stuck = config.sequence_batching is not None
    more: dict[str, Any] = dict(found)
    told: dict[str, Any] = {
        "decoupled": config.decoupled,
        "sequences": stuck,
        "levels": config.levels,
    }
    return Roles(images=images, why=why, there=tuple(there), **told, **more)


def _first(names: Iterable[str], there: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in there), None)


def _ensemble(config: ModelConfig, others: Mapping[str, ModelConfig]) -> Roles | None:
    """Return the roles of an ensemble: the inputs of the step that computes the answer, traced back
    to the ensemble's own inputs.

    Return None if there is no such step, or if its prompt comes from none of the ensemble's inputs.
    """
    engine = next((step for step in config.steps if _is_engine(others, step)), None)
    if engine is None:
        return None
    step = _named(others[engine.model_name])
    direct = _named(config)  # where the trace ends too early, a name that is well known is taken
    found: dict[str, Any] = {}
    for role in ROLES:
        name, of_prompt = getattr(step, role), role in _OF_PROMPTS
        source = None if name is None else _origin(config, others, engine, name, of_prompt)
        own = None if of_prompt else getattr(direct, role)
        found[role] = source or own
    kinds = {one.name: one.data_type for one in config.input}
    prompt = found["ids"] or found["text"]
    if prompt is None:
        return None
    if kinds[prompt] == "TYPE_STRING":  # ids are made of it on the way
        found["text"], found["ids"], found["lengths"] = prompt, None, None
    why = f"ensemble, as {engine.model_name}: {prompt}"
    return replace(direct, levels=step.levels, why=why, **found)


def _is_engine(others: Mapping[str, ModelConfig], step: _Step) -> bool:
    model = others.get(step.model_name)
    return model is not None and _computes(model)


def _computes(model: ModelConfig) -> bool:
    """Return True if the model is an LLM engine, which computes prompts."""
    names = {one.name for one in model.input}
    return model.backend in _ENGINES or {"input_ids", "request_output_len"} <= names


def _origin(
    config: ModelConfig,
    others: Mapping[str, ModelConfig],
    step: _Step,
    name: str,
    of_prompt: bool,
) -> str | None:
    """Return the ensemble's own input that a step's input `name` comes from; None if it comes from
    none.

    If an earlier step makes the tensor, the search continues at that step's input of the same name,
    or, for a prompt, at that step's prompt.
    """
    own = {one.name for one in config.input}
    for _ in range(MAX_STEPS):
        tensor = step.input_map.get(name)
        if tensor is None or tensor in own:
            return tensor
        made = ((s, out) for s in config.steps for out, t in s.output_map.items() if t == tensor)
        before = next(made, None)
        if before is None:
            return None
        step, output = before
        same = {one.lower(): one for one in step.input_map}.get(output.lower())
        if same is None and of_prompt:
            model = others.get(step.model_name)
            same = _named(model).text if model is not None else None
        if same is None:
            return None
        name = same
    return None


def count_of(value: Any) -> int | None:
    """Return a number of tokens, or None if `value` is not one. The number may be given as a text,
    as old clients of vLLM's backend send it.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= MAX_INT32 else None
