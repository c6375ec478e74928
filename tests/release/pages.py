"""The pages of a user's first hour: their commands, what readers fill in, and which commands are
not run and why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from release.wheels import ROOT
from tests.release.host import Host, commands, replaced
from tests.told_decision import decision_in

TIMED = "warmroute-engine --timed llama-3.1-8b-h100"
SAMPLE = "simulator/data/conversation_sample.jsonl.gz"
Table = Sequence[tuple[str, str]]
# Names that a reader of the pages fills in, and engines and tokenizers that this host lacks.
FILLED: Table = (
    (r" --tokenizer /models/MODEL", ""),
    (r"^VLLM_NIXL\S+HOST=(\S+) .*vllm serve .*--port (\d+).*", rf"{TIMED} --host \1 --port \2"),
    (r"^(VLLM_\S+ )*vllm serve .*--port (\d+).*", rf"{TIMED} --host 10.0.0.1 --port \2"),
    (r"^python -m sglang.*--port (\d+) .*mode decode", rf"{TIMED} --host 10.0.0.2 --port \1"),
    (r"^python -m sglang\S* .*--port (\d+).*", rf"{TIMED} --host 10.0.0.1 --port \1"),
    (r"^warmroute-engine serve DIR", TIMED),
    (r"--timed PROFILE", "--timed llama-3.1-8b-h100"),
    (r'"(MODEL|tiny)"', '"warmroute-timed"'),
    (r"\.venv/bin/", ""),
)
# Pages for those who change warmroute, and laboratory notes, whose commands are a checkout's.
OTHERS = re.compile(r"docs/(notes/.*|kernels|sizing|structure)\.md")
# Programs that no test of this folder runs: tests/deploy reads their commands, renders the chart.
CLUSTER = ("kubectl", "helm", "docker", "skopeo")
_CHECKOUT = "compiles the checkout, which the wheel here is made of as well"
_CI = "a checkout's; CI runs it"
_EXTRA = "for a checkout; what a host with the wheel installs is what the error names"
_TWO_HOSTS = "tests/live/test_pair_walk.py walks this way from one host to two"
_ENVOY = "Envoy: tests/engines/test_gateway_page.py runs it"
_TRITON = "tritonserver: tests/engines/test_triton_page.py runs it"
_TORCH = "torch, which the host lacks: tests/engine/test_instances_live.py serves such a model"
_NPM = "a client from npm: tests/live/test_agents_npm.py runs it"
NOT_RUN: dict[str, dict[str, str]] = {
    "docs/agents.md": {
        "export ANTHROPIC_BASE_URL=http://ROUTER:8080 ANTHROPIC_AUTH_TOKEN=YOUR-KEY": _NPM,
        "export CLAUDE_CODE_ATTRIBUTION_HEADER=0": _NPM,
        "export CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY=1": _NPM,
        "claude --model claude-llama": _NPM,
        "export WARMROUTE_KEY=YOUR-KEY": _NPM,
        'codex exec "Say good day."': _NPM,
        'codex exec resume --last "Go on."': _NPM,
        'opencode run "Say good day."': _NPM,
        'opencode run --continue "Go on."': _NPM,
        'pi -p --provider warmroute --model llama "Say good day."': _NPM,
        'pi -p --continue --provider warmroute --model llama "Go on."': _NPM,
        "curl -i -H 'x-warmroute-explain: 1' -H 'content-type: application/json' "
        '-d \'{"model": "llama", "max_tokens": 1, '
        '"messages": [{"role": "user", "content": "Hi"}]}\' '
        "http://ROUTER:8080/v1/messages": "timed workers lack the path: tests/live/test_agents.py",
    },
    "README.md": {
        "git clone REPOSITORY warmroute && cd warmroute && python3 -m venv .venv && "
        ".venv/bin/pip install .": _CHECKOUT,
        "make demo": _CI,
        "make run": _CI,
    },
    "docs/quickstart.md": {
        "git clone REPOSITORY warmroute && cd warmroute": _CHECKOUT,
        "python3 -m venv .venv && .venv/bin/pip install .": _CHECKOUT,
        "export PATH=$PWD/.venv/bin:$PATH": "this host's PATH has it",
        "warmroute init": "it asks this host's usual ports: tests/live/test_init.py runs it",
    },
    "docs/demo.md": {
        "make demo": _CI,
        "make run": _CI,
        "make sim TRACE=conversation.jsonl.gz": _CI,
    },
    "docs/engine.md": {
        "pip install '.[engine]'": _EXTRA,
        "warmroute-engine make-tiny tiny": "torch: tests/engine/model/test_tiny.py makes it",
        "warmroute-engine serve tiny --port 8002": _TORCH,
        "curl http://127.0.0.1:8002/v1/chat/completions -H 'content-type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}\'': _TORCH,
        "warmroute-engine serve tiny --instances 2 --port 8000": _TORCH,
    },
    "docs/gateway.md": {
        "pip install '.[grpc]'": _EXTRA,
        "envoy -c docs/deploy/envoy/original-dst.yaml": _ENVOY,
        "curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' "
        '-d \'{"model": "MODEL", "prompt": "Hello", "max_tokens": 8}\'': _ENVOY,
    },
    "docs/kubernetes.md": {
        "curl -s http://127.0.0.1:8081/metrics | grep warmroute_tokenizer_exact": "a router with a "
        "tokenizer: tests/live/test_tokens_checked.py has one",
    },
    "docs/reference/logs.md": {"pip install '.[otel]'": _EXTRA},
    "docs/replicas.md": {
        "redis-server --port 6379 --bind 0.0.0.0 --requirepass PASSWORD --save '' --appendonly no "
        "--maxmemory 256mb --maxmemory-policy noeviction": _TWO_HOSTS,
        "warmroute config --check /etc/warmroute/router.yaml": _TWO_HOSTS,
        "warmroute serve --config /etc/warmroute/router.yaml": _TWO_HOSTS,
        "curl -s http://10.0.0.1:8081/metrics | grep -E "
        "'^warmroute_replicas_(link_up|peers|peer_in_sync)'": _TWO_HOSTS,
        "curl -s http://10.0.0.2:8081/metrics | grep -E "
        "'^warmroute_replicas_(link_up|peers|peer_in_sync)'": _TWO_HOSTS,
    },
    "docs/simulator.md": {
        "warmroute advise requests.jsonl --profile llama-3.1-8b-h100 --prefix-wait-tokens 0": "200 "
        "requests of a minute: tests/simulator/runs/test_advise.py makes such logs",
        "warmroute-sim compare w4b.results.jsonl --base lmetric": "results of a study of hours",
    },
    "docs/triton.md": {
        "python3 -m venv .venv && . .venv/bin/activate": _EXTRA,
        "pip install '.[grpc]'": _EXTRA,
        "tritonserver --model-repository docs/deploy/triton": _TRITON,
        "curl -s http://127.0.0.1:8000/v2/models/tensorrt_llm/generate "
        '-d \'{"text_input": "t1 t2 t3", "max_tokens": 4}\'': _TRITON,
        "curl -sN http://127.0.0.1:8000/v2/models/tensorrt_llm/generate_stream "
        '-d \'{"text_input": "t1 t2 t3", "max_tokens": 4, "stream": true}\'': _TRITON,
        "curl -s http://127.0.0.1:8002/metrics | grep nv_trt_llm_request_metrics": _TRITON,
    },
}


def text_of(name: str) -> str:
    """Return a page's text, by its path in the checkout."""
    return (ROOT / name).read_text(encoding="utf-8")


