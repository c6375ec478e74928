"""`python -m engine` is `warmroute-engine`."""

import sys

from engine.cli import main

sys.exit(main())
