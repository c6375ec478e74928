"""Several processes behind one port: they decide as one, and outlive each other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.frozen import freeze
from tests.live.stack import MODEL, Stack, metric_sum, running, until

PROCESSES = 3
THREE = ["--processes", str(PROCESSES)]


@asynccontextmanager
async def three(log_dir: Path, *router: str, **engine: Any) -> AsyncIterator[Stack]:
    async with running(log_dir, router=[*THREE, *router], **engine) as stack:
        yield stack


def processes(stack: Stack) -> dict[str, list[int]]:
    """Process ids by role, as the system sees them."""
    me = stack.router.process.pid
    found: dict[str, list[int]] = {"leader": [], "satellite": []}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == me and b"router.processes" in words:
            seat = words[words.index(b"router.processes") + 1]
            found["leader" if seat == b"0" else "satellite"].append(int(entry.name))
    return found


async def alone(stack: Stack, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """One request on a connection of its own, so that the system may give it to any process."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(f"{stack.url}/v1/completions", json=body) as reply,
    ):
        return reply.status, dict(reply.headers), await reply.json()


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2} | fields


async def begun(stack: Stack, count: int, **fields: Any) -> list[aiohttp.ClientResponse]:
    """Streams under way, on a connection each."""
    replies = []
    for n in range(count):
        body = completion([n + 1] * 20, stream=True, **fields)
        reply = await stack.http.post(f"{stack.url}/v1/completions", json=body)
        assert reply.status == 200
        await reply.content.readline()
        replies.append(reply)
    return replies


async def outcomes(replies: list[aiohttp.ClientResponse]) -> Counter[str]:
    """How streams ended: with all that belongs to them, or cut off."""

    async def end(reply: aiohttp.ClientResponse) -> str:
        try:
            return "whole" if b"data: [DONE]" in await reply.read() else "short"
        except aiohttp.ClientError:
            return "cut"

    return Counter(await asyncio.gather(*map(end, replies)))


async def test_all_processes_serve_decide_as_one_and_leave_no_load(tmp_path: Path) -> None:
    async with three(tmp_path) as stack:
        # At the same time, so each on a connection of its own.
        answers = await asyncio.gather(
            *(stack.complete([n] * 100, max_tokens=3) for n in range(60))
        )
        assert [status for status, _ in answers] == [200] * 60
        await stack.assert_idle()
        assert await stack.metric("warmroute_decisions_total") == 60
        assert await stack.metric("warmroute_request_seconds_count") == 60
        # Each process has carried some: all of 60 at one of three by chance is impossible.
        log = stack.router.log.read_text()
        assert log.count("joined, process") == PROCESSES - 1
        async with stack.http.get(f"{stack.admin}/explain?last=100") as reply:
            shown = (await reply.json())["decisions"]
        owners = Counter(one["request"] >> 36 for one in shown)
        assert set(owners) == {0, 1, 2}, owners
        assert processes(stack).keys() == {"leader", "satellite"}


async def test_a_prefix_found_through_one_process_is_warm_through_every_other(
    tmp_path: Path,
) -> None:
    prefix = list(range(1000, 1000 + 640))
    async with three(tmp_path) as stack:
        _, headers, _ = await alone(stack, completion([*prefix, 1]))
        worker = headers["x-warmroute-worker"]

        async def resident() -> bool:
            return bool((await stack.row(int(worker)))["resident_blocks"] >= 40)

        await until(resident, "the worker's own events")
        for n in range(12):
            status, headers, answer = await alone(stack, completion([*prefix, 2, n]))
            assert (status, headers["x-warmroute-worker"]) == (200, worker)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prefix)
        await stack.assert_idle()


async def test_the_same_requests_in_turn_go_to_the_same_workers_as_with_one_process(
    tmp_path: Path,
) -> None:
    """By a policy of chance: what is drawn follows from the seed and the order of arrival."""
    chosen = []
    for name, flags in ("one", []), ("three", THREE):
        folder = tmp_path / name
        folder.mkdir()
        router = [*flags, "--policy", "random", "--seed", "7"]
        async with running(folder, workers=4, router=router) as stack:
            replies = [await alone(stack, completion([n] * 40)) for n in range(16)]
            names = [headers["x-warmroute-worker"] for _, headers, _ in replies]
            # Rows of the fleet are in the order of joining, which is the workers' own.
            chosen.append([list(dict.fromkeys(names)).index(name) for name in names])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1


