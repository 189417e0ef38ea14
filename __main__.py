"""`python -m draftsmith`: the same command line as the `draftsmith` script."""

import sys


def run() -> int | None:
    from draftsmith.launch.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
