"""Converts another router's command line to a configuration file of this router: `warmroute config
--from`. Values of flags that become no key are never printed, and neither are API keys and
passwords: a command line may hold them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from policies.load import load
from policies.near import did_you_mean
from router.cli.peer_flags import (
    AFFINITY,
    NONE,
    ONE,
    PEERS,
    RULES,
    PeerFlag,
    PeerRouter,
    flags_of,
)
from router.config.keys import ConfigKey, keys_of, text_of
from router.settings.rules import check_value
from router.settings.schema import Config

MAX_CHARACTERS = 65_536
_ENDS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1"})  # of a shell's command
_STARTERS = frozenset({"serve", "server", "sglang_router.launch_server", "smg.serve"})
_PLAIN = re.compile(r"[A-Za-z/][\w./:?&=@,-]*[\w/]")
_WORDS_OF_YAML = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off"})
_LEVELS: Mapping[str, str] = MappingProxyType(
    {"warn": "warning", "trace": "debug", "critical": "error"}
)
_OTLP_GRPC, _OTLP_HTTP = 4317, 4318
_KEYS_FILES: Mapping[str, str] = MappingProxyType(
    {"api_keys_file": "keys.txt", "admin_keys_file": "admin-keys.txt"}
)
_RANK = re.compile(r"(.*)@(\d{1,4})")


class PeerCommandError(ValueError):
    """Raised for a command line that cannot be converted; the text says why, and what the user
    should give instead.
    """


@dataclass(frozen=True, slots=True)
class Converted:
    """The configuration file made from a command line, and the flags that have no key in it."""

    peer: PeerRouter
    text: str
    taken: int  # flags that are lines of the file
    notes: tuple[tuple[str, str], ...]  # a flag that is not, and why

    def summary(self) -> str:
        """Return a text for the terminal that says how many flags were converted, and lists each
        flag that was not.
        """
        lines = [f"{self.peer.name} {self.peer.release}: flags taken over: {self.taken}"]
        return "\n".join([*lines, *(f"  {line}" for line in _lines_by_reason(self.notes))]) + "\n"


@dataclass(slots=True)
class _Given:
    """The flags of a command line with their values; each flag has one list of values for each time
    that it is given.
    """

    peer: PeerRouter
    rows: Mapping[str, PeerFlag]
    values: dict[str, list[list[str]]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # the flag's first name -> the one given
    unknown: list[str] = field(default_factory=list)
    strays: int = 0

    def all(self, name: str) -> list[str]:
        return [value for values in self.values.get(name, ()) for value in values]

    def last(self, name: str) -> str | None:
        found = self.all(name)
        return found[-1] if found else None

    def listed(self, name: str) -> list[str]:
        """Return the parts of the value of the flag `name` that are separated by commas."""
        return [part.strip() for part in (self.last(name) or "").split(",") if part.strip()]


@dataclass(slots=True)
class _Draft:
    """The configuration file that is being written. Lifetime: one conversion."""

    keys: Mapping[str, ConfigKey]
    lines: dict[str, str] = field(default_factory=dict)  # key path -> its line, or lines of a list
    idle: set[str] = field(default_factory=set)  # paths whose line is only a comment
    notes: list[tuple[str, str]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # defaults of the peer that are not ours
    taken: set[str] = field(default_factory=set)

    def put(self, path: str, value: Any, flag: str, remark: str = "") -> None:
        """Add a line for the key `path`, or a comment if the value cannot be used on this machine.
        Raises PeerCommandError for a value that the other router would refuse, too.
        """
        text, behind = str(value), f"{flag}: {remark}" if remark else flag
        self._refuse_nonsense(path, text, flag)
        if _has_password(text):
            self.notes.append((flag, f"its value has a password in it; write {path} yourself"))
            return
        name = path.rpartition(".")[2]
        try:
            read = check_value(self.keys[path], value)
            self.idle.discard(path)
        except ValueError:
            read = value
            self.idle.add(path)
            behind += f"; commented out: it must be {self._allowed(path)}"
            self.notes.append((flag, f"{path} is commented out: it must be {self._allowed(path)}"))
        if isinstance(value, str) and isinstance(read, list | tuple):
            read = value
        self.lines[path] = f"{name}: {_shown(read)}  # {behind}"
        self.taken.add(flag)

    def items(self, path: str, items: Iterable[tuple[Any, str]]) -> None:
        """Add the lines of a list. Items that cannot be used and repeated items are left out."""
        lines: list[str] = []
        seen: set[Any] = set()
        left_out: set[str] = set()
        for value, flag in items:
            same = (value["url"], value.get("rank")) if isinstance(value, dict) else value
            try:
                if same in seen or _has_password(str(same)):
                    raise ValueError
                check_value(self.keys[path], [value])
            except ValueError:
                left_out.add(flag)
                continue
            seen.add(same)
            lines += _item(value, flag)
            self.taken.add(flag)
        self.notes += [(flag, _BAD_ITEM[path]) for flag in sorted(left_out)]
        if lines:
            self.lines[path] = "\n".join([f"{path.rpartition('.')[2]}:", *lines])

    def default(self, path: str, value: Any, peer: PeerRouter, remark: str = "") -> None:
        """Add a line with the other router's default value for a flag that is not given."""
        behind = f"the default of {peer.name}"
        self.put(path, value, behind, remark)
        self.taken.discard(behind)

    def _refuse_nonsense(self, path: str, text: str, flag: str) -> None:
        """Raise PeerCommandError if a value is not a number where a number is needed, or not one of
        the allowed words.
        """
        kind = get_args(self.keys[path].kind)[0]
        number = _number(text)
        no_port = path.endswith("port") and not 0 <= (number or 0) <= 65_535
        if kind in (int, float) and (number is None or no_port):
            raise PeerCommandError(f"{flag} must be a number, {self._allowed(path)}")
        if get_origin(kind) is Literal and text not in get_args(kind):
            near = did_you_mean(text, get_args(kind))
            raise PeerCommandError(f"{flag} must be one of {self._allowed(path)}{near}")

    def _allowed(self, path: str) -> str:
        if path == "tokenizer":
            return "an existing folder with a tokenizer.json or tekken.json"
        is_file = "tls." in path or path.endswith("_keys_file")
        return "an existing file" if is_file else self.keys[path].allowed

    def text(self, head: str) -> str:
        """Return the text of the file: the keys in the order of the documentation, the sections,
        and the flags that got no line.
        """
        out = [head]
        section = ""
        for path in sorted(self.lines, key=list(self.keys).index):
            of, dot, _ = path.rpartition(".")
            if of != section:
                section = of
                live = any(p.rpartition(".")[0] == of and p not in self.idle for p in self.lines)
                out.append(f"{of}:" if live else f"# {of}:")
            before = "# " if path in self.idle else ""
            indent = "  " if dot else ""
            out += [f"{before}{indent}{line}" for line in self.lines[path].split("\n")]
        if self.notes:
            out += ["", "# Without a line above:"]
            out += [f"# {line}" for line in _lines_by_reason(self.notes)]
        if self.differing:
            out += ["", "# Defaults that differ; those of warmroute apply:"]
            out += [f"# {line}" for line in self.differing]
        return "\n".join(out) + "\n"


