"""Results as Markdown and JSON: each case with its figures and bars, and why one has none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tests.bench.gpu.cases import Attention, Case

MAX_ERROR = 1e-2  # of bf16 against float64, in norm
VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


@dataclass
class Result:
    """A case on this device. `others` are medians of peers in us, `notes` what has no figure."""

    case: Case
    us: float | None = None
    error: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def figures(self, ceilings: dict[str, float]) -> dict[str, float]:
        """All that follows from the medians. `ceilings`: bytes/s of stream and copy, FLOP/s."""
        found = {"error": self.error} if self.error is not None else {}
        if self.us is None:
            return found
        case, seconds = self.case, self.us * 1e-6
        done = case.flops if case.ceiling == "matmul" else case.bytes
        found |= {"us": self.us, "of_ceiling": done / seconds / ceilings[case.ceiling]}
        found |= {"tb_s": case.bytes / seconds / 1e12, "tflops": case.flops / seconds / 1e12}
        found |= {f"times_{name}": other / self.us for name, other in self.others.items()}
        if case.kernel == "prefill":
            of_others = {name: us * 1e-6 for name, us in self.others.items()}
            found |= {f"tflops_{name}": case.flops / s / 1e12 for name, s in of_others.items()}
        if "times_plain" in found:
            assert isinstance(case.shape, Attention)
            ideal = case.shape.ideal_gain(ceilings["stream"], ceilings["matmul"])
            found["of_ideal_gain"] = found["times_plain"] / ideal
        return found

    def verdicts(self, ceilings: dict[str, float]) -> dict[str, str]:
        """Each bar, and the error's, which all have: met, MISSED or not measured."""
        figures = self.figures(ceilings)
        told = {str(bar): VERDICTS[bar.met(figures)] for bar in self.case.bars}
        if self.error is not None:  # NaN is not below
            told[f"error < {MAX_ERROR:g}"] = VERDICTS[self.error < MAX_ERROR]
        return told


def markdown(results: list[Result], ceilings: dict[str, float], head: str) -> str:
    """The table of `docs/kernels.md`, below what it was measured on."""
    lines = [head, "", "| case | us | TB/s | TFLOP/s | of ceiling | error | peers, us | bars |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        figures = result.figures(ceilings)
        columns = [
            f"{figures[name]:{form}}" if name in figures else ""
            for name, form in (
                ("us", ",.1f"),
                ("tb_s", ".2f"),
                ("tflops", ",.0f"),
                ("of_ceiling", ".0%"),
                ("error", ".1e"),
            )
        ]
        peers = [f"{name} {us:,.1f}" for name, us in result.others.items()]
        bars = [f"{bar}: {told}" for bar, told in result.verdicts(ceilings).items()]
        columns += [", ".join(peers), "; ".join([*bars, *result.notes])]
        lines.append(f"| {result.case.name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def as_json(results: list[Result], ceilings: dict[str, float], head: str) -> str:
    """The same, for programs."""
    rows = [
        {
            "case": result.case.name,
            "kernel": result.case.kernel,
            "figures": result.figures(ceilings),
            "others_us": result.others,
            "bars": result.verdicts(ceilings),
            "notes": result.notes,
        }
        for result in results
    ]
    return json.dumps({"measured_on": head, "ceilings": ceilings, "rows": rows}, indent=2)
