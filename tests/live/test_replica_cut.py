"""Tests of a network that drops packets, and of Redis faults in any order: links come back, and
routers agree again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.replicas.membership import VERSION, ReplicaRefusedError
from tests.effort import EFFORT
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.pauses import running_s
from tests.router.replicas.replica_support import TERMS, Replica, all_present, fleet, until

pytestmark = needs_redis
DETECTED_S, BACK_S = 1.5, 2.0
SLACK_S = 4.0  # for a busy machine
PORT = 6_379  # in a network of its own


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """A network namespace with a Redis, whose packets can be dropped. Lifetime: test."""

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self.name = f"warmroute-{number}"
        self._link = f"wr{number}"
        third, fourth = divmod(number * 4, 256)
        self.ours, self.theirs = f"10.199.{third}.{fourth + 1}", f"10.199.{third}.{fourth + 2}"

    def make(self) -> None:
        """Create the network namespace. Raises CalledProcessError if this process is not allowed
        to.
        """
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.ours}/30", "dev", self._link)
        ip("link", "set", self._link, "up")
        ip("-n", self.name, "addr", "add", f"{self.theirs}/30", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")

    def cut(self) -> None:
        ip("-n", self.name, "route", "add", "blackhole", f"{self.ours}/32")

    def mend(self) -> None:
        ip("-n", self.name, "route", "del", "blackhole", f"{self.ours}/32")

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.name)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip (Debian: iproute2), for a network of its own")
    network = Network()
    try:
        network.make()
    except subprocess.CalledProcessError as error:
        network.end()
        pytest.skip(f"no network of its own can be made here: {error.stderr.decode().strip()}")
    command = ["ip", "netns", "exec", network.name, "redis-server", "--port", str(PORT)]
    command += ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log)
    yield network
    process.kill()
    process.wait()
    network.end()


async def test_dropped_packets_are_detected_and_the_link_recovers(far: Network, caplog):
    async with fleet(f"redis://{far.theirs}:{PORT}", "a", "b") as (a, b):
        far.cut()
        took_s = await running_s(until(lambda: not a.link.up and not b.link.up))
        assert took_s < DETECTED_S + SLACK_S
        await until(lambda: a.link.stale_s > 2.0)  # several attempts have failed
        assert a.has_peers(b)()
        far.mend()
        assert await running_s(all_present(a, b)) < BACK_S + SLACK_S
        a.send(b"after")
        await until(b.received(b"after"))
        far.cut()
        await until(lambda: not a.link.up and not b.link.up)
    assert caplog.text.count("does not answer") <= 4
    far.mend()


class Faults:
    """The faults that a test injects into a Redis and removes again. Lifetime: test."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def go_on(self) -> None:
        self.server.go_on()

    def flush(self) -> None:
        self._call("flushall")

    def readonly(self) -> None:
        self._call("replicaof", "127.0.0.1", 1)

    def hang_up(self) -> None:
        self._call("client", "kill", "type", "normal")

    def full(self) -> None:
        self._call("config", "set", "maxmemory", 1)

    def foreign(self) -> None:
        self._call("hset", "warmroute:{default}:replicas", "x", "y")
        self._call("xadd", "warmroute:{default}:arrivals", "*", "a@0123456789abcdef", "{}")

    def heal(self) -> None:
        self.server.go_on()
        self._call("replicaof", "no", "one")
        self._call("config", "set", "maxmemory", 0)

    def _call(self, *words: object) -> None:
        self.server.go_on()
        with contextlib.suppress(Exception), self.server.client() as client:
            client.execute_command(*words)


@pytest.mark.parametrize("seed", range(2 * EFFORT))
async def test_replicas_recover_from_any_order_of_faults(tmp_path: Path, seed: int, caplog):
    draw = random.Random(seed)
    names = "kill", "pause", "go_on", "flush", "readonly", "hang_up", "full", "foreign", "heal"
    with redis_server(tmp_path / "redis") as server:
        faults = Faults(server)
        async with fleet(server.url, "a", "b", "c") as replicas:
            for _ in range(12):
                for replica in replicas:
                    replica.send(b"x" * draw.randrange(1, 5_000))
                await asyncio.to_thread(getattr(faults, draw.choice(names)))
                await asyncio.sleep(draw.uniform(0.0, 0.4))
            await asyncio.to_thread(faults.heal)
            await all_present(*replicas)
            for replica in replicas:
                assert not replica.link._running.done()
                replica.send(replica.identity.encode())
            words = {replica.identity.encode() for replica in replicas}
            for replica in replicas:
                await until(replica.received(*(words - {replica.identity.encode()})))
                heard = [(peer, word) for peer, word in replica.notes.heard if word in words]
                assert len(heard) == len(set(heard)) == 2
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_replica_with_other_settings_is_refused_but_not_one_of_the_same_name(
    tmp_path: Path,
):
    with redis_server(tmp_path / "redis") as server:
        async with fleet(server.url, "a") as (a,):
            other = {**TERMS, "policy": "hybrid"}
            with pytest.raises(ReplicaRefusedError) as caught:
                await Replica(server.url, "b", other).link.agree()
            assert a.identity in str(caught.value)
            assert "policy is 'hybrid' here and 'warmset' there" in str(caught.value)
            with pytest.raises(ReplicaRefusedError, match=f"{VERSION} is '2' here and '1' there"):
                await Replica(server.url, "b", {**TERMS, VERSION: "2"}).link.agree()
            await Replica(server.url, "a", other).link.agree()  # the next one in its place
            await Replica(server.url, "b", other, fleet="blue").link.agree()
            await Replica(server.url, "b").link.agree()
            assert server.client().hlen("warmroute:{default}:replicas") == 1


async def test_messages_of_another_version_are_not_read(tmp_path: Path):
    with redis_server(tmp_path / "redis") as server:
        async with fleet(server.url, "a", "b") as (a, b):
            c = Replica(server.url, "c", {**TERMS, VERSION: "2"})
            c.link.start()  # like a router that started without Redis
            await until(lambda: len(a.link.membership.peers) == 2)
            c.send(b"strange")
            b.send(b"familiar")
            await until(a.received(b"familiar"))
            assert a.has_peers(b)()
            await until(lambda: c.identity in a.link.disagreements.now)
            await c.link.aclose()
            await until(lambda: not a.link.disagreements.now)
            assert a.notes.messages() == [b"familiar"]
