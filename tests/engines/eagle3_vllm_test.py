"""Exported EAGLE-3 heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward, the
target's layers it captures. Run by `make test-engines`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from vllm_code import engine_config, load, one_process, share  # isort: skip (before vLLM)
from eagle3_defects import DEFECTS, UNSEEN
from eagle3_exported import (
    asked,
    assert_drafts_as_predicted,
    assert_not_built,
    broken,
    cases,
    drafted,
    engine_names,
    of_draft,
    read,
    unpadded,
)
from exported import Exported, assert_close, assert_loaded, assert_quoted, settle
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers

CASES = [(case, kind) for kind in ("vllm", "speculators") for case in cases(kind)]  # it reads those of speculators too
ABSENT = {"model.embed_tokens.weight", "draft_id_to_target_id"}


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("whole", "vllm"), "eagle3", tmp_path_factory.mktemp("store") / "store"):
        yield


@functools.cache
def load_target(case: str) -> nn.Module:
    return load(engine_config(read(case, "vllm"), "eagle3"), draft=False)[0]


def states_of(config: VllmConfig, target: nn.Module, ids: Tensor) -> Tensor:
    """[T, 3H] of the layers that it takes by the draft's config, of all tokens but the last."""
    set_eagle3_aux_hidden_state_layers(target, config.speculative_config)
    _, states = target(ids, torch.arange(len(ids)))
    return torch.cat(states, -1)[:-1]


def table_of(draft: nn.Module) -> Tensor:
    """The target's ids of its drafted tokens."""
    offsets = draft.draft_id_to_target_id
    return torch.arange(draft.config.draft_vocab_size) + (0 if offsets is None else offsets)


def run(
    config: VllmConfig, target: nn.Module, draft: nn.Module, exported: Exported
) -> tuple[Tensor, dict[str, Tensor]]:
    """The states it captures, and its logits of a draft on them, over the whole vocabulary."""
    share(config, target, draft)

    def step(ids: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        to_head, to_next_step = draft(ids, torch.arange(len(ids)), fed)
        return draft.compute_logits(to_head), to_next_step

    with set_current_vllm_config(config):
        states = states_of(config, target, exported.ours["ids"])
        return states, drafted(step, exported.ours, draft.combine_hidden_states(states))


@pytest.mark.parametrize(("case", "kind"), CASES)
def test_every_parameter_is_the_exported_tensor(case: str, kind: str):
    exported = read(case, kind)
    draft = load(engine_config(exported, "eagle3"), draft=True)[0]
    loaded = dict(draft.named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all() == (kind == "vllm")  # the target's takes its place
    loaded.pop("draft_id_to_target_id", None)
    assert_loaded(unpadded(draft, loaded), engine_names(exported.state))
    assert torch.equal(table_of(draft), exported.ours["d2t"])


@pytest.mark.parametrize(("case", "kind"), CASES)
@torch.inference_mode()
def test_a_draft_on_its_own_targets_states_has_our_logits(case: str, kind: str):
    exported = read(case, kind)
    config = engine_config(exported, "eagle3")
    states, logits = run(config, load_target(case), load(config, draft=True)[0], exported)
    assert_close(f"vLLM EAGLE-3 {case}/{kind}", exported.ours, states=states, **of_draft(logits, exported.ours))


# What it does not read: said, since another system may.
LOST = {"t2d-of-another-head", "q-bias", "input-norm"}
IN_VLLM = UNSEEN | {
    "ids-by-the-other-count",
    "ids-said-to-be-later",
    "embedding",
    "no-lm_head-whole",
    "norm_before_residual",
    "norm_before_residual-unsaid",
}


@pytest.mark.parametrize("defect", asked("vllm"))
@torch.inference_mode()
def test_a_defect_does_what_our_reader_predicts(defect: str):
    exported, predicted = broken(defect, "vllm")
    if predicted.raises:
        with pytest.raises((ValueError, AssertionError, RuntimeError)) as caught:
            load(engine_config(exported, "eagle3"), draft=True)
        assert_quoted(predicted, str(caught.value))
        return
    if assert_not_built(predicted, lambda: load(engine_config(exported, "eagle3"), draft=True)):
        return
    config = engine_config(exported, "eagle3")
    draft, started = load(config, draft=True)
    loaded, weights = dict(draft.named_parameters()), engine_names(predicted.weights)
    for name in ABSENT:
        loaded.pop(name, None)
        weights.pop(name, None)
    if loaded.get("lm_head.weight", torch.zeros(1)).isnan().all():  # the target's, if any
        del loaded["lm_head.weight"], weights["lm_head.weight"]
    settle(unpadded(draft, loaded), unpadded(draft, started), weights)
    try:
        _, logits = run(config, load_target(DEFECTS[defect].case), draft, exported)
    except IndexError:
        assert any("tokens beyond the target's" in text for text in predicted.errors)
        return
    assert_drafts_as_predicted(predicted, logits, exported, lost=defect in LOST, unseen=defect in IN_VLLM)
