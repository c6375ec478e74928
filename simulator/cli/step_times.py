"""The command `profile`: derives step times of a model on a GPU from its config.json alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from engine.profiles import SUFFIX, gpus_of, write_profile
from simulator.cli.flags import OneOf, Place, at_most, command
from simulator.cli.usage import UsageError, check_files
from simulator.step_times.derive import MOST_GPUS, Deployment, DeploymentError, Derived, derived
from simulator.step_times.fields import ConfigError
from simulator.step_times.from_tables import ENGINES, from_tables
from simulator.step_times.gpus import GPUS
from simulator.step_times.model_shape import ModelShape
from simulator.step_times.read_shape import read_shape
from simulator.step_times.storage import STORAGES, Stored

# A constant's factor, unit and meaning.
_UNITS = {
    "linear_s": (1e6, "µs per new token", "products, all-reduces, attention in windows"),
    "pair_s": (1e12, "ps per query-key pair", "prefill attention"),
    "weights_s": (1e3, "ms per step", "weights that every token uses, small kernels"),
    "experts_s": (1e3, "ms per step", "all routed experts, where every one is visited"),
    "expert_share": (1.0, "", "of the routed experts, visited by one token"),
    "context_s": (1e9, "µs per 1,000 tokens", "KV that decodes read"),
    "overhead_s": (1e3, "ms per step", "CPU time: scheduling, launches; usual value"),
    "seq_s": (1e6, "µs per sequence", "CPU time: usual value; and KV of windows"),
    "softmax_p": (1.0, "", "how softly reading and computing overlap"),
}
_SHOWN = ((512, 0), (8192, 0), (8192, 122_880))  # prefills: new tokens, cached tokens
_DECODES = ((1, 1024), (64, 4096), (256, 1024))  # requests, tokens of context each


class FromConfig(Struct, kw_only=True):
    """The options of `profile`."""

    config: Annotated[Path, Place(), "CONFIG.json", "config.json of a model, or its folder"]
    gpu: Annotated[str, OneOf(tuple(GPUS)), "GPU", f"GPU of the worker: {', '.join(GPUS)}"]
    tp: Annotated[int, at_most(MOST_GPUS), "N", "number of tensor-parallel GPUs of one worker"] = 1
    ep: Annotated[bool, "whether each GPU holds whole experts, not a part of every expert"] = False
    weights: Annotated[str | None, OneOf(tuple(STORAGES)), "FORMAT", "how weights are stored: "
        f"{', '.join(STORAGES)}; default: as the config says"] = None  # fmt: skip
    kv: Annotated[str | None, OneOf(("bf16", "fp8")), "FORMAT", "how KV is stored, bf16 or fp8; "
        "default: as the config says, else bf16"] = None  # fmt: skip
    tables: Annotated[str | None, OneOf(ENGINES), "ENGINE", "fit the kernels to AIConfigurator's "
        f"tables of this engine, {', '.join(ENGINES)}: pip install 'warmroute[aic]'"
    ] = None  # fmt: skip
    name: Annotated[str | None, "NAME", "name of the profile; default: model, GPU and degree"
    ] = None  # fmt: skip
    out: Annotated[
        Path | None, "FILE.json", "file that gets the profile, for --profile and --timed"
    ] = None


@command(
    "CONFIG.json --gpu GPU [--tp N] [option]...",
    "examples:\n"
    "  warmroute-sim profile Qwen3-32B/config.json --gpu h100 --tp 2 --out qwen3-32b-tp2.json\n"
    "  warmroute-sim profile gpt-oss-120b --gpu b200\n"
    "  warmroute-sim profile gpt-oss-120b --gpu h100 --tp 2 --tables vllm\n"
    "  warmroute-sim profile DeepSeek-V3 --gpu h200 --tp 8 --ep --kv fp8\n"
    "  warmroute-sim profile Llama-3.1-70B --gpu h100 --tp 4 --weights fp8\n"
    "then\n"
    "  warmroute-sim replay requests.jsonl --profile qwen3-32b-tp2.json\n\n"
    "Nothing is downloaded and no GPU is needed. `calibrate` measures a running engine instead.\n",
)
def profile(options: FromConfig, console: Console) -> bool:
    """Derives step times and KV capacity from a Hugging Face config.json, the data sheet of a GPU,
    and the shares of its peak that measured kernels reach; or fits the kernels to an engine's
    tables. Prints its assumptions and the error to expect.
    """
    if options.out is not None:
        check_files([options.config, options.config / "config.json"], out=options.out)
        if options.out.suffix != SUFFIX:
            raise UsageError(f"--out {options.out}: a profile's name ends in {SUFFIX}")
    if options.tables is not None and (options.weights or options.kv):
        raise UsageError("--tables takes the formats of the config: leave --weights and --kv out")
    try:
        shape = _shape(options)
        kv_fp8 = options.kv == "fp8" or (options.kv is None and shape.kv_fp8)
        on = Deployment(GPUS[options.gpu], options.tp, options.ep, kv_fp8)
        found = derived(shape, on, _name(options))
    except (ConfigError, DeploymentError) as error:
        raise UsageError(str(error)) from error
    if options.tables is not None:
        found = _tabled(found, on, options)
    console.print(_constants(found), _steps(found))
    for line in _profile_lines(shape, found, on):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.out is not None:
        write_profile(found.profile, options.out)
        for line in _written(options.out, on):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return True


def _tabled(found: Derived, on: Deployment, options: FromConfig) -> Derived:
    """Return the derived profile with its kernels fitted to the tables of `options.tables`."""
    engine = str(options.tables)
    made, errors = from_tables(found.profile, options.config, on, options.gpu, engine)
    off = "; ".join(f"{one.kind} {one.median:.1%}, worst {one.worst:.1%}" for one in errors.kinds)
    return replace(found, profile=made, error=f"against {errors.source}: {off}")


def _shape(options: FromConfig) -> ModelShape:
    shape = read_shape(options.config)
    if options.weights is None:
        return shape
    storage = STORAGES[options.weights]
    said = f"weights are {storage.name} as --weights says; embeddings and the last product bf16"
    return replace(shape, stored=Stored(storage, storage, storage), assumed=(*shape.assumed, said))


def _name(options: FromConfig) -> str:
    if options.name is not None:
        return options.name
    if options.out is not None:
        return options.out.stem
    path = options.config.resolve()
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
    model = path.stem if folder is None else folder.name
    plain = re.sub(r"[^a-z0-9.]+", "-", model.lower()).strip("-") or "model"
    degree = f"-{'ep' if options.ep else 'tp'}{options.tp}" if options.tp > 1 else ""
    return f"{plain}-{options.gpu}{degree}"


def _constants(found: Derived) -> Table:
    table = Table("constant", "value", "unit", "what", title=found.profile.name)
    without = ("experts_s", "expert_share") if found.kind == "dense" else ()
    for name, (factor, unit, what) in _UNITS.items():
        if name in without:
            continue
        value = getattr(found.profile.step_time, name) * factor
        table.add_row(name, f"{value:.4g}", unit, what)
    return table


def _steps(found: Derived) -> Table:
    step_time = found.profile.step_time
    table = Table("step", "predicted", title="for example")
    for new, cached in _SHOWN:
        behind = f" behind {cached:,} cached" if cached else ""
        seconds = step_time.prefill_s(new, cached)
        table.add_row(f"prefill of {new:,}{behind}", f"{seconds * 1e3:,.1f} ms")
    for requests, context in _DECODES:
        seconds = step_time.decode_step_s(requests, requests * context)
        table.add_row(f"decode of {requests:,} x {context:,}", f"{seconds * 1e3:,.1f} ms")
    return table


def _profile_lines(shape: ModelShape, found: Derived, on: Deployment) -> list[str]:
    profile = found.profile
    stored = shape.stored
    parts = {"attention": stored.attention.name}
    if shape.dense_layers or shape.shared_width:
        parts["dense layers"] = stored.dense.name
    if shape.expert_layers:
        parts["experts"] = stored.experts.name
    formats = ", ".join(f"{part} {name}" for part, name in parts.items())
    if len(set(parts.values())) == 1:
        formats = next(iter(parts.values()))
    return [
        f"model: {shape.architecture}, {shape.parameters / 1e9:.1f} billion parameters, "
        f"{shape.active_parameters / 1e9:.1f} of them for one token; {_layers(shape)}",
        f"weights: {found.weight_bytes / 1e9:.1f} GB in all ({formats})",
        f"KV: {profile.kv_capacity_tokens:,} tokens of {profile.kv_bytes_per_token:,} bytes "
        f"({'fp8' if on.kv_fp8 else 'bf16'}); {found.room_bytes / 1e9:.1f} GB of each of "
        f"{on.gpus} x {on.gpu.title}",
        f"expected error, CPU time apart: {found.error}",
        *(f"assumed: {one}" for one in found.assumed),
    ]


def _layers(shape: ModelShape) -> str:
    counts = {
        "of full attention": shape.full_layers,
        f"with a window of {shape.window:,}": shape.window_layers,
        "without KV": shape.state_layers,
        "of experts": shape.expert_layers,
    }
    return "layers " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _written(out: Path, on: Deployment) -> list[str]:
    found = [f"{out}: use it as --profile {out}"]
    if gpus_of(out.name) != on.gpus:
        degree = f"{'ep' if on.whole_experts else 'tp'}{on.gpus}"
        found.append(
            f"{out}: commands that count GPUs read them in the file's name, {gpus_of(out.name)} in "
            f"this one; name it like {out.stem}-{degree}{SUFFIX}"
        )
    return found
