"""Every vLLM command that we print or document, and schedules, in vLLM's own parser and config. Run by `make
test-engines`.

Its server runs them on a GPU only: here it is said to have one's model runner and CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from typing import get_args

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import own_code  # noqa: F401
import pytest
from exported import cases, command, documented, read
from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.config.speculative import DraftSampleMethod, RejectionSampleMethod
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from draftsmith.eval.engines.served import ranges, vllm_config
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.commands import DRAWN, vllm_command
from draftsmith.modules.formats.mtp import MtpFormat

KINDS = ["eagle3", "dflash", "dflash2", "dspark"]
FORMATS = [("eagle", "vllm"), *((kind, system) for kind in KINDS for system in ("vllm", "speculators"))]
EXPORTS = [(kind, case, system) for kind, system in FORMATS for case in cases(kind, system)]
PARSER = make_arg_parser(FlexibleArgumentParser())


def configured(words: list[str], runner: str) -> VllmConfig:
    """Return vLLM's config for the arguments of `vllm serve`, with the V1 or the V2 model runner."""
    args = PARSER.parse_args(words)
    args.model = args.model_tag
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()


@pytest.mark.parametrize(("kind", "case", "system"), EXPORTS)
def test_a_printed_command_drafts_as_it_says(kind: str, case: str, system: str, monkeypatch: pytest.MonkeyPatch):
    exported = read(kind, case, system)
    _, _, *words = command(exported.directory)
    confident = "confidence_head.proj.weight" in exported.state
    if confident:
        with pytest.raises(ValueError, match="requires full CUDA graphs"):
            configured(words, "V2")
        monkeypatch.setattr(CUDAGraphMode, "has_full_cudagraphs", lambda mode: True)
        with pytest.raises(ValueError, match="not currently compatible with LoRA"):
            configured([*words, "--enable-lora"], "V2")
    if kind in ("dflash2", "dspark"):
        with pytest.raises(ValueError, match="Runner V1 does not support"):
            configured(words, "V1")
    found = configured(words, "V2").speculative_config
    assert found is not None and found.method == kind.replace("dflash2", "dflash")
    assert found.num_speculative_tokens == (4 if kind == "dspark" and case != "filling" else 3)
    assert found.enable_adaptive_verification == confident and found.draft_sample_method == "greedy"


def test_other_printed_and_documented_commands_have_options_of_vllm():
    served = Served("target", "head", 3, family="opt")
    printed = [vllm_command("draft_model", served), vllm_command("eagle3", served), MtpFormat().serve(served)]
    assert "--model-impl transformers" in printed[1]
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    named = dict(re.findall(r'"(\w+)": "(\w+)"', DRAWN))
    assert named["draft_sample_method"] in get_args(DraftSampleMethod)
    assert named["rejection_sample_method"] in get_args(RejectionSampleMethod)
    for _, _, *words in [*map(shlex.split, printed), *documented("vllm serve")]:
        assert (PARSER.parse_args(words).speculative_config or {}).keys() <= fields


@pytest.mark.parametrize("lengths", [[5, 5, 3, 1, 0, 0, 0], [2], [1, 4, 4, 2], [0, 0, 3]])
def test_every_batch_drafts_as_many_tokens_as_the_schedule_says(lengths: list[int]):
    written = json.loads(json.dumps(vllm_config(ranges(lengths))))
    config = SpeculativeConfig(method="ngram", prompt_lookup_max=3, **written)
    assert config.num_speculative_tokens == max(lengths) and config.uses_dynamic_speculative_decoding()
    schedule = config.num_speculative_tokens_per_batch_size
    assert schedule == ranges(lengths)
    found = build_dynamic_sd_schedule_lookup(schedule, len(lengths) + 3, config.num_speculative_tokens)
    assert found[1:] == [*lengths, *[lengths[-1]] * 3]
