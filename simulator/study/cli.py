"""`study` from the command line's options."""

from __future__ import annotations

import argparse

from rich.console import Console

from simulator.study.command import StudyCommand, run_study
from simulator.study.steps import Asked
from simulator.usage import UsageError, check_folder, check_policy


def study(options: argparse.Namespace, console: Console) -> bool:
    """Runs and compares."""
    policies = tuple(dict.fromkeys(options.policy or ()))
    for policy in policies:
        check_policy(policy)
    if options.alone and not policies:
        raise UsageError("--alone leaves only the rules of --policy, and there are none")
    check_folder("--out", options.out)
    asked = Asked(
        traces=options.traces,
        passes="full" if options.full else "first",
        only=tuple(dict.fromkeys(options.only or ())),
        policies=policies,
        alone=options.alone,
        quick=options.quick,
    )
    return run_study(StudyCommand(asked, options.out, options.base, options.jobs), console)
