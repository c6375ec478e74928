"""The command `warmroute keys`, which makes an API key, hashes an existing key, or checks a file of
keys.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path

from router.keys.key_file import KeyFileError, hash_of, read_keys

_RANDOM_BYTES = 32
_NAME = re.compile(r"[^\s#=]{1,200}")

ABOUT = """\
Make API keys for `api_keys_file` and `admin_keys_file`.

  warmroute keys new build-bot --tenant ci >> keys     key to stderr, once; line for the file
  warmroute keys hash < one-key                        first word of the line for an existing key
  warmroute keys check keys                            check whether the router can use a file
"""


def add_keys_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute keys`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="new | hash | check")
    new = verbs.add_parser(
        "new", help="make a key; print the key on stderr and the line for the key file on stdout"
    )
    new.add_argument("name", metavar="NAME", help="name of the key in the key file, for people")
    new.add_argument("--tenant", metavar="TENANT", help="tenant of the key (default: NAME)")
    verbs.add_parser(
        "hash",
        help="read a key from stdin, and print the hash that may replace the key in a key file",
    )
    check = verbs.add_parser("check", help="check whether the router can use a key file")
    check.add_argument("file", metavar="FILE", help="key file to check")


def keys_command(args: argparse.Namespace) -> int:
    """Run `warmroute keys`. Return the exit status: 0, or 2 for bad input."""
    if args.verb == "new":
        return _new(args.name, args.tenant or args.name)
    return _hash() if args.verb == "hash" else _check(Path(args.file))


def _new(name: str, tenant: str) -> int:
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(tenant)):
        return _failed("a name has at most 200 characters, none of them a blank, `#` or `=`")
    key = "wr-" + secrets.token_urlsafe(_RANDOM_BYTES)
    print(f"sha256:{hash_of(key).hex()} {tenant} name={name}")
    print(f"the key, which is shown this once: {key}", file=sys.stderr)
    return 0


def _hash() -> int:
    key = sys.stdin.readline().strip()
    if not key:
        return _failed("no key on stdin; give it as one line")
    print(f"sha256:{hash_of(key).hex()}")
    return 0


def _check(path: Path) -> int:
    try:
        lines = read_keys(path)
    except KeyFileError as error:
        return _failed(str(error))
    plain = sum(line.plain for line in lines)
    keys = sum(line.hashed is not None for line in lines)
    print(f"ok: {keys} keys, {plain} of them in plain text, {len(lines) - keys} named tenants")
    return 0


def _failed(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2
