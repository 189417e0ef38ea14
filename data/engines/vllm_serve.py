"""vLLM's server of hidden states, with what the target's family needs; `draftsmith launch vllm` starts it.

It runs in vLLM's own environment, whose classes tell what that is (`vllm.family_arguments`).
"""

from __future__ import annotations

import json
import runpy
import sys

from draftsmith.data.engines.vllm import family_arguments
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.types import InputError


def main() -> None:
    """Add the family's options in front of the given ones, of which the last one counts, and run the server."""
    words = sys.argv[1:]
    try:
        family = family_arguments(Checkpoint(words[words.index("--model") + 1]), states=True)
    except InputError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    options = []
    for name, value in family.items():
        flag = name.replace("_", "-")
        text = value if isinstance(value, str) else json.dumps(value)
        options += [f"--no-{flag}"] if value is False else [f"--{flag}", text]
    if options:
        print(f"draftsmith: this target needs {' '.join(options)}", file=sys.stderr, flush=True)
    sys.argv[1:] = [*options, *words]
    # `vllm serve` without its command line, which some builds lack.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
