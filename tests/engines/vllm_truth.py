"""A plug-in of vLLM that reports the blocks in its own table, for comparison with the router's
index.

It also lets two servers share two cores, and adds the folder $WARMROUTE_MODULES to Python's path.
It runs in vLLM's processes and imports only vLLM. The process with the block pool listens on the
Unix socket in $WARMROUTE_TRUTH and writes the table as JSON to each client: for each cached block
its tokens from the prompt's begin to its end, LoRA and salt.

Between two steps vLLM's processes poll their shared memory for a second without a pause, on the
assumption that each has a core: two idle servers would use both cores. Here they pause between two
polls.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from vllm import envs
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.core.block_pool import BlockPool

_BETWEEN_LOOKS_S = 0.0005

# The contents of each hash; vLLM's table itself has only hashes and blocks.
Contents = dict[Any, tuple[list[int], "str | None", "str | None"]]


def register() -> None:
    """Install the plug-in; vLLM calls this once in each of its processes."""
    path = os.environ.get("WARMROUTE_TRUTH")
    if not path or hasattr(BlockPool, "warmroute_truth"):
        return
    BlockPool.warmroute_truth = True
    sys.path[:0] = filter(None, [os.environ.get("WARMROUTE_MODULES")])
    # A forked engine core has the server's imports; on a CPU, vLLM itself would spawn it.
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    shm_broadcast.sched_yield = functools.partial(time.sleep, _BETWEEN_LOOKS_S)
    contents: Contents = {}
    _note(contents)
    begin = BlockPool.__init__

    @functools.wraps(begin)
    def beginning(pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        begin(pool, *args, **kwargs)
        threading.Thread(target=_serve, args=(pool, contents, path), daemon=True).start()

    BlockPool.__init__ = beginning


def _note(contents: Contents) -> None:
    cache = BlockPool.cache_full_blocks
    signature = inspect.signature(cache)

    @functools.wraps(cache)
    def caching(*args: Any, **kwargs: Any) -> Any:
        result = cache(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        request, size = given["request"], given["block_size"]
        lora = request.lora_request.name if request.lora_request else None
        for block in given["blocks"][: given["num_full_blocks"]]:
            if block.block_hash is not None and block.block_hash not in contents:
                at = given["blocks"].index(block)
                tokens = list(request.all_token_ids[: (at + 1) * size])
                contents[block.block_hash] = (tokens, lora, request.cache_salt)
        return result

    BlockPool.cache_full_blocks = caching


def _serve(pool: BlockPool, contents: Contents, path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            held = [contents[key] for key in list(pool.cached_block_hash_to_block._cache)]
            rows = [{"tokens": t, "lora": lora, "salt": salt} for t, lora, salt in held]
            connection.sendall(json.dumps(rows).encode())
