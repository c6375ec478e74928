"""`python -m router`, the same as `warmroute`."""

import gc
import os
import sys


def main() -> int:
    """Run the router's command line; without the compiled modules, print an error and refuse to
    start.
    """
    # numpy's linear algebra, which nothing here uses, starts threads that spin, one a core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # imports make no garbage, and a collection would take a tenth of the start
    try:
        import kvkernels  # noqa: F401
    except ImportError as error:
        sys.exit(f"warmroute: {error}")
    from router.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
