"""A command-line parser that suggests the flag, command or choice that was likely meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from policies.near import did_you_mean

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_WORD = re.compile(r"[^\s,']+")


class HintingParser(argparse.ArgumentParser):
    """Adds a hint `did you mean ...?` to argparse's error about an unknown word.
    Lifetime: process.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown arguments as errors at once, because only the parser of a command knows
        the command's flags.
        """
        found, left = super().parse_known_args(args, namespace)
        if left:
            flags = (word.partition("=")[0] for word in left if word.startswith("--"))
            hints = [did_you_mean(flag, self._option_string_actions) for flag in flags]
            if self._option_string_actions.get("--worker") and "://" in left[0]:
                hints = [f" (did you mean --worker {left[0]}?)"]
            self.error(f"unrecognized arguments: {' '.join(left)}{''.join(hints)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Exit with argparse's message and the choice that was likely meant."""
        super().error(with_hint(message))


def with_hint(message: str) -> str:
    """Return argparse's message on a wrong choice, with the choice that was likely meant."""
    choice = _CHOICE.search(message)
    if choice is None:
        return message
    return message + did_you_mean(choice[1], _WORD.findall(choice[2]))
