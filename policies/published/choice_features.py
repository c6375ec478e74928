"""What the learned choice sees of each worker: 23 numbers of comparable size.

Source: NVIDIA Dynamo's `learned-choice`, feature set v2 (2026), in its order and units.
"""

from __future__ import annotations

from math import log

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.hashing import weights

T = 8192.0  # tokens of a full prefill batch: the unit of tokens
REQUESTS = 32.0  # the unit of unfinished requests
KV_BLOCKS = 65_536.0  # of a worker that does not say how many it has
HOME_TOKENS = 256  # of the prompt's head, which names its two hash homes
FEATURES = (
    "default_cost",  # Dynamo's default cost in blocks / blocks of the prompt
    "overlap_frac",  # hit tokens / prompt tokens
    "new_prefill",  # missing tokens / T
    "active_prefill",  # queued prefill tokens / T
    "kv_load",  # KV in use and to come / capacity
    "active_requests",  # unfinished requests / 32
    "session_affinity",  # 1 where the session was last sent
    "prompt_x_active_prefill",
    "log_ptok",  # ln((queued + missing) / 1024)
    "log_new_prefill",  # ln(missing / 1024)
    "log_batch",  # ln(1 + unfinished requests)
    "hash_home",  # 1 for the two highest hash weights of the prompt's head
    "kv_load_ratio",  # to the mean of the workers
    "active_prefill_ratio",
    "active_requests_ratio",
    "kv_load_below",  # share of the workers that have less
    "active_prefill_below",
    "active_requests_below",
    "kv_load_excess",  # above the mean, or 0
    "active_prefill_excess",
    "active_requests_excess",
    "new_prefill_x_requests",
    "prefill_attn",  # n (L - n / 2) / T^2: attention of the last n of L tokens
)
HOME, RELATIVE = slice(11, 12), slice(12, 21)  # of `FEATURES`
Asked = tuple[bool, bool]
_ONE_UNIT = np.array([[0.01], [512.0 / T], [1.0 / REQUESTS]])  # keeps ratios finite


def features(request: RequestView, fleet: FleetView, asked: Asked = (True, True)) -> Floats:
    """float64[23, rows], one row of this for each of `FEATURES`; finite whatever is unknown.

    KV in use is our own ledger's: running contexts, queued prefills, this prompt's missing tokens;
    untold capacity is 65,536 blocks. `asked`: for `HOME`, for `RELATIVE`? What is not is 0.
    """
    rows, prompt, block = len(fleet), request.prompt_tokens, request.block_size
    hit = np.minimum(fleet.hit_tokens, prompt)
    missing = np.maximum(prompt - hit, 1).astype(np.float64)
    queued, requests = fleet.queued_prefill_tokens, fleet.requests
    in_use = fleet.context_tokens + queued + (prompt - hit)
    known = np.where((told := fleet.kv_capacity_tokens) > 0, told, KV_BLOCKS * block)
    table = np.zeros((len(FEATURES), rows))
    table[0] = (queued + (prompt - hit) + in_use) / (max(-(-prompt // block), 1) * block)
    table[1] = hit / max(prompt, 1)
    table[2] = missing / T
    table[3] = queued / T
    table[4] = in_use / known
    table[5] = requests / REQUESTS
    table[6] = fleet.worker_id == request.home_id
    table[7] = table[3] * (prompt / T)
    # Plain Python: numpy's `log` differs in the last bit from one processor to another.
    table[8] = [*map(log, ((queued + missing) / 1024.0).tolist())]
    table[9] = [*map(log, (missing / 1024.0).tolist())]
    table[10] = [*map(log, (requests + 1.0).tolist())]
    table[HOME] = _hash_home(request, fleet) if asked[0] else 0.0
    if asked[1]:
        _relative(table)
    table[21] = table[2] * table[5]
    table[22] = table[2] * (prompt / T - table[2] / 2.0)
    return table


def _relative(table: Floats) -> None:
    """Ratios to the mean, ranks and excess of the three loads (rows 3 to 5), into rows 12 to 20."""
    loads = table[[4, 3, 5]]
    rows = max(loads.shape[1], 1)
    mean = np.add.reduce(loads, axis=1, keepdims=True) / rows
    table[12:15] = loads / (_ONE_UNIT + mean)
    ordered = np.sort(loads, axis=1)
    for row in range(3):
        table[15 + row] = ordered[row].searchsorted(loads[row]) / rows
    np.maximum(loads - mean, 0.0, out=table[18:21])


def _hash_home(request: RequestView, fleet: FleetView) -> Floats | float:
    if not request.prompt_blocks or len(fleet) <= 2:
        return float(request.prompt_blocks > 0)
    depth = min(max(HOME_TOKENS // request.block_size, 1), request.prompt_blocks)
    drawn = weights(int(request.chain[depth - 1]), fleet.worker_id, 0)
    home: Floats = (drawn >= np.sort(drawn)[-2]).astype(np.float64)
    return home
