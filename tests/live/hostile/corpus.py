"""Requests that two HTTP parsers could read differently, and how the router must treat each.

They are grouped by topic: framing (RFC 9112, sections 6 and 11.2), line ends and folding (2.2,
5.2), targets (3.2), fields (RFC 9110, 5), protocol switches (RFC 9110, 7.8; RFC 7540, 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

BODY = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}'
_SIZED = b"Content-Length: %d" % len(BODY)
_CODED = b"Transfer-Encoding: chunked"
_WHOLE = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
_SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def head(
    *fields: bytes, line: bytes = b"POST /v1/completions HTTP/1.1", host: bool = True
) -> bytes:
    """Return a request head with these fields."""
    first = [line, b"Host: x"] if host else [line]
    return b"\r\n".join([*first, *fields]) + b"\r\n\r\n"


def sized(*fields: bytes, line: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    """Return a request with a valid body and content length, and with these fields and this request
    line.
    """
    return head(_SIZED, *fields, line=line) + BODY


def coded(chunks: bytes, *fields: bytes) -> bytes:
    """Return a request with a chunked body."""
    return head(_CODED, *fields) + chunks


def refused() -> Iterator[tuple[str, int, bytes]]:
    """Yield (name, status, bytes) of requests that must never reach a worker."""
    yield from _framing()
    yield from _chunks()
    yield from _lines()
    yield from _fields()
    yield from _first_lines()


def _framing() -> Iterator[tuple[str, int, bytes]]:
    both = _SIZED, _CODED
    yield "length and coding", 400, head(*both) + _WHOLE
    yield "coding and length", 400, head(*reversed(both)) + _WHOLE
    yield "length 0 and coding", 400, head(b"Content-Length: 0", _CODED) + _WHOLE + _SMUGGLED
    yield "two lengths", 400, head(_SIZED, b"Content-Length: 3") + BODY
    yield "twice one length", 400, head(_SIZED, _SIZED) + BODY
    yield "lengths in a list", 400, head(b"Content-Length: 3, 3") + b"abc"
    for name, value in (
        ("plus", b"+3"),
        ("minus", b"-3"),
        ("hexadecimal", b"0x3"),
        ("empty", b""),
        ("blank within", b"1 0"),
        ("fraction", b"3.0"),
        ("underscore", b"1_0"),
        ("other digits", "٣".encode()),
        ("beyond 64 bits", b"18446744073709551619"),
    ):
        yield f"length {name}", 400, head(b"Content-Length: " + value) + b"abc" + _SMUGGLED
    for name, value in (
        ("identity", b"identity"),
        ("gzip, chunked", b"gzip, chunked"),
        ("chunked, identity", b"chunked, identity"),
        ("chunked twice", b"chunked, chunked"),
        ("quoted", b'"chunked"'),
        ("with a parameter", b"chunked;q=1"),
        ("misspelt", b"xchunked"),
        ("with a tab within", b"chun\tked"),
        ("empty", b""),
    ):
        yield f"coding {name}", 400, head(b"Transfer-Encoding: " + value) + _WHOLE
    yield "two codings", 400, head(_CODED, _CODED) + _WHOLE
    yield "coding in HTTP/1.0", 400, head(_CODED, line=b"POST /v1/completions HTTP/1.0") + _WHOLE
    yield "length with underscore", 400, head(b"Content_Length: 3", _CODED) + _WHOLE
    yield "coding with underscore", 400, head(_SIZED, b"Transfer_Encoding: chunked") + BODY


def _chunks() -> Iterator[tuple[str, int, bytes]]:
    for name, chunks in (
        ("no number", b"zz\r\nabc\r\n0\r\n\r\n"),
        ("empty size", b"\r\nabc\r\n0\r\n\r\n"),
        ("negative", b"-3\r\nabc\r\n0\r\n\r\n"),
        ("plus", b"+3\r\nabc\r\n0\r\n\r\n"),
        ("0x", b"0x3\r\nabc\r\n0\r\n\r\n"),
        ("blank before", b" 3\r\nabc\r\n0\r\n\r\n"),
        ("underscore", b"1_0\r\nabc\r\n0\r\n\r\n"),
        ("beyond 64 bits", b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
        ("longer than told", b"2\r\nabc\r\n0\r\n\r\n"),
        ("shorter than told", b"4\r\nabc\r\n0\r\n\r\n"),
        ("LF after size", b"3\nabc\r\n0\r\n\r\n"),
        ("CR after size", b"3\rabc\r\n0\r\n\r\n"),
        ("LF after data", b"3\r\nabc\n0\r\n\r\n"),
        ("LF at the end", b"3\r\nabc\r\n0\n\n"),
        ("NUL in an extension", b"3;a=\0\r\nabc\r\n0\r\n\r\n"),
        ("LF in an extension", b"3;a=\nb\r\nabc\r\n0\r\n\r\n"),
        ("CR in an extension", b"3;a=\rb\r\nabc\r\n0\r\n\r\n"),
        ("long extension", b"3;a=" + b"x" * 5000 + b"\r\nabc\r\n0\r\n\r\n"),
        ("trailer without a colon", b"3\r\nabc\r\n0\r\nnonsense\r\n\r\n"),
        ("folded trailer", b"3\r\nabc\r\n0\r\na: b\r\n c\r\n\r\n"),
        ("long trailers", b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 5000 + b"\r\n"),
        ("tiny chunks", b"1\r\na\r\n" * 60_000 + b"0\r\n\r\n"),
    ):
        yield f"chunk: {name}", 400, coded(chunks)


def _lines() -> Iterator[tuple[str, int, bytes]]:
    good = sized(b"X-A: b")
    yield "LF for CRLF", 400, good.replace(b"\r\n", b"\n")
    yield "LF after one field", 400, good.replace(b"X-A: b\r\n", b"X-A: b\n")
    yield "CR after one field", 400, good.replace(b"X-A: b\r\n", b"X-A: b\r")
    yield "CR within a value", 400, sized(b"X-A: b\rX-B: c")
    yield "LF within a value", 400, sized(b"X-A: b\nTransfer-Encoding: chunked")
    yield "LF, LF at the end", 400, head(_SIZED)[:-2] + b"\n" + BODY
    yield "folded by a blank", 400, sized(b"X-A: b\r\n c")
    yield "folded by a tab", 400, sized(b"X-A: b\r\n\tc")
    yield "folded length", 400, head(b"Content-Length:\r\n 3") + b"abc"
    yield "folded coding", 400, head(b"Transfer-Encoding:\r\n chunked") + _WHOLE
    yield "blank line of blanks", 400, head(_SIZED)[:-2] + b" \r\n\r\n" + BODY
    yield "blank before the first field", 400, head(b" X: y", _SIZED, host=False) + BODY


def _fields() -> Iterator[tuple[str, int, bytes]]:
    yield "blank before the colon", 400, head(b"Content-Length : 3") + b"abc"
    yield "tab before the colon", 400, head(b"Transfer-Encoding\t: chunked") + _WHOLE
    yield "no colon", 400, sized(b"nonsense")
    yield "no name", 400, sized(b": value")
    for name, value in (("NUL", b"\0"), ("DEL", b"\x7f"), ("ESC", b"\x1b"), ("VT", b"\x0b")):
        yield f"{name} in a value", 400, sized(b"X-A: b" + value + b"c")
        yield f"{name} in a name", 400, sized(b"X" + value + b"A: b")
    yield "8 bits in a name", 400, sized(b"X-\xe9: b")
    yield "length after NUL", 400, head(b"\0Content-Length: 3") + b"abc"
    yield "no host", 400, head(_SIZED, host=False) + BODY
    yield "two hosts", 400, sized(b"Host: y")
    yield "two content types", 400, sized(b"Content-Type: a/b", b"Content-Type: c/d")
    yield "two authorizations", 400, sized(b"Authorization: a", b"Authorization: b")
    yield "connection no list", 400, sized(b"Connection: close;x")
    yield "expects something else", 417, sized(b"Expect: 200-ok")
    yield "a huge head", 431, sized(b"X-A: " + b"b" * 70_000)
    yield "a huge head of many", 431, sized(*(b"X-%d: %s" % (i, b"b" * 2000) for i in range(40)))
    yield "too many fields", 431, sized(*(b"X-%d: b" % i for i in range(200)))
    yield "a long field", 431, sized(b"X-A: " + b"b" * 40_000)


def _first_lines() -> Iterator[tuple[str, int, bytes]]:
    for name, status, line in (
        ("two blanks", 400, b"POST  /v1/completions HTTP/1.1"),
        ("tab", 400, b"POST\t/v1/completions HTTP/1.1"),
        ("blank at the end", 400, b"POST /v1/completions HTTP/1.1 "),
        ("blank before", 400, b" POST /v1/completions HTTP/1.1"),
        ("blank in the path", 400, b"POST /v1/comple tions HTTP/1.1"),
        ("no version", 400, b"POST /v1/completions"),
        ("HTTP/0.9", 400, b"POST /v1/completions HTTP/0.9"),
        ("HTTP/1.2", 400, b"POST /v1/completions HTTP/1.2"),
        ("HTTP/1.10", 400, b"POST /v1/completions HTTP/1.10"),
        ("HTTP/2.0", 400, b"POST /v1/completions HTTP/2.0"),
        ("http in small letters", 400, b"POST /v1/completions http/1.1"),
        ("another protocol", 400, b"POST /v1/completions RTSP/1.0"),
        ("small method", 400, b"post /v1/completions HTTP/1.1"),
        ("method with NUL", 400, b"PO\0ST /v1/completions HTTP/1.1"),
        ("no slash", 400, b"POST v1/completions HTTP/1.1"),
        ("authority alone", 400, b"POST x:80 HTTP/1.1"),
        ("asterisk", 400, b"OPTIONS * HTTP/1.1"),
        ("user in the authority", 400, b"POST http://u@x/v1/completions HTTP/1.1"),
        ("no authority", 400, b"POST http:///v1/completions HTTP/1.1"),
        ("a port that is none", 400, b"POST http://other:8%/v1/completions HTTP/1.1"),
        ("a negative port", 400, b"POST http://other:-80/v1/completions HTTP/1.1"),
        ("a port too high", 400, b"POST http://other:65536/v1/completions HTTP/1.1"),
        ("brackets for a host", 400, b"POST http://[[[/v1/completions HTTP/1.1"),
        ("file scheme", 400, b"POST file:///etc/passwd HTTP/1.1"),
        ("fragment", 400, b"POST /v1/completions#x HTTP/1.1"),
        ("8 bits", 400, b"POST /v1/\xe9 HTTP/1.1"),
        ("NUL in the path", 400, b"POST /v1/completions\0 HTTP/1.1"),
        ("TRACE", 405, b"TRACE /v1/completions HTTP/1.1"),
        ("CONNECT", 405, b"CONNECT x:80 HTTP/1.1"),
        ("CONNECT a path", 405, b"CONNECT /v1/completions HTTP/1.1"),
        ("an unknown method", 405, b"BREW /v1/completions HTTP/1.1"),
        ("dots", 404, b"POST /v1/x/../completions HTTP/1.1"),
        ("dots in code", 404, b"POST /v1/x/%2e%2e/completions HTTP/1.1"),
        ("two slashes", 404, b"POST //v1/completions HTTP/1.1"),
        ("slash in code", 404, b"POST /v1%2fcompletions HTTP/1.1"),
    ):
        yield f"line: {name}", status, sized(b"Connection: close", line=line)
    yield "preface of HTTP/2", 400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield "TLS", 400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)
    yield "SSH", 400, b"SSH-2.0-OpenSSH_9.6\r\n"
    yield "nothing of HTTP", 400, bytes(range(256))


def served() -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of unusual but valid requests, from each of which a worker gets the body
    `BODY`.
    """
    yield "plain", sized()
    yield "coded", coded(_WHOLE)
    yield "coded, in capitals", head(b"TRANSFER-ENCODING: ChUnKeD") + _WHOLE
    yield "extension and trailer", coded(_WHOLE.replace(b"0\r\n\r\n", b"0;x=y\r\nX-T: 1\r\n\r\n"))
    yield "bytes one by one", coded(b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n")
    yield "absolute", sized(line=b"POST http://other:80/v1/completions HTTP/1.1")
    yield "empty lines before", b"\r\n\r\n" + sized()
    yield "without a blank", sized(b"X-A:b").replace(b"Host: x", b"Host:x")
    yield "8 bits in a value", sized(b"X-A: \xe9\xff")
    yield "many fields", sized(*(b"X-%d: b" % i for i in range(100)))
    yield (
        "h2c offered",
        sized(
            *(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
        ),
    )
    yield "websocket offered", sized(b"Connection: keep-alive, Upgrade", b"Upgrade: websocket")
    yield (
        "connection names what is ours",
        sized(b"Connection: content-length, host, x-data-parallel-rank, authorization"),
    )
    yield "expects to go on", sized(b"Expect: 100-continue")
    yield "old", sized(line=b"POST /v1/completions HTTP/1.0")
    yield (
        "old, without a host",
        head(_SIZED, line=b"POST /v1/completions HTTP/1.0", host=False) + BODY,
    )


PRIVATE = (
    b"x-warmroute-internal-worker: 0",
    b"X-Warmroute_Internal-Worker: 0",
    b"x-data-parallel-rank: 1",
    b"X_Data_Parallel_Rank: 1",
    b"x-data-parallel-host-port: 10.0.0.1:80",
    b"x-prefiller-host-port: 10.0.0.1:80",
    b"x-prefiller-url: http://10.0.0.1",
    b"x-encoder-hosts-ports: 10.0.0.1:80",
    b"x-kv-cache-source-host-port: 10.0.0.1:80",
    b"x-override-bootstrap-host: 10.0.0.1",
    b"x-gateway-destination-endpoint: 10.0.0.1:80",
    b"X-Request-Id: ___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.1:2_0",
)
