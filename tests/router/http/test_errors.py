"""Tests of the bodies of error replies, and of which worker is blamed for an error."""

from __future__ import annotations

import json

import pytest

from router.http.errors import ClientError, WorkerError, error_body, error_type


def test_a_client_error_has_openais_shape() -> None:
    error = ClientError(400, "expected a text", "messages[0].role", "invalid_type")
    assert json.loads(error.body()) == {
        "error": {
            "message": "expected a text",
            "type": "invalid_request_error",
            "param": "messages[0].role",
            "code": "invalid_type",
        }
    }


def test_absent_error_fields_are_null() -> None:
    assert json.loads(error_body("no", "server_error"))["error"] == {
        "message": "no",
        "type": "server_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_the_error_type_follows_from_the_status(status: int, name: str) -> None:
    assert error_type(status) == name


@pytest.mark.parametrize("status", [399, 500])
def test_a_client_error_must_have_a_4xx_status(status: int) -> None:
    with pytest.raises(ValueError, match="400"):
        ClientError(status, "no")


def test_the_text_of_an_error_is_its_message() -> None:
    assert str(WorkerError("connect", "refused")) == "refused"
    assert str(ClientError(400, "bad")) == "bad"
