"""The command that `export` prints for DSpark heads, in SGLang's own parser and its own check of DSpark's options.

Its server runs them on a GPU only. Run by `make test-engines`.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import own_code  # noqa: F401
import pytest
import sglang_stubs  # noqa: F401  (before SGLang)
from exported import cases, read
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.speculative_hook import _handle_dspark
from sglang.srt.server_args import ServerArgs

from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.systems import sglang_command


def resolved(words: list[str]) -> Any:
    """What SGLang makes of the words behind its module's name."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args([*words, "--device", "cuda"]))
    _handle_dspark(args)
    return resolved_view(args)


@pytest.mark.parametrize("case", cases("dspark", "sglang"))
@pytest.mark.parametrize("count", [1, 3])
def test_as_many_tokens_are_drafted_as_the_command_says(case: str, count: int):
    """Fewer than the file's `block_size` too, and of fill-in heads, whose block has a slot more than it drafts."""
    exported = read("dspark", case, "sglang")
    served = Served(str(exported.target), str(exported.directory), count)
    _, _, _, *words = shlex.split(sglang_command("dspark", served))
    view = resolved(words)
    assert view.speculative_num_draft_tokens == count + 1 and view.speculative_algorithm == "DSPARK"
    # SGLang refuses the same count given by this flag alone.
    place = words.index("--speculative-dspark-block-size")
    words[place : place + 2] = ["--speculative-num-draft-tokens", str(count + 1)]
    with pytest.raises(ValueError, match="must equal gamma"):
        resolved(words)
