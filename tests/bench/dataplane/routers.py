"""The subjects of the bench: our router in several forms, other routers, two plain proxies, and no
router.

The other routers come from PyPI, in an environment of their own:

    python3 -m venv peers
    peers/bin/pip install sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17

HAProxy and nginx come from the system (`apt-get install haproxy nginx`); the bench starts each of
them, so their services need not run. All get one core and, if they can be configured, one thread.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from router.settings.schema import Config
from tests.bench.dataplane.programs import (
    Cores,
    Engines,
    program,
    ready_line,
    until_answers,
)


@dataclass(frozen=True, slots=True)
class Running:
    """A running router with its process and ports. Lifetime: a measurement."""

    port: int
    pid: int | None = None  # None: there is nothing between load and engine
    admin: str = ""  # of our own routers only


Start = Callable[[Engines, Cores], AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to measure: a router, a proxy, or direct connections."""

    name: str
    start: Start
    missing: str = ""  # why it cannot be measured here
    flags: tuple[str, ...] = ()  # further flags of our own routers


def subjects(peers: str | None) -> list[Subject]:
    """Return all subjects; a subject that is not installed carries the reason."""
    return [
        Subject("warmroute", ours()),
        *_ways(),
        _peer("sglang-router", peers, "sglang_router", "launch"),
        _peer("smg", peers, "smg", "launch"),
        _peer("vllm-router", peers, "vllm_router.launch_router"),
        Subject("HAProxy", _haproxy, "" if shutil.which("haproxy") else "haproxy not installed"),
        Subject("nginx", _nginx, "" if shutil.which("nginx") else "nginx not installed"),
        Subject("direct", _direct),
    ]


def ours(*flags: str, module: str = "router", log: str = "warmroute") -> Start:
    """Return a function that starts our router with its defaults and these flags; `module` is the
    Python module to run and `log` the name of its log.
    """

    @contextmanager
    def start(engines: Engines, cores: Cores) -> Iterator[Running]:
        command = [sys.executable, "-m", module, "serve", "--port", "0", "--admin-port", "0"]
        command += ["--log-level", "warning", *flags]
        for worker in engines.workers:
            command += ["--worker", worker]
        if engines.pair:
            command += ["--disaggregation", "always"]
        with program(command, cores.router, log) as process:
            client, admin = ready_line(process, log).split()[1:3]
            port = int(client.rsplit(":", 1)[1])
            until_answers(port, process, log)
            yield Running(port, process.pid, admin.partition("=")[2])

    return start


def _ways() -> list[Subject]:
    """Return our router once for each other setting of the code that carries bytes, as far as this
    version has the settings.
    """
    ways = {
        "warmroute, hybrid": ("--policy", "hybrid"),
        "warmroute, Python relay": ("--relay", "python"),
        "warmroute, all by aiohttp": ("--front", "aiohttp"),
        "warmroute, migration": ("--migration-moves", "2"),
    }
    known = Config.__struct_fields__
    return [
        Subject(name, ours(*flags), flags=flags)
        for name, flags in ways.items()
        if flags[0].removeprefix("--").partition("-")[0] in known
    ]


@contextmanager
def _direct(engines: Engines, cores: Cores) -> Iterator[Running]:
    yield Running(engines.ports[0])


def _peer(name: str, peers: str | None, module: str, *words: str) -> Subject:
    """Return a router from PyPI; `peers` is the Python interpreter that has it."""
    if peers is None:
        return Subject(name, _direct, "no --peers")
    package = module.partition(".")[0]
    look = [peers, "-c", f"import {package}"]
    if subprocess.run(look, capture_output=True, check=False).returncode != 0:
        return Subject(name, _direct, f"not installed for {peers}")

    @contextmanager
    def start(engines: Engines, cores: Cores) -> Iterator[Running]:
        port, metrics = free_port(), free_port()
        command = [peers, "-m", module, *words, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware"]
        if engines.pair:
            one, other = engines.urls
            command += ["--pd-disaggregation", "--prefill", one, "8998", "--decode", other]
        else:
            command += ["--worker-urls", *engines.urls]
        command += ["--prometheus-port", str(metrics), "--log-level", "error"]
        # Two of them choose their threads by the CPU affinity and not by this flag.
        environment = os.environ | {"TOKIO_WORKER_THREADS": "1"}
        with program(command, cores.router, name, environment) as process:
            until_answers(port, process, name)
            yield Running(port, process.pid)

    return Subject(name, start)


_HAPROXY = """\
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend front
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance roundrobin
  http-reuse always
  option http-no-delay
{servers}
"""


@contextmanager
def _haproxy(engines: Engines, cores: Cores) -> Iterator[Running]:
    port = free_port()
    servers = "\n".join(f"  server e{p} 127.0.0.1:{p}" for p in engines.ports)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "haproxy.cfg"
        config.write_text(_HAPROXY.format(port=port, servers=servers))
        with program(["haproxy", "-db", "-f", str(config)], cores.router, "haproxy") as process:
            until_answers(port, process, "haproxy")
            yield Running(port, process.pid)


_NGINX = """\
daemon off;
master_process off;
worker_processes 1;
worker_rlimit_nofile 40000;
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections 20000; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  client_body_buffer_size 256k;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream engines {{ {servers} keepalive 2048; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@contextmanager
def _nginx(engines: Engines, cores: Cores) -> Iterator[Running]:
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{p};" for p in engines.ports)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(_NGINX.format(port=port, servers=servers, folder=folder))
        command = ["nginx", "-p", folder, "-c", str(config), "-e", "stderr"]
        with program(command, cores.router, "nginx") as process:
            until_answers(port, process, "nginx")
            yield Running(port, process.pid)


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
