"""The Helm chart as one file, dist/warmroute-VERSION.tgz: `make chart`.

    python -m release.chart [--out dist]

Helm itself, of the package helm-python-sdk, looks at the chart as `helm lint --strict` does and
packages it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import helm_python

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs" / "deploy" / "helm" / "warmroute"
# Values that a chart cannot guess: in mode sidecar nobody has to name the engines.
LINTED = {"mode": "sidecar"}
# Helm keeps the chart and its values in a Secret of each release, which has at most a megabyte.
MAX_BYTES = 500_000


class ChartError(Exception):
    """A chart that is not fit for others' machines: says why."""


def package(out: Path, chart: Path = CHART) -> Path:
    """The packaged chart in `out`, in place of other versions.

    Raises ChartError where Helm finds a fault, or a file of the chart is a link.
    """
    links = [path for path in sorted(chart.rglob("*")) if path.is_symlink()]
    if links:
        raise ChartError(f"{links[0]} is a link: a copy of the folder alone would lack the file")
    report = helm_python.lint(chart, LINTED, strict=True)
    warned = [m["error"] for m in report["messages"] if m["severity"] > 1]
    if faults := [*report["errors"], *warned]:
        raise ChartError("\n".join(faults))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("warmroute-*.tgz"):
        old.unlink()
    made = Path(helm_python.package(chart, destination=out))
    if made.stat().st_size > MAX_BYTES:
        raise ChartError(f"{made.name} has {made.stat().st_size} bytes, more than {MAX_BYTES}")
    return made


def main() -> None:
    """The command. Ends with 1 and a reason where the chart is not fit."""
    parser = argparse.ArgumentParser(prog="python -m release.chart", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    try:
        made = package(parser.parse_args().out)
    except (ChartError, helm_python.HelmError) as error:
        sys.exit(f"chart: {error}")
    print(f"{made}: {made.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