async def test_a_leader_that_stands_still_is_not_waited_for_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    async with three(tmp_path) as stack:
        leader = processes(stack)["leader"][0]
        freeze(leader)
        try:
            asked = [asyncio.ensure_future(alone(stack, completion([n] * 40))) for n in range(24)]
            first, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            status, headers, answer = first.pop().result()
            assert (status, headers["Retry-After"]) == (503, "1")
            assert answer["error"]["code"] == "router_restarting"
        finally:
            os.kill(leader, signal.SIGCONT)
        statuses = Counter(status for status, _, _ in await asyncio.gather(*asked))
        assert set(statuses) == {200, 503}, "the leader's own were answered in the end"
        await stack.assert_idle()

        async def counted() -> bool:
            refused = await stack.metric("warmroute_unanswered_requests_total")
            return refused == statuses[503]

        await until(counted, "satellites to tell of those they refused")
        assert (await alone(stack, completion([5])))[0] == 200


async def test_a_satellite_killed_under_streams_is_replaced_and_leaves_no_load(
    tmp_path: Path,
) -> None:
    async with three(tmp_path, speed=1) as stack:
        replies = await begun(stack, 24, max_tokens=100)
        before = processes(stack)
        victim = before["satellite"][0]
        os.kill(victim, signal.SIGKILL)
        ends = await outcomes(replies)
        assert ends["whole"] > 0, "streams of other processes go on"
        assert ends["cut"] > 0, "the killed one carried some"

        async def replaced() -> bool:
            now = set(processes(stack)["satellite"])
            serving = await stack.metric('warmroute_processes{role="satellite"}')
            return victim not in now and len(now) == serving == PROCESSES - 1

        await until(replaced, "another satellite")
        await stack.assert_idle()
        assert await stack.metric("warmroute_process_restarts_total") == 1
        assert processes(stack)["leader"] == before["leader"]
        assert (await alone(stack, completion([5])))[0] == 200


async def test_a_leader_killed_under_streams_is_replaced_and_its_satellites_finish(
    tmp_path: Path,
) -> None:
    async with three(tmp_path, speed=1) as stack:
        replies = await begun(stack, 24, max_tokens=100)
        before = processes(stack)
        os.kill(before["leader"][0], signal.SIGKILL)
        ends = await outcomes(replies)
        assert ends["whole"] > 0, "satellites finish what they carry"

        async def renewed() -> bool:
            now = processes(stack)
            old = {*before["leader"], *before["satellite"]}
            return len(now["satellite"]) == PROCESSES - 1 and not old & {
                *now["leader"],
                *now["satellite"],
            }

        await until(renewed, "a new leader with new satellites")
        for worker_id in range(2):
            await until_known(stack, worker_id)
        assert (await alone(stack, completion([5])))[0] == 200
        await stack.assert_idle()


async def until_known(stack: Stack, worker_id: int) -> None:
    async def known() -> bool:
        try:
            return any(r["id"] == worker_id and r["state"] == "ready" for r in await stack.rows())
        except aiohttp.ClientError:
            return False

    await until(known, f"worker {worker_id} at the new leader")


async def test_sigterm_lets_streams_of_all_processes_finish(tmp_path: Path) -> None:
    async with three(tmp_path, speed=1) as stack:
        replies = await begun(stack, 12, max_tokens=60)
        stack.router.process.send_signal(signal.SIGTERM)
        assert await outcomes(replies) == Counter(whole=12)
        assert await stack.router.process.wait() == 0
        assert not any(processes(stack).values())


async def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    async with three(tmp_path) as stack:
        children = [pid for pids in processes(stack).values() for pid in pids]
        assert len(children) == PROCESSES
        stack.router.process.kill()
        await stack.router.process.wait()

        async def gone() -> bool:
            return not any(runs(pid) for pid in children)

        await until(gone, "the children to end")


async def test_a_reload_reaches_every_process(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("explain: true\n")
    async with three(tmp_path, "--config", str(config)) as stack:
        config.write_text("explain: false\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def told() -> bool:
            return stack.router.log.read_text().count("INFO router.processes.remote_desk: rel") == 2

        await until(told, "both satellites to be told")
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            for n in range(12):
                asked = {"x-warmroute-explain": "1"}
                url = f"{stack.url}/v1/completions"
                async with http.post(url, json=completion([n]), headers=asked) as reply:
                    assert "x-warmroute-explain" not in reply.headers


async def test_garbage_on_the_leaders_socket_harms_nobody(tmp_path: Path) -> None:
    async with three(tmp_path) as stack:
        path = _socket(processes(stack)["leader"][0])
        assert os.stat(Path(path).parent).st_mode & 0o077 == 0, "nobody else may enter"
        for data in (b"\xff" * 100, b"\x04\x00\x00\x00\x93\x02\x01\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(data)
            assert await reader.read() == b"", "it hangs up"
            writer.close()
        assert (await alone(stack, completion([5])))[0] == 200
        assert await metric_sum(stack.http, stack.admin, "warmroute_processes") == PROCESSES


def _socket(pid: int) -> str:
    """Where the leader listens for satellites."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[words.index(b"router.processes") + 2].decode()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