def _lines_by_reason(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Return for each reason one line with all flags that have this reason."""
    flags: dict[str, list[str]] = {}
    for flag, why in notes:
        flags.setdefault(why, []).append(flag)
    return [f"{', '.join(names)}: {why}" for why, names in flags.items()]


_BAD_ITEM: Mapping[str, str] = MappingProxyType(
    {
        "workers": "a worker is left out: one is http(s)://HOST[:PORT][/PATH], without user and "
        "password, and given once",
        "discovery": "the namespace is left out: it has small letters, digits and dashes",
        "names.aliases": "an alias is left out: one is NAME=MODEL, and given once",
        "model_limits": "it is left out: it must be at most 1125899906842624",
    }
)


def convert(command: str) -> Converted:
    """Return the configuration file for a command line of another router. Raises PeerCommandError
    if the command line cannot be converted.
    """
    given = _read(command)
    draft = _Draft(keys_of(Config))
    peer = given.peer
    for name, default in (("host", peer.host), ("port", peer.port)):
        if f"--{name}" not in given.values:
            draft.default(name, default, peer)
    done: set[str] = set()
    for name, row in given.rows.items():
        if name not in given.values:
            continue
        shown = given.names[name]
        if not row.how:
            draft.notes.append((shown, row.why))
        elif row.how in _SIMPLE:
            value = _SIMPLE[row.how](row, given.last(name) or "")
            if value is None:
                raise PeerCommandError(f"{shown} must be a number")
            draft.put(row.key, value, shown, row.why)
        elif _STEPS[row.how].__name__ not in done:
            done.add(_STEPS[row.how].__name__)
            _STEPS[row.how](draft, given)
    if _policy.__name__ not in done:
        _policy(draft, given)
    _defaults(draft, given)
    draft.notes += [(name, _not_known(name, given)) for name in given.unknown]
    if given.strays:
        draft.notes.append((f"{given.strays} words", "they belong to no flag"))
    head = f"# From a command line of {peer.name} {peer.release}, by `warmroute config --from`."
    return Converted(peer, draft.text(head), len(draft.taken), tuple(draft.notes))


def _read(command: str) -> _Given:
    if not command.strip():
        raise PeerCommandError("the command line is empty")
    if len(command) > MAX_CHARACTERS:
        raise PeerCommandError(f"the command line has more than {MAX_CHARACTERS} characters")
    try:
        words = shlex.split(command.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise PeerCommandError(
            f"the command line ends within a quote or after \\ ({error})"
        ) from error
    end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
    peers, rest = _program(words[:end])
    peer = max(peers, key=lambda one: _known(one, rest))  # vllm-router is the name of two
    rows = flags_of(peer)
    given = _Given(peer, rows)
    at = 0
    while at < len(rest):
        name, equals, inline = rest[at].partition("=")
        at += 1
        if not name.startswith("--"):
            given.strays += 1
            continue
        end = at
        while end < len(rest) and not rest[end].startswith("--"):
            end += 1
        row = rows.get(name)
        if row is None:
            given.unknown.append(_printable(name))
            at = end  # what follows it may be its value
            continue
        values = [inline] if equals else rest[at : end if row.takes > ONE else min(at + 1, end)]
        if row.takes == NONE:
            values = []
        elif row.takes == ONE and not values:
            raise PeerCommandError(f"{name} has no value")
        at += 0 if equals else len(values)
        first = row.alias_of or name
        given.values.setdefault(first, []).append(values)
        given.names[first] = name
    return given


def _program(words: list[str]) -> tuple[list[PeerRouter], list[str]]:
    """Return the routers that the program's name may mean, and the remaining words of the command
    line.
    """
    for at, word in enumerate(words):
        module = words[at - 1] == "-m" if at else False
        name = word if module else word.rpartition("/")[2].partition(":")[0]
        rest = words[at + 1 :]
        found = [one for one in PEERS if name in (one.modules if module else one.programs)]
        if name == "vllm-router" and not module:
            found = [one for one in PEERS if one.letter in "vp"]
        if name in _STARTERS or (found and rest[:1] and rest[0] in _STARTERS):
            raise PeerCommandError(
                "this command starts engines, too; start them by themselves, and give the "
                "command that starts the router alone"
            )
        if found:
            return found, rest[1:] if rest[:1] == ["launch"] else rest
    known = ", ".join(name for one in PEERS for name in one.programs)
    modules = ", ".join(one.modules[-1] for one in PEERS)
    raise PeerCommandError(
        f"no known router in the command line; known: {known}, and python -m {modules}"
    )


def _known(peer: PeerRouter, words: list[str]) -> int:
    rows = flags_of(peer)
    return sum(word.partition("=")[0] in rows for word in words)


def _not_known(name: str, given: _Given) -> str:
    hint = did_you_mean(name, given.rows)
    return f"{given.peer.name} {given.peer.release} has no such flag{hint}"


# One flag, one line.


def _level(row: PeerFlag, text: str) -> str:
    return _LEVELS.get(text.lower(), text.lower())


def _seconds(row: PeerFlag, text: str) -> float | None:
    number = _number(text)
    return None if number is None else number / 1_000


def _one_more(row: PeerFlag, text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number) + 1


def _folder(row: PeerFlag, text: str) -> str:
    name = text.rpartition("/")
    return name[0] if name[2] in ("tokenizer.json", "tekken.json") and name[0] else text


_SIMPLE: Mapping[str, Callable[[PeerFlag, str], Any]] = MappingProxyType(
    {
        "text": lambda row, text: text,
        "fixed": lambda row, text: row.value,
        "first": lambda row, text: text,
        "header": lambda row, text: text.lower(),
        "level": _level,
        "ms": _seconds,
        "one_more": _one_more,
        "folder": _folder,
    }
)


# Several flags together.


def _workers(draft: _Draft, given: _Given) -> None:
    found: list[tuple[dict[str, Any], str]] = []
    for url in given.all("--worker-urls"):
        found.append((_worker(url), given.names["--worker-urls"]))
    for one in given.values.get("--prefill", ()):
        worker = {**_worker(one[0] if one else ""), "role": "prefill"}
        if one[1:] and one[1].isdecimal():
            worker["bootstrap_port"] = int(one[1])
        found.append((worker, "--prefill"))
    for url in given.all("--decode"):
        found.append(({**_worker(url), "role": "decode"}, "--decode"))
    _add_facts(draft, given, [worker for worker, _ in found])
    draft.items("workers", found)
    if len(found) > Config().limits.workers:
        draft.put("limits.workers", len(found), "--worker-urls", "as many as there are")


def _worker(text: str) -> dict[str, Any]:
    """Return the YAML mapping of a worker that is given as `URL@RANK`, with or without scheme and
    `/v1`.
    """
    worker: dict[str, Any] = {"url": text}
    if ranked := _RANK.fullmatch(text):
        worker = {"url": ranked[1], "rank": int(ranked[2])}
    url = worker["url"].rstrip("/").removesuffix("/v1")
    worker["url"] = url if "://" in url else f"http://{url}"
    return worker


def _add_facts(draft: _Draft, given: _Given, workers: list[dict[str, Any]]) -> None:
    """Add to each worker what other flags say about workers: events, block size, KV transfer and
    the kind of engine.
    """
    for name, key in (
        ("--kv-event-source", "events"),
        ("--pd-kv-events", "events"),
        ("--kv-event-replay-source", "replay"),
    ):
        for text in given.all(name):
            url, _, endpoints = text.partition("=")
            of = [one for one in workers if one["url"] == _worker(url)["url"]]
            for one in of:  # of several ranks the first is named; the ports count up from there
                one[key] = endpoints.partition(",")[0]
            _mark_taken_or_note(
                draft, given, name, bool(of), "it names no worker of the command line"
            )
    size = given.last("--kv-event-block-size")
    for one in workers:
        if size is not None and size.isdecimal() and "events" in one:
            one["block_size"] = int(size)
    _mark_taken_or_note(
        draft,
        given,
        "--kv-event-block-size",
        any("block_size" in one for one in workers),
        "each worker is asked for its block size",
    )
    connector = given.last("--kv-connector")
    passes = connector in ("nixl", "mooncake")
    for one in workers:
        if passes and "role" in one and connector != "nixl":
            one["transfer"] = connector
    _mark_taken_or_note(
        draft, given, "--kv-connector", passes, "KV passes by nixl or mooncake here"
    )
    for one in workers:
        if given.last("--backend") == "openai":
            one["kind"] = "openai"
    _mark_taken_or_note(
        draft,
        given,
        "--backend",
        given.last("--backend") == "openai",
        "each worker is asked which engine it is",
    )


def _mark_taken_or_note(draft: _Draft, given: _Given, name: str, taken: bool, why: str) -> None:
    if taken:
        draft.taken.add(name)
    elif name in given.values:
        draft.notes.append((name, why))


def _static(draft: _Draft, given: _Given) -> None:
    urls = given.listed("--static-backends")
    models = given.listed("--static-models")
    labels = given.listed("--static-model-labels")
    roles = dict.fromkeys(given.listed("--prefill-model-labels"), "prefill")
    roles |= dict.fromkeys(given.listed("--decode-model-labels"), "decode")
    apart = (given.last("--routing-logic") or "").startswith("disaggregated_prefill")
    found = []
    for at, url in enumerate(urls):
        worker = _worker(url)
        if len(models) == len(urls) and urls.count(url) == 1:
            worker["model"] = models[at]
        if apart and at < len(labels) and labels[at] in roles:
            worker["role"] = roles[labels[at]]
        found.append((worker, "--static-backends"))
    draft.items("workers", found)
    if len(found) > Config().limits.workers:
        draft.put("limits.workers", len(found), "--static-backends", "as many as there are")
    _mark_taken_or_note(
        draft,
        given,
        "--static-models",
        any("model" in one for one, _ in found),
        "each worker is asked for its models",
    )
    of_roles = any("role" in one for one, _ in found)
    for name in ("--static-model-labels", "--prefill-model-labels", "--decode-model-labels"):
        _mark_taken_or_note(
            draft, given, name, of_roles, "give `role: prefill` or `decode` to the workers"
        )


def _pods(draft: _Draft, given: _Given) -> None:
    """Add a source of workers for pods that the other router selects by label. Here the pods come
    from a Service that has the label.
    """
    flag = "--service-discovery"
    of_pods = [name for name, row in given.rows.items() if row.how == "of_pods"]
    if given.peer.letter == "p" and given.last(flag) != "k8s":
        static = given.last(flag) == "static"
        _mark_taken_or_note(
            draft, given, flag, static, "list the workers, or name a source of discovery"
        )
        for name in of_pods:
            _mark_taken_or_note(draft, given, name, False, "the workers are a list here")
        return
    namespace = given.last("--service-discovery-namespace") or given.last("--k8s-namespace")
    where = namespace or "default"
    sources = [(f"kubernetes:{where}/engines", flag)]
    if given.values.get("--prefill-selector") or given.values.get("--decode-selector"):
        sources = [
            (f"kubernetes:{where}/prefill,role=prefill", "--prefill-selector"),
            (f"kubernetes:{where}/decode,role=decode", "--decode-selector"),
        ]
    draft.items("discovery", sources)
    for name in (flag, *of_pods):
        if name in given.values:
            draft.notes.append((name, _SERVICE))


_SERVICE = (
    "make a Service of the name in `discovery`, with these labels, port and namespace: the router "
    "follows its pods (pip install '.[kubernetes]'; docs/reference/discovery.md)"
)


def _policy(draft: _Draft, given: _Given) -> None:
    flag = "--routing-logic" if given.peer.letter == "p" else "--policy"
    theirs = given.last(flag)
    if theirs is not None and theirs not in RULES and theirs not in given.peer.rules.split():
        near = did_you_mean(theirs, given.peer.rules.split())
        known = given.peer.rules.replace(" ", ", ")
        raise PeerCommandError(f"{flag} must be one of {known}{near}")
    rule = RULES.get(theirs or "cache_aware")
    by_wait = given.last("--power-of-two-load-metric") in (None, "expected_wait")
    if theirs == "power_of_two" and given.peer.letter == "s" and by_wait:
        rule = "smg_expected_wait"
    _mark_taken_or_note(
        draft,
        given,
        "--power-of-two-load-metric",
        theirs == "power_of_two",
        "it has an effect only with power_of_two",
    )
    if rule is None:
        draft.notes.append((flag, "there is no such rule here; the default is warmset"))
    elif theirs is not None:
        draft.put("policy", rule, flag, "follows caches and load" if rule == AFFINITY else "")
        if theirs.startswith("disaggregated_prefill"):
            draft.put("disaggregation", "always", flag)
    exact = "cache_aware" if rule == AFFINITY else rule
    parameters = []
    for name, row in given.rows.items():
        if row.how == "rule" and name in given.values:
            of, _, parameter = row.key.partition(":")
            if of == exact:
                parameters.append((parameter, name))
            else:
                draft.notes.append((given.names[name], f"it is of {of}, not of the rule chosen"))
    spec = exact
    if rule is not None and exact is not None and parameters:
        spec = _parameters(draft, given, rule, exact, parameters)
    if given.peer.letter != "p" and theirs in (None, "cache_aware"):
        if theirs is None:
            draft.default("policy", AFFINITY, given.peer, "cache_aware; this follows caches, too")
        draft.lines["policy"] += (
            f"\n# policy: {spec}  # {given.peer.name}'s own rule; to use it, delete the line above"
        )


def _parameters(
    draft: _Draft, given: _Given, rule: str, exact: str, parameters: list[tuple[str, str]]
) -> str:
    """Return the policy `exact` with the parameters that the given flags set, and add it to the
    file. If the other router's rule was converted to warmset, only add a note about the parameters.
    If the policy cannot use a parameter, add a note and return `exact` alone. Raises
    PeerCommandError if a parameter is not a number.
    """
    values = []
    for key, name in parameters:
        number = _number(given.last(name))
        if number is None:
            raise PeerCommandError(f"{given.names[name]} must be a number")
        values.append(f"{key}={_digits(number)}")
    spec = f"{exact}?{'&'.join(values)}"
    shown = ", ".join(given.names[name] for _, name in parameters)
    try:
        load(spec)
    except ValueError:
        draft.notes.append((shown, f"policy {exact} cannot use such a value"))
        return exact
    if rule != AFFINITY:
        draft.put("policy", spec, f"--policy, {shown}")
    else:
        draft.notes.append((shown, f"warmset has no thresholds; their rule is policy: {spec}"))
    return spec


def _concurrency(draft: _Draft, given: _Given) -> None:
    """Convert the flags that limit how many requests all workers compute at a time, and how many
    wait for them. The other router limits the sum over all workers. A limit for each worker would
    not be the same: it would keep requests from the worker that has their prefix while other
    workers are idle.
    """
    flag = "--max-concurrent-requests"
    number = _number(given.last(flag))
    if flag in given.values and number is None:
        raise PeerCommandError(f"{flag} must be a number")
    if number is not None and number < 1:
        draft.notes.append((flag, "nothing to set: without it there is no such limit here"))
    elif number is not None:
        draft.items("model_limits", [(f"*:max_requests={int(number)}", flag)])
    for name in ("--queue-size", "--queue-timeout-secs"):
        row, capped = given.rows[name], number is not None and number >= 1
        if name not in given.values:
            if capped:
                draft.default(row.key, row.default, given.peer)
        elif capped:
            draft.put(row.key, given.last(name), name)
        else:
            draft.notes.append((name, f"it has an effect only with {flag}"))


def _defaults(draft: _Draft, given: _Given) -> None:
    """Add the other router's behaviour without flags, where warmroute behaves differently. The
    longest time of a request becomes a line, because clients notice it. Retries, probes and
    ejections differ by more than a number, so their defaults are only reported.
    """
    for name, row in given.rows.items():
        if not row.default or name in given.values or row.key in draft.lines:
            continue
        if row.key == "timeouts.total_s":
            draft.default(row.key, row.default, given.peer)
        elif row.how in _SIMPLE:
            theirs = text_of(_SIMPLE[row.how](row, row.default))
            ours = text_of(draft.keys[row.key].default)
            draft.differing.append(f"{row.key}: {theirs} in {given.peer.name}, {ours} here")


def _aliases(draft: _Draft, given: _Given) -> None:
    theirs = [(text, "--model-alias") for text in given.all("--model-alias")]
    for text in given.listed("--static-aliases"):
        theirs.append((text.replace(":", "=", 1), "--static-aliases"))
    draft.items("names.aliases", theirs)


def _keys(draft: _Draft, given: _Given) -> None:
    for name, row in given.rows.items():
        if row.how == "keys" and name in given.values:
            who = "operators show" if row.key == "admin_keys_file" else "clients show the router"
            draft.put(
                row.key,
                _KEYS_FILES[row.key],
                name,
                f"the keys that {who}; write the file with `warmroute keys hash`",
            )


def _otlp(draft: _Draft, given: _Given) -> None:
    """Add the trace collector, which gets traces as OTLP over HTTP at its own port and path."""
    endpoint = given.last("--otlp-traces-endpoint") or given.last("--otel-endpoint")
    flags = [
        name
        for name in ("--enable-trace", "--otlp-traces-endpoint", "--otel-endpoint", "--otel-secure")
        if name in given.values
    ]
    if given.peer.letter != "p" and "--enable-trace" not in flags:
        draft.notes.append((flags[0], "it has an effect only with --enable-trace"))
        return
    if given.peer.letter == "p" and endpoint is None:
        draft.notes.append((flags[0], "it has an effect only with --otel-endpoint"))
        return
    scheme = "https" if "--otel-secure" in flags else "http"
    text = endpoint or "localhost"
    try:
        parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
        port, host = parts.port, parts.hostname or "localhost"
    except ValueError:
        draft.notes.append((flags[-1], "its value is not HOST:PORT"))
        return
    if parts.username or parts.password:
        draft.notes.append((flags[-1], "its value has a password in it; write tracing.endpoint"))
        return
    port = _OTLP_HTTP if port in (None, _OTLP_GRPC) else port
    host = f"[{host}]" if ":" in host else host
    remark = "OTLP over HTTP, which is at another port than gRPC; pip install '.[otel]'"
    url = f"{parts.scheme}://{host}:{port}/v1/traces"
    draft.put("tracing.endpoint", url, ", ".join(flags), remark)


_STEPS: Mapping[str, Callable[[_Draft, _Given], None]] = MappingProxyType(
    {
        "workers": _workers,
        "prefill": _workers,
        "decode": _workers,
        "of_workers": _workers,
        "static": _static,
        "of_static": _static,
        "pods": _pods,
        "of_pods": _pods,
        "policy": _policy,
        "of_policy": _policy,
        "rule": _policy,
        "concurrency": _concurrency,
        "aliases": _aliases,
        "keys": _keys,
        "otlp": _otlp,
    }
)


# Text.


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None  # neither nan nor infinity


def _digits(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)


def _has_password(text: str) -> bool:
    return re.search(r"//[^/\s]*@", text) is not None


def _printable(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text[:60])
    return shown.replace("#", "?")


def _shown(value: Any) -> str:
    """Return a value as YAML text on one line."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    return json.dumps(value)


def _item(value: Any, flag: str) -> list[str]:
    """Return the lines of one item of a YAML list. A worker that is only a URL takes one line."""
    if not isinstance(value, dict) or set(value) == {"url"}:
        text = value["url"] if isinstance(value, dict) else value
        return [f"  - {_shown(text)}  # {flag}"]
    first, *others = value.items()
    lines = [f"  - {first[0]}: {_shown(first[1])}  # {flag}"]
    return lines + [f"    {key}: {_shown(one)}" for key, one in others]
