"""The report's pictures of a closed loop over time: waits for the first token, and hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from simulator.outcome import Outcome
from simulator.plots import INK, POLICY_STYLES, RC, RULE, Floats, as_svg, log_steps, new_figure
from simulator.scrape import Sample

WAIT_BINS = 20
WINDOW_SAMPLES = 6  # stretches a share of hits is taken over: one alone has too few prompts

Curve = tuple[Floats, Floats]  # model seconds, values


def waits_over_time(outcomes: Sequence[Outcome], speed: float, until_s: float) -> Curve:
    """Middles of `WAIT_BINS` bins of arrivals, and the mean TTFT of each, in model seconds.

    NaN where nothing that was answered came.
    """
    told = [(o.scheduled_s * speed, o.ttft_ms * speed / 1000) for o in outcomes if o.ttft_ms]
    at_s, wait_s = np.array(told, np.float64).reshape(-1, 2).T
    edges = np.linspace(0.0, until_s, WAIT_BINS + 1)
    counts = np.histogram(at_s, edges)[0]
    sums = np.histogram(at_s, edges, weights=wait_s)[0]
    means = np.divide(sums, counts, out=np.full(WAIT_BINS, np.nan), where=counts > 0)
    return (edges[:-1] + edges[1:]) / 2, means


def hits_over_time(samples: Sequence[Sample], speed: float) -> Curve:
    """(model seconds, share of prompt tokens found cached, 0..1, over the samples before)."""
    times = np.array([sample.at_s for sample in samples]) * speed
    totals = np.array(
        [
            [sum(w.hit_tokens for w in s.workers), sum(w.query_tokens for w in s.workers)]
            for s in samples
        ]
    ).reshape(-1, 2)
    first = np.maximum(np.arange(len(times)) - WINDOW_SAMPLES, 0)
    hits, asked = (totals - totals[first]).T
    shares = np.divide(hits, asked, out=np.full(len(times), np.nan), where=asked > 0)
    return times, shares


def waits_plot(curves: Mapping[str, Curve]) -> str:
    """Mean time to first token over time of arrival, a line a policy; logarithmic."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(4.6, 2.9)
        _lines(axes, curves)
        values = np.concatenate([value for _, value in curves.values()])
        values = values[np.isfinite(values) & (values > 0)]
        if len(values):
            axes.set_yscale("log")
            steps = log_steps(float(values.min()), float(values.max()))
            axes.set_ylim(steps[0], steps[-1])
            axes.set_yticks(steps)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="arrival, s", ylabel="mean time to first token, s")
        figure.subplots_adjust(top=1 - 0.35 / 2.9)
        figure.legend(frameon=False, loc="upper center", ncols=3, handlelength=3.0)
        return as_svg(figure)


def hits_plot(curves: Mapping[str, Curve]) -> str:
    """Share of prompt tokens found in caches over time, a line a policy."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(4.6, 2.9)
        _lines(axes, {name: (at_s, 100 * share) for name, (at_s, share) in curves.items()})
        axes.set(ylim=(0, 100), xlabel="time, s", ylabel="% of prompt tokens cached")
        figure.subplots_adjust(top=1 - 0.35 / 2.9)
        figure.legend(frameon=False, loc="upper center", ncols=3, handlelength=3.0)
        return as_svg(figure)


def _lines(axes: Axes, curves: Mapping[str, Curve]) -> None:
    for policy, (at_s, values) in curves.items():
        colour, dash = POLICY_STYLES.get(policy, (INK, "solid"))
        axes.plot(at_s, values, color=colour, linestyle=dash, label=policy, lw=1.9)
    axes.set_xlim(left=0.0)
    axes.grid(True, which="major", color=RULE, linewidth=0.5)
