"""Bodies of 16 MB that are legal JSON and as costly to parse as possible, and a client that
measures how long it waits meanwhile.

`python -m tests.live.hostile.heavy_bodies PORT PID` runs that client. Every few milliseconds it
asks the router (process PID) for /health and for a completion of a model that no worker serves. For
each line that it reads, it prints the longest waits since the last line, in milliseconds. Time in
which the router's threads waited for a core is not counted.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

BYTES = (16 << 20) - 4_096
EVERY_S = 0.003
LOST_S = 120.0

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Heavy:
    """One kind of heavy body. `code` is the error code of the router's answer, or None if any
    answer is allowed.
    """

    name: str
    path: str
    before: bytes
    item: bytes  # repeated as often as there is room
    after: bytes
    code: str | None = None
    most: int | None = None
    between: bytes = b","

    def body(self) -> bytes:
        room = BYTES - len(self.before) - len(self.after)
        count = room // (len(self.item) + len(self.between))
        items = self.between.join([self.item] * min(count, self.most or count))
        return b"".join((self.before, items, self.after))


def _message(text: bytes) -> bytes:
    return b'{"role":"user","content":"%b"}' % text


_TINY = b'{"model":"tiny","max_tokens":1,'
_HI = b'"messages":[{"role":"user","content":"hi"}]'
_LINE = b"One line of a text, and then\\n the next. "
_LONG = _LINE * 20
_IDS = b"[%b]" % b",".join(b"%d" % n for n in range(1_000, 4_300))
_MANY, _TOO_MUCH, _TEXT = "array_too_long", "too_many_values", "text_too_long"


def _list(name: str, path: str, field: bytes, item: bytes, code: str | None = None, most=None):
    return Heavy(name, path, _TINY + b'"%b":[' % field, item, b"]}", code, most)


def _text(name: str, path: str, field: bytes, piece: bytes, code: str | None = None) -> Heavy:
    return Heavy(name, path, _TINY + b'"%b":"' % field, piece, b'"}', code, between=b"")


def _chat_text(name: str, path: str, piece: bytes, code: str | None = None) -> Heavy:
    before = _TINY + b'"messages":[{"role":"user","content":"'
    return Heavy(name, path, before, piece, b'"}]}', code, between=b"")


def _many(name: str, pieces: int) -> Heavy:
    piece = b"the quick brown fox "
    return Heavy(name, COMPLETIONS, _TINY + b'"prompt":"', piece, b'"}', None, pieces, b"")


BODIES = (
    _list("280,000 messages", MESSAGES, b"messages", _message(b"Hello, how are you? " * 2), _MANY),
    _list("280,000 messages", CHAT, b"messages", _message(b"Hello, how are you? " * 2), _MANY),
    _list("280,000 items", RESPONSES, b"input", _message(b"Hello, how are you? " * 2), _MANY),
    _list("19,000 messages", MESSAGES, b"messages", _message(_LONG)),
    _list("19,000 messages", CHAT, b"messages", _message(_LONG)),
    _list("19,000 items", RESPONSES, b"input", _message(_LONG)),
    _list("1,020 prompts of ids", COMPLETIONS, b"prompt", _IDS),
    _list("1,020 prompts of ids", EMBEDDINGS, b"input", _IDS),
    _list("one prompt of 8 million ids", COMPLETIONS, b"prompt", b"7"),
    _list("one prompt of 8 million ids", EMBEDDINGS, b"input", b"7"),
    _list("ids for /generate", "/generate", b"input_ids", b"123456"),
    _list("token ids", "/inference/v1/generate", b"token_ids", b"123456"),
    _list("8 million ids", "/detokenize", b"tokens", b"7"),
    _list("1,020 texts", COMPLETIONS, b"prompt", b'"%b"' % (_LINE * 400)),
    _list("1,020 texts", EMBEDDINGS, b"input", b'"%b"' % (_LINE * 400)),
    _list("4 million texts", EMBEDDINGS, b"input", b'"a"', _MANY),
    _list("4 million texts", COMPLETIONS, b"prompt", b'"a"', _MANY),
    _list("objects", EMBEDDINGS, b"input", b'{"text":"a"}'),
    _list("nothing but lists", COMPLETIONS, b"prompt", b"[]"),
    _list("500,000 documents", "/v1/rerank", b"documents", b'"a document of some words"'),
    _text("one text of escapes", COMPLETIONS, b"prompt", b"\\n\\n\\n\\n"),
    _text("one text of escapes", RESPONSES, b"input", b"\\n\\n\\n\\n", _TEXT),
    _text("one Chinese text", COMPLETIONS, b"prompt", "東京は夜".encode()),
    _text("one English text", COMPLETIONS, b"prompt", b"the quick brown fox "),
    _many("4 million characters", 200_000),  # the longest text that is tokenized
    _many("1 million characters", 50_000),
    _list("1,000 messages", CHAT, b"messages", _message(b"hello " * 166), most=1_000),
    _text("one English text", RESPONSES, b"input", b"the quick brown fox "),
    _text("surrogates", EMBEDDINGS, b"input", b"\\ud83d\\ude00"),
    _text("one text", "/generate", b"text", b"\\u00e9"),
    _text("one text", "/tokenize", b"prompt", b"\\u00e9"),
    _chat_text("a message of escapes", MESSAGES, b"\\n\\n\\n\\n", _TEXT),
    _chat_text("a message of escapes", CHAT, b"\\n\\n\\n\\n"),
    _chat_text("an English message", CHAT, b"the quick brown fox "),
    Heavy(
        "an image",
        MESSAGES,
        _TINY + b'"messages":[{"role":"user","content":[{"type":"image","source":{"data":"',
        b"iVBORw0KGgo",
        b'"}}]}]}',
        between=b"",
    ),
    Heavy(
        "an image",
        CHAT,
        _TINY + b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"',
        b"iVBORw0KGgo",
        b'"}}]}]}',
        between=b"",
    ),
    Heavy(
        "500,000 parts",
        MESSAGES,
        _TINY + b'"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"hi"}',
        b"]}]}",
        _TOO_MUCH,
    ),
    Heavy(
        "40,000 parts",
        CHAT,
        _TINY + b'"messages":[{"role":"user","content":[{"type":"image"},',
        b'{"type":"text","text":"%b"}' % (b"a piece of text, " * 20),
        b"]}]}",
        most=40_000,
    ),
    Heavy("lists as tools", MESSAGES, _TINY + _HI + b',"tools":[', b"[]", b"]}", _TOO_MUCH),
    Heavy("130,000 tools", MESSAGES, _TINY + _HI + b',"tools":[', b"[]", b"]}", most=130_000),
    Heavy("lists as tools", CHAT, _TINY + _HI + b',"tools":[1.5,', b"[]", b"]}", _TOO_MUCH),
    Heavy(
        "options",
        CHAT,
        _TINY + _HI + b',"x":1e999,"chat_template_kwargs":{',
        b'"a":{}',
        b"}}",
        _TOO_MUCH,
    ),
    Heavy("fields", MESSAGES, _TINY, b'"a":{}', b"," + _HI + b"}"),
    Heavy("fields", CHAT, _TINY + b'"x":1e999,', b'"a":{}', b"," + _HI + b"}"),
    Heavy("the same field", RESPONSES, _TINY, b'"input":[{}]', b',"input":"hi"}'),
    Heavy("unknown lists", MESSAGES, _TINY + _HI + b',"x":[', b"[]", b"]}"),
    Heavy("deep lists", MESSAGES, _TINY + _HI + b',"x":[', b"[" * 200 + b"]" * 200, b"]}"),
    Heavy("blanks", MESSAGES, _TINY + _HI, b" ", b"}", between=b""),
    Heavy("no JSON", CHAT, _TINY + _HI + b',"tools":[', b"[]", b"]", "invalid_json"),
    Heavy("no JSON", EMBEDDINGS, _TINY + b'"input":[', b"[1,2]", b"]", "invalid_json"),
)


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Post a body; return (status, answer)."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), LOST_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        with HTTPResponse(connection) as response:
            response.begin()
            return response.status, response.read()


class Waits:
    """Measures how long a client waits for the answer to a request that it repeats. Lifetime:
    program.
    """

    def __init__(self, port: int, pid: int, request: bytes) -> None:
        self._port, self._request = port, request
        self._threads = Path(f"/proc/{pid}/task")
        self._longest_s = 0.0
        self._began_s: float | None = None  # of the request under way
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), LOST_S) as connection:
            while True:
                self._began_s = self._now_s()
                connection.sendall(self._request)
                response = HTTPResponse(connection)
                response.begin()
                response.read()
                self._note()
                self._began_s = None
                time.sleep(EVERY_S)

    def _note(self) -> None:
        if (began_s := self._began_s) is not None:
            self._longest_s = max(self._longest_s, self._now_s() - began_s)

    def _now_s(self) -> float:
        """Return the seconds of a clock that stops while a thread of the router waits for a core
        (Linux, schedstat).
        """
        queued_ns = 0
        for thread in self._threads.iterdir():
            try:
                queued_ns += int((thread / "schedstat").read_bytes().split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
        return time.monotonic() - queued_ns / 1e9

    def take_ms(self) -> float:
        """Return the client's longest wait since the last call, in ms."""
        self._note()
        longest_s, self._longest_s = self._longest_s, 0.0
        return 1e3 * longest_s


def main(port: int, pid: int) -> None:
    """Repeat two requests without end; for each line of input, print the longest waits since the
    last line.
    """
    asked = json.dumps({"model": "nobody", "prompt": "a few words", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(asked)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    waits = (Waits(port, pid, health), Waits(port, pid, head + asked))
    for _ in sys.stdin:
        print(json.dumps([one.take_ms() for one in waits]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
