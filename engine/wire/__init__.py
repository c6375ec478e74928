"""The engine's wire formats, for the engine that speaks them and the router that listens.

Owns: KV event batches and their ZMQ framing, the cache snapshot, metric names and the load in
them, chain seeds, tokenizers with chat templates. No sockets, no clocks.
Gives: the names below; `engine.wire.hf.HfTokenizer` is imported from its module, since it brings
tokenizers and jinja2.
Never imports: sockets, the scheduler, the server, torch.
Start reading at: `events.py`.
"""

from engine.wire.events import (
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    Live,
    Snapshot,
    WireError,
    decode_batch,
    decode_snapshot,
    encode_batch,
    encode_snapshot,
    live_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_end,
    replay_frames,
    replay_request,
)
from engine.wire.metrics import EngineLoad, parse_load, parse_loads
from engine.wire.tokens import PromptError
from kvkernels.seeds import chain_seed

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EngineLoad",
    "Event",
    "Live",
    "PromptError",
    "Snapshot",
    "WireError",
    "chain_seed",
    "decode_batch",
    "decode_snapshot",
    "encode_batch",
    "encode_snapshot",
    "live_frames",
    "parse_live",
    "parse_load",
    "parse_loads",
    "parse_replay",
    "parse_replay_request",
    "replay_end",
    "replay_frames",
    "replay_request",
]