def pages() -> dict[str, list[str]]:
    """Return the pages with commands to run, each with its commands."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = str(path.relative_to(ROOT))
        if not OTHERS.fullmatch(name) and (runnable := to_run(name)):
            found[name] = runnable
    return found


def to_run(name: str) -> list[str]:
    """Return a page's commands in order, without those that tests do not run."""
    return [
        command
        for command in commands(text_of(name))
        if command not in NOT_RUN.get(name, {}) and command.split()[0] not in CLUSTER
    ]


class Page:
    """A page whose commands are run in order on a host.

    As a context manager it fails the test if a command was not run.
    """

    def __init__(self, name: str, on: Host) -> None:
        self.name, self.on = name, on
        self.left = to_run(name)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert kind is not None or not self.left, (
            f"{self.name}: neither run nor listed: {self.left}"
        )

    def next(self, *table: tuple[str, str]) -> str:
        """Return the next command with the reader's values filled in; the caller has to run it."""
        return replaced(self.left.pop(0), [*table, *FILLED])

    def run_next(self, count: int = 1, *table: tuple[str, str]) -> str:
        """Run the next `count` commands and return the output of the last one."""
        output = ""
        for _ in range(count):
            output = run_command(self.on, self.next(*table))
        return output

    def refused(self, *table: tuple[str, str]) -> str:
        """Run the next command, which needs an extra, and return the `pip install` line in its
        error.
        """
        said = self.on.run(f"! {self.next(*table)}")
        found = re.search(r"pip install ((?:'[^']+' ?)+)", said)
        assert found is not None, said
        return found[0]


def run_command(on: Host, command: str) -> str:
    """Run a page's command: start a server and wait until it is ready, or run any other command."""
    line = replaced(command, FILLED).removesuffix("&").strip()
    server = re.search(r"^(\w+=\S+ )*(warmroute serve|warmroute-engine) ", f"{line} ")
    if server is None:
        return on.run(line)
    on.start(line)
    if server[2] == "warmroute serve" and " --config " not in line:
        admin = re.search(r"--admin-port (\d+)", line)
        port = admin[1] if admin else "8081"
        count = line.count("--worker ")
        on.until(f"curl http://127.0.0.1:{port}/health", f'"ready_workers":{count},')
    return ""


def workers(on: Host) -> list[dict[str, Any]]:
    """Return the rows of workers that the router on this host lists."""
    rows: list[dict[str, Any]] = json.loads(on.run("curl http://127.0.0.1:8081/workers"))["workers"]
    return rows


def explained(answer: str) -> dict[str, Any]:
    """Return the decision in an answer's explain header."""
    (text,) = re.findall(r"(?im)^x-warmroute-explain: (.*?)\r?$", answer)
    return decision_in(text)
