"""Bodies are read as they come: what says that it is compressed is refused here.

A worker that believed the header would fail, at every worker alike, and the fleet would be blamed
for what a client did. Status and header: RFC 9110 (2022), sections 12.5.3 and 15.5.16.
"""

from __future__ import annotations

from router.http.client_request import ClientRequest
from router.http.errors import ClientError

_HEADER = "content-encoding"
_PLAIN = frozenset({b"", b"identity"})


def refuse_codings(request: ClientRequest) -> None:
    """Raises ClientError, status 415, for a Content-Encoding other than `identity`."""
    named = _HEADER.encode()
    told = (value for name, value in request.raw_headers if name.lower() == named)
    if any(part.strip().lower() not in _PLAIN for value in told for part in value.split(b",")):
        raise ClientError(
            415,
            "compressed bodies are not read here; send it without Content-Encoding",
            _HEADER,
            "unsupported_content_encoding",
            (("Accept-Encoding", "identity"),),
        )
