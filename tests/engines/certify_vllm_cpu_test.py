"""`eval certify` on answers of vLLM with a draft model, at temperature 1. Run by `make test-engines`.

vLLM 0.32 for a CPU fails: `_expand_kernel_impl` fills a copy of its output tensor, so drafted tokens are verified at an
uninitialized temperature. With that function mended, vLLM passes.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_code  # noqa: F401
import pytest
import torch
from exported import FIGURES
from states_vllm_cpu_test import serving
from vllm import LLM, SamplingParams
from vllm.utils import cpu_triton_utils

from draftsmith.data.engines.own import OwnEngine
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.text.turns import PendingTurn, TargetTurn
from draftsmith.eval.certify import CertifyConfig
from draftsmith.eval.certify import run as certify
from draftsmith.modules.pretrained.hub import model_directory, resolve_model

torch.set_num_threads(1)
TARGET, DRAFT = "embedded:prose/target", "embedded:prose/draft"
# Cut prompts of requests with a seed fail on a CPU ("CPU Generator does not use offset").
ARGS = {
    "enforce_eager": True, "max_num_seqs": 16, "max_model_len": 512, "dtype": "float32", "enable_chunked_prefill": False
}  # fmt: skip
released = cpu_triton_utils._expand_kernel_impl


def mended(output, values, ends, replaced, by, MAX_NUM_TOKENS=None) -> None:
    for value, start, end in zip(values, [0, *ends.tolist()], ends.tolist(), strict=False):
        output[start:end] = by if value == replaced else value


# vLLM keeps the function that it finds first.
expand = {"now": released}
cpu_triton_utils._expand_kernel_impl = lambda *args, **kwargs: expand["now"](*args, **kwargs)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prompts") / "made"
    return make_prompts(PromptsConfig("embedded:prose/prompts", TARGET, output, limit=120))


def answers(prompts: Path, output: Path, draft: bool) -> Path:
    """Answers of vLLM in this process, where its function can be mended."""
    drafting = {"method": "draft_model", "model": resolve_model(DRAFT), "num_speculative_tokens": 4}
    args: dict[str, Any] = ARGS | ({"speculative_config": drafting} if draft else {})
    llm = LLM(str(model_directory(TARGET)), skip_tokenizer_init=True, generation_config="vllm", **args)

    def answer(engine: OwnEngine, turns: Sequence[PendingTurn]) -> Iterator[tuple[int, TargetTurn]]:
        seeds = [engine.settings.row_seed(turn.row, turn.number) for turn in turns]
        how = [SamplingParams(max_tokens=64, seed=seed, ignore_eos=True, detokenize=False) for seed in seeds]
        asked = [{"prompt_token_ids": list(turn.prompt_ids)} for turn in turns]
        for i, output in enumerate(llm.generate(asked, how, use_tqdm=False)):
            yield i, TargetTurn(list(output.outputs[0].token_ids), False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnEngine, "answers", answer)
        return make_responses(
            ResponsesConfig(prompts, TARGET, output, max_new_tokens=64, ignore_eos=True, num_threads=1)
        )


@pytest.fixture(scope="module")
def control(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers(prompts, tmp_path_factory.mktemp("control") / "plain", draft=False)


def sampling_tests(certificate: Path) -> list[dict[str, Any]]:
    return [row["sampling"] for row in json.loads((certificate / "results.json").read_text())["answers"]]


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["--target", TARGET, "--dtype", "float32"]
    with serving(tmp_path_factory.mktemp("server") / "states", words) as server:
        yield server.url


@pytest.mark.parametrize(("kernel", "code"), [(released, 1), (mended, 0)])
def test_a_server_that_does_not_follow_its_target_is_found(prompts, control, plain_server, tmp_path, kernel, code):
    expand["now"] = kernel
    served = answers(prompts, tmp_path / "served", draft=True)
    config = CertifyConfig(
        target=TARGET, data=served, control=control, head=DRAFT, output=tmp_path / "certificate", num_threads=1
    )
    assert certify(config) == code
    plain, server = sampling_tests(tmp_path / "certificate")
    assert plain["tokens"] == server["tokens"] == 120 * 64 and plain["p_value"] > 0.01
    assert (server["p_value"] < 1e-20) == bool(code)

    # By the log-probabilities of a vLLM server alone: of 20 tokens at each place, its default.
    by_server = replace(config, server=plain_server, output=tmp_path / "by-server")
    assert certify(by_server) == code
    plain, scored = sampling_tests(tmp_path / "by-server")
    FIGURES.append(f"certified by prompt_logprobs: p {scored['p_value']:.1e}, in process {server['p_value']:.1e}")
    assert plain["p_value"] > 0.01 and (scored["p_value"] < 1e-20) == bool(code)
