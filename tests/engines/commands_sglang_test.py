"""Every SGLang command that we print or document, and schedules, in SGLang's own parser, its check of drafting's
options and its controller of steps.

Its server runs them on a GPU only. Run by `make test-engines`.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import own_code  # noqa: F401
import pytest
import sglang_stubs  # noqa: F401  (before SGLang)
from exported import cases, command, documented, read
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, resolve_candidate_steps_from_config
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

from draftsmith.eval.engines.served import ranges, sglang_config
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.commands import RAGGED, sglang_command

EXPORTS = [
    (kind, case) for kind in ("eagle", "eagle3", "dflash", "dflash2", "dspark") for case in cases(kind, "sglang")
]
PARSER = argparse.ArgumentParser()
ServerArgs.add_cli_args(PARSER)


def resolved(words: list[str]) -> Any:
    """What SGLang makes of the words behind its module's name."""
    args = ServerArgs.from_cli_args(PARSER.parse_args([*words, "--device", "cuda"]))
    handle_speculative_decoding(args)
    return resolved_view(args)


@pytest.mark.parametrize(("kind", "case"), EXPORTS)
def test_a_printed_command_drafts_as_it_says(kind: str, case: str):
    """At most 48 requests at once, as the note says."""
    exported = read(kind, case, "sglang")
    _, _, _, *words = command(exported.directory)
    view = resolved(words)
    drafts = 4 if kind == "dspark" and case != "filling" else 3
    assert view.speculative_algorithm == kind.replace("dflash2", "dflash").upper()
    assert view.speculative_num_draft_tokens == drafts + 1 and view.max_running_requests == 48
    assert view.speculative_num_steps == (drafts if "eagle" in kind else 1)
    # Tokens before the one that attends; of other kinds SGLang reads it from the files.
    window = json.loads((exported.directory / "config.json").read_text()).get("sliding_window")
    assert view.speculative_draft_window_size == (window - 1 if window and kind == "eagle3" else None)


@pytest.mark.parametrize("case", ["filling", "vanilla"])
def test_fewer_tokens_than_a_dspark_block_has(case: str):
    exported = read("dspark", case, "sglang")
    _, _, _, *words = shlex.split(sglang_command("dspark", Served(str(exported.target), str(exported.directory), 1)))
    assert resolved(words).speculative_num_draft_tokens == 2
    # SGLang refuses the same count given by this flag alone.
    place = words.index("--speculative-dspark-block-size")
    words[place : place + 2] = ["--speculative-num-draft-tokens", "2"]
    with pytest.raises(ValueError, match="must equal gamma"):
        resolved(words)


def test_documented_commands_and_options_of_notes_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch):
    others = [["", "", "", "--speculative-algorithm", "NEXTN", "--speculative-adaptive-config", "sglang-schedule.json"]]
    for _, _, _, *words in [*documented("python -m sglang.launch_server"), *others]:
        PARSER.parse_args([*words, "--model-path", "target"])
    known = {option for action in PARSER._actions for option in action.option_strings}
    assert {"--speculative-dspark-sps-table-path", "--max-running-requests"} <= known and "sps-table-path" in RAGGED
    assert read_ragged_verify_mode() is RaggedVerifyMode.STATIC
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    assert read_ragged_verify_mode() is RaggedVerifyMode.COMPACT


@pytest.mark.parametrize("lengths", [[5, 5, 3, 1, 0, 0, 0], [2], [1, 4, 4, 2], [0, 0, 3]])
def test_every_batch_takes_as_many_steps_as_the_schedule_says(lengths: list[int], tmp_path: Path):
    path = tmp_path / "sglang.json"
    path.write_text(json.dumps(sglang_config(ranges(lengths))))
    assert resolve_candidate_steps_from_config(str(path)) == sorted({*lengths})
    params = AdaptiveSpeculativeParams(max(lengths), str(path))
    for accepted in (0, 5):  # whatever is accepted, and for how long
        for size, steps in enumerate(lengths, start=1):
            for _ in range(40):
                assert params.on_verify_complete([min(accepted, steps)] * size, size) is None
                assert params.get_steps_for_batch(size) == steps
    assert params.get_steps_for_batch(len(lengths) + 9) == lengths[-1]
