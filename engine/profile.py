"""What a simulated engine instance is: step times and KV capacity, and a file to keep them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.step_time import StepTime

SUFFIX = ".json"  # by which a profile's name is known to be a file
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one GPU type at one degree of tensor parallelism."""

    name: str
    step_time: StepTime
    kv_capacity_tokens: int
    kv_bytes_per_token: int  # over all GPUs of the instance; 0 where nobody has said
    provenance: str


def read_profile(path: Path) -> Profile:
    """The profile kept in `path` (JSON, as `write_profile` leaves it).

    Raises ValueError for a file that cannot be read or holds something else, naming the field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"profile {path}: cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"profile {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"profile {path}: {error}") from error
    if found.kv_capacity_tokens < 1:
        raise ValueError(f"profile {path}: kv_capacity_tokens must be at least 1")
    return found


def write_profile(profile: Profile, path: Path) -> None:
    """Keep `profile` in `path`; raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
