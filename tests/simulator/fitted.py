"""A program that fits measurements made by a formula and prints the step times that each fit
predicts, as JSON.

It prints one list for each set. The sets are those of `test_calibrate`: some have noise, and some
hardly tell the constants apart. Tests start it once for each way in which a processor computes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from engine.profiles import profile
from simulator.calibrate.fit import ComputedLoad, Observation, fit, prefill_loads
from tests.simulator.measurements import REPRESENTATIVE, observed, random_load, stalled

PLAIN = "llama-3.1-8b-h100"


def data_sets() -> Iterator[tuple[str, list[Observation]]]:
    """Yield each set of measurements with its name."""
    for name in REPRESENTATIVE:
        yield name, observed(profile(name).step_time, noise=0.0)
    for name in (PLAIN, "deepseek-r1-gb200-ep8"):
        yield f"{name}, 3 % of noise", observed(profile(name).step_time, noise=0.03)
    truth = profile(PLAIN).step_time
    yield "stalls", stalled(truth)
    exact = observed(truth, noise=0.0)
    yield "decode only", [row for row in exact if not row.loads[0].prefill_tokens]
    yield "prefill only", [row for row in exact if not row.loads[0].decode_seqs]
    draw = random.Random(3)
    prompts = (prefill_loads(draw.randrange(100, 40_000), 8192) for _ in range(40))
    yield "whole prompts", [Observation(x, sum(map(truth.seconds, x)) + 0.003, 1) for x in prompts]
    alike = [ComputedLoad(8, 0, 8, 8 * context) for context in range(100, 4000, 100)]
    yield "batches of one size", [Observation((x,), truth.seconds(x)) for x in alike]


def main() -> None:
    """Print the predictions for the measured steps, and for others, in which constants matter that
    no measurement shows.
    """
    draw = random.Random(4)
    others = [random_load(draw) for _ in range(200)]
    predicted = {}
    for name, rows in data_sets():
        step_time = fit(rows).step_time
        loads = [load for row in rows for load in row.loads]
        predicted[name] = [step_time.seconds(load) for load in (*loads, *others)]
    print(json.dumps(predicted))


if __name__ == "__main__":
    main()
