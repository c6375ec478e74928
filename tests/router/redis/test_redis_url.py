"""Tests of the URL of shared state: which URLs are accepted or refused, and that no secret is
shown.
"""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli.config import add_flags
from router.cli.main import main
from router.redis.url import MOST_CHARS, parse_redis_url, redacted
from router.settings.load import effective_yaml, load_config
from router.settings.schema import Config

SECRET = "hush-hush"


@pytest.mark.parametrize(
    ("text", "shown", "kind", "options"),
    [
        ("redis://h", "redis://h:6379", "server", {}),
        ("redis://[::1]:1/3", "redis://[::1]:1/3", "server", {}),
        ("redis://:p%40%2F@h:7", "redis://h:7", "server", {"password": "p@/"}),
        ("redis://u:a:b@h", "redis://h:6379", "server", {"username": "u", "password": "a:b"}),
        (
            "rediss://h/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            "rediss://h:6379",
            "server",
            {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False},
        ),
        (
            "redis+sentinel://u:p@a,b:2/main/4",
            "redis+sentinel://a:26379,b:2/main/4",
            "sentinel",
            {"username": "u", "password": "p"},
        ),
        ("rediss+cluster://a:1,b:2", "rediss+cluster://a:1,b:2", "cluster", {}),
    ],
)
def test_redis_urls_are_parsed_and_shown_without_secrets(text, shown, kind, options):
    url = parse_redis_url(text)
    assert (str(url), url.kind, dict(url.options)) == (shown, kind, options)
    assert parse_redis_url(shown) == parse_redis_url(str(parse_redis_url(shown)))


def test_sentinels_have_a_separate_password_and_the_same_tls():
    text = "rediss+sentinel://:p@a/m?sentinel_password=q&ssl_ca_certs=/ca"
    url = parse_redis_url(text)
    assert url.options == {"password": "p", "ssl_ca_certs": "/ca"}
    assert url.sentinel_options == {"password": "q", "ssl_ca_certs": "/ca"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must begin with redis://"),
        ("h:6379", "must begin with redis://"),
        ("http://h", "must begin with redis://"),
        ("unix:///run/redis.sock", "must begin with redis://"),
        ("redis://", "host 1 is none"),
        ("redis://h:0", "port of host 1 must be 1..65535"),
        ("redis://h:99999", "port of host 1 must be 1..65535"),
        ("redis://h:x", "host 1 is none"),
        ("redis://::1", "host 1 is none"),
        ("redis://a,b", "several only with"),
        ("redis://h/one", "the database"),
        ("redis://h/-1", "the database"),
        ("redis://h/²", "the database"),
        ("redis+sentinel://a", "lacks the service's name"),
        ("redis+sentinel://a/", "lacks the service's name"),
        ("redis+sentinel://a/m/x", "the database"),
        ("redis+sentinel://a,,b/m", "host 2 is none"),
        ("redis+cluster://a/1", "a cluster has only one"),
        ("redis+cluster://" + ",".join(["a"] * 65), "at most 64"),
        ("redis://u:a/b@h", "%2F"),
        ("redis://u:a@b@h", "%40"),
        ("redis://u:a#b@h", "%23"),
        ("redis://h?ssl_ca_certs=/x", "rediss"),
        ("rediss://h?ssl_ca_cert=/x", "option ssl_ca_cert is not known"),
        ("rediss://h?ssl_cert_reqs=maybe", "required, optional or none"),
        ("rediss://h?ssl_check_hostname=maybe", "true or false"),
        ("rediss://h?ssl_ca_certs=", "is empty"),
        ("redis://h?sentinel_password=x", "is not known"),
        ("redis://" + "h" * MOST_CHARS, "longer than"),
    ],
)
def test_invalid_redis_urls_are_refused(text, why):
    with pytest.raises(ValueError) as caught:
        parse_redis_url(text)
    assert why in str(caught.value)


@given(
    st.sampled_from(["redis", "rediss", "redis+sentinel", "redis+cluster", "http"]),
    st.text(max_size=4),
    st.text(max_size=6),
    st.text(max_size=6),
    st.sampled_from(["@h", "@h:6379/0", "@h/m", "@h:x", "?sentinel_password=x", "@"]),
)
def test_neither_str_nor_repr_nor_errors_contain_the_password(scheme, user, before, after, tail):
    password = before + SECRET + after
    try:
        url = parse_redis_url(f"{scheme}://{user}:{password}{tail}")
        told = str(url) + repr(url)
    except ValueError as error:
        told = str(error)
    assert SECRET not in told


def test_the_printed_configuration_has_no_password(capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    state = f"rediss+sentinel://u:{SECRET}@h/m?sentinel_password={SECRET}&ssl_password={SECRET}"
    flags = ["--state", state]
    loaded = load_config(parser.parse_args(flags), {})
    assert loaded.config.state == state
    shown = effective_yaml(loaded)
    assert "rediss+sentinel://***@h/m?sentinel_password=***&ssl_password=***" in shown
    assert SECRET not in shown + repr(loaded) + repr(Config(state=state))
    assert main(["config", "--print", *flags]) == 0
    with pytest.raises(SystemExit):
        main(["config", "--print", "--stat", state])
    assert main(["config", "--print", "--state", f"redis://{SECRET}/{SECRET}@h"]) == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert "flag --state: state: has a / in user or password" in said.err


def test_passwords_in_urls_within_a_text_are_redacted():
    assert redacted("at redis://u:p@h:1/2?x=1 and back") == "at redis://***@h:1/2?x=1 and back"
    assert redacted("redis://h:1, mail@x") == "redis://h:1, mail@x"
