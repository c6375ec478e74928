"""Reads the version and revision that an engine reports."""

from __future__ import annotations

import msgspec

from router.engines.adapter import NO_VERSION, EngineVersion, Interview
from router.engines.spec import is_revision

VERSION_PATH = "/version"  # of vLLM, TensorRT-LLM and our engine
_MAX_CHARACTERS = 500


class _VersionAnswer(msgspec.Struct):
    version: str = ""


class _RevisionAnswer(_VersionAnswer):
    revision: str | None = None


def version_in(body: bytes, path: str) -> EngineVersion:
    """Return the version in the answer to GET `path`. The version is empty if the answer has none.
    Only the answer to GET /version has a revision: in SGLang's `/server_info`, the key of that name
    is the revision of the model at its hub.
    """
    told = _RevisionAnswer if path == VERSION_PATH else _VersionAnswer
    try:
        answer = msgspec.json.decode(body, type=told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_VERSION
    revision = answer.revision if isinstance(answer, _RevisionAnswer) else None
    if revision is not None and not is_revision(revision):
        revision = None
    version = answer.version[:_MAX_CHARACTERS]
    return EngineVersion(version, revision, path if version else "")


async def version_of(talk: Interview, path: str = VERSION_PATH) -> EngineVersion:
    """Return the version of an engine, which is empty if the engine reports none. Raises WireError,
    aiohttp.ClientError or TimeoutError if the engine cannot be asked.
    """
    status, body = await talk.get(path)
    return version_in(body, path) if status == 200 else NO_VERSION
