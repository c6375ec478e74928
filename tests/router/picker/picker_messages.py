"""Makes and reads messages of Envoy's external processing for tests."""

from __future__ import annotations

from typing import Any

from router.picker.messages import Answer, Request


def message(arm: str, **fields: Any) -> bytes:
    """Return a message of a proxy to the picker, whose field `arm` is filled."""
    made = Request()
    part = getattr(made, arm)
    part.SetInParent()
    if arm.endswith("_headers"):
        pairs = fields.pop("pairs", ())
        if arm == "response_headers":
            pairs = ((":status", fields.pop("status", "200")), *pairs)
        for name, value in pairs:
            part.headers.headers.add(key=name, raw_value=value.encode())
    for name in ("end_of_stream", "body"):
        if name in fields:
            setattr(part, name, fields.pop(name))
    if "modes" in fields:
        request_mode, response_mode = fields.pop("modes")
        made.protocol_config.SetInParent()
        made.protocol_config.request_body_mode = request_mode
        made.protocol_config.response_body_mode = response_mode
    for space, key, texts in fields.pop("metadata", ()):
        value = made.metadata_context.filter_metadata[space].fields[key]
        if isinstance(texts, str):
            value.string_value = texts
        else:
            value.list_value.SetInParent()
            for text in texts:
                value.list_value.values.add(string_value=text)
    for name, text in fields.pop("attributes", {}).items():
        attributes = made.attributes["envoy.filters.http.ext_proc"].fields
        attributes[name].string_value = text
    if fields.pop("observability_mode", False):
        made.observability_mode = True
    assert not fields
    data: bytes = made.SerializeToString()
    return data


def read(answers: list[bytes]) -> list[Any]:
    """Return the picker's answers as parsed messages; fails if one has no response."""
    found = [Answer.FromString(answer) for answer in answers]
    assert all(one.WhichOneof("response") for one in found)
    return found
