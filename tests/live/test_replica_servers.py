"""Tests of the link between replicas over TLS, sentinels, a cluster, and as a Redis user with few
rights.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.live.ports import lasting_port
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.router.replicas.replica_support import Replica, all_present, fleet, until

pytestmark = needs_redis
WIRE = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")


async def talks(*replicas: Replica) -> None:
    """Let each replica send a message and wait until all others have it."""
    words = [replica.identity.encode() for replica in replicas]
    for replica, word in zip(replicas, words, strict=True):
        replica.send(word)
    for replica, own in zip(replicas, words, strict=True):
        await until(replica.received(*(word for word in words if word != own)))


async def test_a_redis_user_with_the_documented_rights_suffices(tmp_path):
    rights = re.findall(r"`((?:~warmroute|\+)[^`]*)`", WIRE)
    assert len(rights) == 3
    words = " ".join(rights).replace("{FLEET}", "{default}").split()
    with redis_server(tmp_path / "redis") as server:
        client = server.client()
        client.execute_command("ACL", "SETUSER", "router", "on", ">secret", *words)
        client.execute_command("ACL", "SETUSER", "default", "off")
        url = server.url.replace("://", "://router:secret@") + "/3"
        async with fleet(url, "a", "b") as (a, b):
            told: list[int | None] = []
            a.link.leases.acquire("it", told.append)
            await until(lambda: bool(told))
            await talks(a, b)
            assert a.link.leases.refused == 0


@pytest.fixture
def certificate(tmp_path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=redis",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


async def test_replicas_connect_over_tls(tmp_path, certificate, caplog):
    cert, key = certificate
    port = lasting_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"]
    with redis_server(tmp_path / "redis", *options):
        url = f"rediss://127.0.0.1:{port}"
        async with fleet(f"{url}?ssl_ca_certs={cert}", "a", "b") as (a, b):
            await talks(a, b)
        stranger = Replica(url, "c")
        await stranger.link.agree()
        assert "shows a certificate that is not believed" in caplog.text


@pytest.fixture
def sentinels(tmp_path) -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """Yield a master and its replica, with a sentinel that may decide alone."""
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(tmp_path / "master"))
        follower = stack.enter_context(
            redis_server(tmp_path / "follower", "--replicaof", "127.0.0.1", str(master.port))
        )
        file = tmp_path / "sentinel.conf"
        file.write_text(
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        sentinel = RedisServer(tmp_path / "sentinel", str(file), "--sentinel")
        sentinel.start()
        stack.callback(sentinel.kill)
        yield master, follower, sentinel


async def test_replicas_follow_sentinels_to_the_next_master(sentinels, caplog):
    master, follower, sentinel = sentinels
    await until(lambda: "slave0" in master.client().info("replication"))
    await until(lambda: len(sentinel.client().sentinel_slaves("main")) == 1)
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main"
    async with fleet(url, "a", "b") as (a, b):
        await talks(a, b)
        for replica in (a, b):
            replica.notes.heard.clear()
        master.kill()
        await until(lambda: not a.link.up and not b.link.up)
        await all_present(a, b)
        await talks(a, b)
        assert follower.client().hlen("warmroute:{default}:replicas") == 2
    unknown = Replica(url.replace("/main", "/other"), "c")
    await unknown.link.agree()
    assert "no sentinel names a master of this service" in caplog.text


@pytest.fixture
def cluster(tmp_path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Yield two cluster nodes, each with half of the slots."""
    with ExitStack() as stack:
        nodes = []
        for number in range(2):
            bus = str(lasting_port())
            options = ["--cluster-enabled", "yes", "--cluster-port", bus]
            nodes.append(stack.enter_context(redis_server(tmp_path / str(number), *options)))
            nodes[-1].bus = bus
        first, second = nodes
        first.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8_191)
        second.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 8_192, 16_383)
        meet = ["CLUSTER", "MEET", "127.0.0.1", second.port, second.bus]
        first.client().execute_command(*meet)
        yield first, second


async def until_all_slots_served(cluster) -> None:
    """Wait until both nodes know that all slots are served."""
    for client in (node.client() for node in cluster):
        await until(lambda c=client: c.cluster("info")["cluster_state"] == "ok")


async def test_a_cluster_has_each_fleet_on_one_node(cluster):
    await until_all_slots_served(cluster)
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    for name in ("default", "blue", "green", "x"):
        async with fleet(url, "a", "b", fleet=name) as (a, b):
            await talks(a, b)
            key = f"warmroute:{{{name}}}:replicas"
            slot = cluster[0].client().execute_command("CLUSTER", "KEYSLOT", key)
            assert cluster[slot > 8_191].client().hlen(key) == 2


async def test_the_error_for_a_plain_url_to_a_cluster_names_the_right_scheme(cluster, caplog):
    await until_all_slots_served(cluster)
    key = "warmroute:{default}:replicas"
    slot = cluster[0].client().execute_command("CLUSTER", "KEYSLOT", key)
    other = Replica(cluster[slot <= 8_191].url, "a")
    await other.link.agree()
    assert "use redis+cluster://" in caplog.text


async def test_an_unreachable_cluster_is_reported(caplog):
    gone = Replica(f"redis+cluster://127.0.0.1:{lasting_port()}", "a")
    await gone.link.agree()
    assert "this router continues with its last known state" in caplog.text
