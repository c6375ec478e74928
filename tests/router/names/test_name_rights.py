"""Tests of API keys and names: a key's list of models may contain requested names or
served names.
"""

from __future__ import annotations

import pytest

from router.http.errors import ClientError
from router.keys.key_file import KeyTerms
from router.request.quotas import check_model


@pytest.mark.parametrize("allowed", ["chat", "llama"])
def test_a_key_may_list_the_requested_or_the_served_name(allowed: str) -> None:
    check_model(KeyTerms(models=(allowed,)), "chat", "llama")


def test_a_key_for_neither_is_refused_with_the_requested_name() -> None:
    with pytest.raises(ClientError, match="may not use the model 'chat'"):
        check_model(KeyTerms(models=("other",)), "chat", "llama")
    with pytest.raises(ClientError, match="may not use the model 'chat'"):
        check_model(KeyTerms(models=("llama",)), "chat")
