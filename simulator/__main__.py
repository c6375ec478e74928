"""Runs `warmroute-sim` as `python -m simulator`."""

import sys


def main() -> int:
    """Run the program and return its exit code; if the native library was not built, refuse to
    start.
    """
    try:
        import kvkernels  # noqa: F401
    except ImportError as error:
        sys.exit(f"warmroute-sim: {error}")
    from simulator.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
