"""KV events over ZMQ: a PUB socket for live batches, a ROUTER socket for replay."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio

from engine.server.event_log import BUFFER_BATCHES, EventLog, NumberedBatch
from engine.wire import (
    WireError,
    live_frames,
    parse_replay_request,
    replay_end,
    replay_frames,
)

TOPIC = ""
SEND_HWM = 100_000  # batches queued for one slow subscriber; beyond it they vanish, as in vLLM
_REPLAY_TURN = 64  # batches sent before others get a turn of the event loop

log = logging.getLogger(__name__)


class KvPublisher:
    """The two sockets of one worker. Lifetime: worker; needs a running event loop.

    Ports of 0 let the system choose; `endpoint` and `replay_endpoint` say which. Raises
    zmq.ZMQError if a port is taken.
    """

    def __init__(self, event_log: EventLog, host: str, port: int, replay_port: int) -> None:
        self._log = event_log
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
        self._live.setsockopt(zmq.SNDHWM, SEND_HWM)
        # A whole buffer must fit, or the tail of a replay would be dropped without a word.
        self._replay.setsockopt(zmq.SNDHWM, 2 * (BUFFER_BATCHES + 1))
        try:
            self.endpoint = _bind(self._live, host, port)
            self.replay_endpoint = _bind(self._replay, host, replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, batch: NumberedBatch) -> None:
        """Send a live batch; a PUB socket never blocks."""
        self._live.send_multipart(live_frames(TOPIC, batch.seq, batch.payload), copy=True)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            try:
                identity, start_seq = parse_replay_request(frames)
            except WireError as error:
                log.warning("replay request ignored: %s", error)
                continue
            sent = 0
            for batch in self._log.since(start_seq):
                await self._replay.send_multipart(replay_frames(identity, TOPIC, *batch))
                sent += 1
                if sent % _REPLAY_TURN == 0:
                    await asyncio.sleep(0)
            await self._replay.send_multipart(replay_end(identity))
            log.info("replayed %d batches from seq %d", sent, start_seq)

    def close(self) -> None:
        """Close both sockets; what is not sent yet is dropped."""
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    def sources(self) -> dict[str, dict[str, object]]:
        """Body of /kv_event_sources, in the shape of vLLM 0.31."""
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": BUFFER_BATCHES,
                "hwm": SEND_HWM,
                "max_queue_size": SEND_HWM,
                "topic": TOPIC,
            }
        }


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    """Bind, and give the endpoint with the port that was chosen."""
    wildcard = host in ("0.0.0.0", "::", "*")
    name = "*" if wildcard else f"[{host}]" if ":" in host else host
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(f"tcp://{name}:{port or '*'}")
    chosen = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{name}:{chosen}"
