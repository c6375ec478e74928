"""Makes chats with images: new, repeated, the same in other places, and with names that clients
give.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.engines.traffic import words
from tests.engines.vllm_server import MODEL

SIDES = (56, 84, 112, 224, 300)  # of an image, pixels
RGB = 2
COLORS = {0: 1, RGB: 3, 6: 4}  # PNG's types of color (grey, RGB, RGBA): bytes a pixel
COLOR_AT = 25  # where a file tells its type
IMAGES = 6  # images that recur
LASTING = 6  # chats that may be asked again
MOST_IMAGES = 4  # of a chat that goes on
Part = dict[str, Any]


def png(draw: random.Random, color: int | None = None) -> bytes:
    """Return a PNG image of random size, each row in one random colour."""
    kind = draw.choice(list(COLORS)) if color is None else color
    width, height = draw.choice(SIDES), draw.choice(SIDES)
    rows = b"".join(b"\0" + draw.randbytes(COLORS[kind]) * width for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(image: bytes) -> str:
    """Return the image as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(image).decode()


def images_of(messages: list[Any]) -> list[Part]:
    """Return a chat's image parts, in order."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] == "image_url"]


@dataclass(slots=True)
class ImageTraffic:
    """Draws chats with images that continue earlier chats. Lifetime: test."""

    draw: random.Random
    site: str  # serves image number N at /N.png
    images: list[bytes] = field(default_factory=list)
    said: list[list[Any]] = field(default_factory=list)  # messages, with their answers

    def __post_init__(self) -> None:
        """Draw the images that several chats contain."""
        self.images += [png(self.draw) for _ in range(IMAGES)]

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the next request."""
        return {
            "model": MODEL,
            "messages": self._messages(),
            "max_tokens": self.draw.choice([1, 1, 8, 40]),
            "temperature": 0,
            "ignore_eos": True,
        }

    def file_of(self, part: Part) -> bytes:
        """Return the bytes of the image in a chat's part."""
        url: str = part["image_url"]["url"]
        if url.startswith(self.site):
            return self.images[int(url.rpartition("/")[2].removesuffix(".png"))]
        return base64.b64decode(url.partition(",")[2])

    def answered(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Record a request's answer, so that a later chat may continue it."""
        said = answer["choices"][0]["message"]["content"] or ""
        self.said.append([*body["messages"], {"role": "assistant", "content": said}])
        del self.said[:-LASTING]

    def _messages(self) -> list[Any]:
        before = self.draw.choice(self.said) if self.said else self._new()
        match self.draw.choices(range(5), (3, 3, 3, 6, 1))[0]:
            case 0:
                return self._new()
            case 1:
                return before[:-1] or before
            case 2:
                return self._with_another_image(before[:-1] or before)
            case 3 if len(images_of(before)) < MOST_IMAGES:
                return [*before, self._message()]
            case _:
                return [self._message(words(self.draw, 50), images=0)]

    def _new(self) -> list[Any]:
        return [self._message(words(self.draw, self.draw.randrange(2, 60)))]

    def _message(self, text: str = "", images: int | None = None) -> Any:
        parts = [self._text(text or words(self.draw, self.draw.randrange(1, 30)))]
        for _ in range(self.draw.choice([0, 1, 1, 2]) if images is None else images):
            parts.insert(self.draw.randrange(len(parts) + 1), self._image())
            parts.append(self._text(words(self.draw, self.draw.randrange(1, 12))))
        return {"role": "user", "content": parts}

    def _text(self, text: str) -> Part:
        return {"type": "text", "text": text}

    def _image(self) -> Part:
        """Return a message part with a new or recurring image, as bytes or as a URL, sometimes with
        a name given by the client.
        """
        at = self.draw.randrange(len(self.images))
        kind = self.draw.randrange(6)
        url = data_url(png(self.draw) if kind == 0 else self.images[at])
        if kind == 1:
            url = f"{self.site}/{at}.png"
        part: Part = {"type": "image_url", "image_url": {"url": url}}
        return {**part, "uuid": f"client-{at}"} if kind == 2 else part

    def _with_another_image(self, messages: list[Any]) -> list[Any]:
        changed = deepcopy(messages)
        for message in changed:
            for at, part in enumerate(message["content"]):
                if isinstance(part, dict) and part["type"] == "image_url":
                    message["content"][at] = self._image()
                    return changed
        return changed
