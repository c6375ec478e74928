"""Tests of the syntax in which sources of workers are given."""

from __future__ import annotations

import pytest

from router.discovery.source import DnsSpec, SourceSpecError, parse_source


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("file:workers.yaml", "file:workers.yaml"),
        ("file:/a,b:c", "file:/a,b:c"),
        ("redis", "redis"),
        ("dns:pool:8000", "dns:pool:8000,every=5"),
        ("dns:pool.a.internal.:80,every=0.5", "dns:pool.a.internal.:80,every=0.5"),
        ("dns:p:1,scheme=https,weight=2.0", "dns:p:1,every=5,scheme=https,weight=2"),
        ("dns:p:1, kind=vllm ,events=none", "dns:p:1,every=5,kind=vllm,events=none"),
        ("kubernetes:llm/vllm", "kubernetes:llm/vllm"),
        ("kubernetes:llm/vllm:http,kind=vllm", "kubernetes:llm/vllm:http,kind=vllm"),
        ("inferencepool:llm/chat", "inferencepool:llm/chat"),
        ("inferencepool:llm/chat.v2,weight=2.0", "inferencepool:llm/chat.v2,weight=2"),
    ],
)
def test_a_source_is_parsed_and_written_in_canonical_form(text: str, canonical: str) -> None:
    assert str(parse_source(text)) == canonical
    assert str(parse_source(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no source of workers; allowed: file:PATH, dns:NAME:PORT"),
        ("file:", "is no source"),
        ("consul:x", "is no source"),
        ("redis://h:1", "is no source"),
        ("dns:pool", "not of the form dns:NAME:PORT"),
        ("dns::80", "not of the form"),
        ("dns:a b:80", "not of the form"),
        ("dns:pool:0", "the port is '0'; allowed: 1..65535"),
        ("dns:pool:99999999999", "the port is"),
        ("dns:pool:８", "the port is"),
        ("dns:pool:80,every=0", "every is '0'; allowed: 0.1..3600 seconds"),
        ("dns:pool:80,every=nan", "every is 'nan'"),
        ("dns:pool:80,every=1,every=2", "'every=2' is given twice"),
        ("dns:pool:80,https", "'https' is not key=value"),
        ("dns:pool:80,scheme=ftp", "scheme is 'ftp'; allowed: http, https"),
        ("dns:pool:80,wieght=2", "did you mean weight?"),
        ("dns:pool:80,weight=0", "weight is 0; allowed: 0.01..100"),
        ("dns:pool:80,rank=1", "rank=1 is of one worker; a source has several"),
        ("dns:pool:80,events=tcp://h:1", "is of one worker"),
        ("kubernetes:llm", "kubernetes:NAMESPACE/SERVICE[:PORTNAME]"),
        ("kubernetes:LLM/x", "not of the form"),
        ("kubernetes:a/b:", "not of the form"),
        ("inferencepool:chat", "not of the form inferencepool:NAMESPACE/NAME"),
        ("inferencepool:llm/Chat", "not of the form"),
        ("inferencepool:llm/chat:http", "not of the form"),
        ("inferencepool:llm/chat,rank=1", "is of one worker"),
        ("file:" + "x" * 4096, "longer than 4096"),
    ],
)
def test_an_invalid_source_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(SourceSpecError) as refused:
        parse_source(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("options", "host", "url", "name"),
    [
        ("", "10.0.0.1", "http://10.0.0.1:80", None),
        ("", "fd00::1", "http://[fd00::1]:80", None),
        (",scheme=https", "10.0.0.1", "https://10.0.0.1:80", "pool"),
        (",scheme=https,insecure=true", "10.0.0.1", "https://10.0.0.1:80", None),
    ],
)
def test_a_worker_template_gives_the_worker_at_an_address(
    options: str, host: str, url: str, name: str | None
) -> None:
    spec = parse_source(f"dns:pool:80{options},weight=3")
    assert isinstance(spec, DnsSpec)
    worker = spec.template.at(host, 80, "pool")
    assert (worker.url, worker.server_name, worker.weight) == (url, name, 3)
