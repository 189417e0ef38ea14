"""A benchmark as a script, with the settings, messages and exit codes of the commands of `draftsmith`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.launch.arguments import parse
from draftsmith.launch.errors import user_message


def script(name: str, config_class: type, run: Callable[[Any], Any], args: Sequence[str] | None = None) -> int:
    """Run a benchmark; its exit code.

    name: its file. run: returns an exit code, or a path where it only measures. args: None takes the command line's.
    """
    try:
        about = (config_class.__doc__ or "").partition("\n")[0]
        config = parse(
            f"python benchmarks/{name}.py", config_class, list(sys.argv[1:] if args is None else args), (), about
        )
        result = 0 if config is None else run(config)
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"draftsmith: error: {message}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0
