"""The rule by which vLLM 0.32 names an image (`multimodal/hasher.py`,
`multimodal/processing/inputs.py`).

The name is a digest of the file's bytes as they came, of the model's name in `--model`, and of the
settings of image processing. So a URL and a `data:` URL of the same bytes have the same name, and
two servers with different names for one model name an image differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

# Parts of the digest's input; each key and each text or number is preceded by its length.
_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\0", b"\1", b"\2", b"\3"
_WHITE = (255, 255, 255)


def image_names(
    image: bytes,
    model: str,
    algorithm: str,
    *,
    processor: Mapping[str, Any] | None = None,
    media_io: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return two names of an image file: if it is in RGB, and if vLLM converts it to RGB.

    `algorithm` is `--mm-hasher-algorithm`: sha256 or sha512. Blake3, vLLM's default, takes the same
    input. `processor` and `media_io` are the merged `mm_processor_kwargs` and `media_io_kwargs` of
    the server and the request; only those for images count.
    """
    settings = {"image_mode": "RGB", "rgba_background_color": _WHITE}
    files = (image, {"io_config": settings, "data": image})
    parts = {"model_id": _value(model)}
    if processor:
        parts["mm_processor_kwargs"] = _value(processor)
    if media_io:
        parts["media_io_kwargs"] = _value({"image": media_io})
    plain, converted = (
        _digest(algorithm, {**parts, "image": _LEAF + _item("image", file)}) for file in files
    )
    return plain, converted


def _digest(algorithm: str, parts: Mapping[str, bytes]) -> str:
    data = b"".join(_framed(key.encode()) + parts[key] for key in sorted(parts))
    return hashlib.new(algorithm, data).hexdigest()


def _item(key: str, value: Any) -> bytes:
    return _framed(key.encode()) + _value(value)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _value(value: Any) -> bytes:
    match value:
        case None:
            return _NONE
        case list() | tuple():
            return _SEQUENCE + len(value).to_bytes(8, "little") + b"".join(map(_value, value))
        case dict():
            items = b"".join(_item(str(key), inner) for key, inner in value.items())
            return _MAPPING + len(value).to_bytes(8, "little") + items
        case bytes():
            return _LEAF + _framed(value)
        case str():
            return _LEAF + _framed(value.encode())
        case int():
            return _LEAF + _framed(value.to_bytes(8, "little", signed=True))
    raise TypeError(f"no form is known of {type(value).__name__}")
