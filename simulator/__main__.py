"""`python -m simulator`, the same as `warmroute-sim`."""

import sys

from simulator.cli import main

if __name__ == "__main__":
    sys.exit(main())
