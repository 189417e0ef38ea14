"""Exported EAGLE-3 heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward, the
target's layers it captures. Run by `make test-engines`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from vllm_code import engine_config, load, one_process, share  # isort: skip (before vLLM)
from defects import EAGLE3
from exported import (
    Exported,
    asked,
    assert_as_checked,
    assert_close,
    assert_drafts,
    assert_loaded,
    both_norms,
    broken,
    cases,
    drafted,
    fused,
    read,
    restore_unfilled,
    unpadded,
)
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers

# It reads those of speculators too.
CASES = [(case, format) for format in ("vllm", "speculators") for case in cases("eagle3", format)]
TABLES = ("embed_tokens", "lm_head", "draft_id_to_target_id")


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("eagle3", "whole", "vllm"), "eagle3", tmp_path_factory.mktemp("store") / "store"):
        yield


@functools.cache
def load_target(case: str) -> nn.Module:
    return load(engine_config(read("eagle3", case, "vllm"), "eagle3"), draft=False)[0]


def run(config: VllmConfig, target: nn.Module, draft: nn.Module, exported: Exported) -> tuple[Tensor, list[Tensor]]:
    """Return the states that it captures by the draft's config, and the logits of a draft on them."""
    share(config, target, draft)
    ids = exported.ours["ids"]

    def step(ids: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        to_head, to_next_step = draft(ids, torch.arange(len(ids)), fed)
        return draft.compute_logits(to_head), to_next_step

    with set_current_vllm_config(config):
        set_eagle3_aux_hidden_state_layers(target, config.speculative_config)
        states = torch.cat(target(ids, torch.arange(len(ids)))[1], -1)[:-1]
        return states, drafted(step, exported.ours, draft.combine_hidden_states(states))


@pytest.mark.parametrize(("case", "format"), CASES)
@torch.inference_mode()
def test_an_export_is_loaded_whole_and_gives_our_logits(case: str, format: str):
    exported = read("eagle3", case, format)
    config = engine_config(exported, "eagle3")
    draft = load(config, draft=True)[0]
    loaded = dict(draft.named_parameters())
    if "embed_tokens.weight" not in exported.state:
        # The target's takes its place.
        assert loaded.pop("model.embed_tokens.weight").isnan().all() == (format == "vllm")
    offsets = loaded.pop("draft_id_to_target_id", None)
    expected = fused(exported.state)
    if format == "vllm":
        expected = both_norms(expected)
    else:
        loaded = {name: t for name, t in loaded.items() if name in expected or not t.isnan().all()}
    assert_loaded(unpadded(draft, loaded), expected)
    ids = torch.arange(draft.config.draft_vocab_size) + (0 if offsets is None else offsets)
    assert torch.equal(ids, exported.ours["d2t"])
    states, logits = run(config, load_target(case), draft, exported)
    assert_close(f"vLLM EAGLE-3 {case}/{format}", exported.ours, states=states)
    assert_drafts(f"vLLM EAGLE-3 {case}/{format}", exported.ours, logits)


def compute(exported: Exported, case: str) -> Tensor:
    config = engine_config(exported, "eagle3")
    draft, started = load(config, draft=True)
    restore_unfilled(draft, {name: t for name, t in started.items() if not any(part in name for part in TABLES)})
    return torch.cat(run(config, load_target(case), draft, exported)[1])


@pytest.mark.parametrize("defect", asked("eagle3", "vllm"))
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(defect: str):
    exported = broken("eagle3", defect, "vllm")
    assert_as_checked(exported, lambda: compute(exported, EAGLE3[defect].case), harmless=False)
