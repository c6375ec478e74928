"""`python -m router`, the same as `warmroute`."""

import gc
import sys


def main() -> int:
    """Run the program; without a native build it refuses to start."""
    gc.disable()  # nothing that imports make is garbage, and to look takes a tenth of a start
    try:
        import kvkernels  # noqa: F401
    except ImportError as error:
        sys.exit(f"warmroute: {error}")
    from router.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
