"""Exported EAGLE-1 and EAGLE-3 heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's
forward, the target's layers it captures. Run by `make test-engines`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from vllm_code import engine_config, load, one_process, share  # isort: skip (before vLLM)
from defects import DEFECTS
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
BROKEN = [(kind, defect) for kind in ("eagle", "eagle3") for defect in asked(kind, "vllm")]
# Whose places the target's take.
TABLES = {"eagle": ("embed_tokens",), "eagle3": ("embed_tokens", "lm_head", "draft_id_to_target_id")}


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("eagle3", "whole", "vllm"), "eagle3", tmp_path_factory.mktemp("store") / "store"):
        yield


@functools.cache
def load_target(kind: str, case: str) -> nn.Module:
    return load(engine_config(read(kind, case, "vllm"), kind), draft=False)[0]


def run_eagle(config: VllmConfig, target: nn.Module, draft: nn.Module, exported: Exported) -> list[Tensor]:
    """Return the target's states, and the state and logits of a draft on ours."""
    share(config, target, draft)
    ids = exported.ours["ids"]
    with set_current_vllm_config(config):
        positions = torch.arange(len(ids))
        features = target(ids, positions)[:-1]
        to_head, to_next_step = draft(ids[1:], positions[:-1], exported.ours["features"])
        assert torch.equal(to_head, to_next_step)
        return [features, to_head, draft.compute_logits(to_head)]


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


@pytest.mark.parametrize("case", cases("eagle", "vllm"))
@torch.inference_mode()
def test_an_eagle_head_is_loaded_whole_and_gives_our_logits(case: str):
    exported = read("eagle", case, "vllm")
    config = engine_config(exported, "eagle")
    draft = load(config, draft=True)[0]
    loaded = dict(draft.named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all()  # the target's takes its place
    assert_loaded(loaded, fused(exported.state))
    made = run_eagle(config, load_target("eagle", case), draft, exported)
    parts = dict(zip(("features", "hidden", "logits.0"), made, strict=True))
    assert_close(f"vLLM {case}", exported.ours, **parts)


@pytest.mark.parametrize(("case", "format"), CASES)
@torch.inference_mode()
def test_an_eagle3_head_is_loaded_whole_and_gives_our_logits(case: str, format: str):
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
    states, logits = run(config, load_target("eagle3", case), draft, exported)
    assert_close(f"vLLM EAGLE-3 {case}/{format}", exported.ours, states=states)
    assert_drafts(f"vLLM EAGLE-3 {case}/{format}", exported.ours, logits)


@pytest.mark.parametrize(("kind", "defect"), BROKEN)
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(kind: str, defect: str):
    exported = broken(kind, defect, "vllm")

    def compute() -> Tensor:
        config = engine_config(exported, kind)
        draft, started = load(config, draft=True)
        restore_unfilled(
            draft, {name: t for name, t in started.items() if not any(part in name for part in TABLES[kind])}
        )
        target = load_target(kind, DEFECTS[kind][defect].case)
        if kind == "eagle":
            return run_eagle(config, target, draft, exported)[-1]
        return torch.cat(run(config, target, draft, exported)[1])

    assert_as_checked(exported, compute, harmless=False)
