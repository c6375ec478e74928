"""Runs the router's command in a process with a low limit of open files.

python -m tests.live.few_files FILES serve ...
"""

from __future__ import annotations

import resource
import sys

from router.cli.main import main

if __name__ == "__main__":
    files = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.exit(main(sys.argv[2:]))
