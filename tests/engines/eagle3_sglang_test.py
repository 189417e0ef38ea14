"""Exported EAGLE-3 heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits,
the target's layers it captures. Run by `make test-engines`."""

from __future__ import annotations

import pytest
import torch

from sglang_code import load, load_draft, run, start  # isort: skip (before SGLang)
from eagle3_defects import DEFECTS, IDS, UNSEEN
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
    whole,
)
from exported import Exported, assert_close, assert_loaded, assert_quoted, settle
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

CASES = cases("sglang")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return start(read("whole", "sglang"), "EAGLE3", tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def targets(server: ServerArgs) -> dict[str, nn.Module]:
    return {case: load(server, read(case, "sglang").target, draft=False)[0] for case in CASES}


def capture(args: ServerArgs, target: nn.Module, exported: Exported) -> None:
    """The target gives the states that the draft's config asks for (spec_aux_hidden_state.py)."""
    config = ModelConfig.from_server_args(args, model_path=str(exported.directory), is_draft_model=True)
    block = getattr(config.hf_config, "eagle_config", None) or {}
    target.set_eagle3_layers_to_capture(block.get(IDS))


def share(target: nn.Module, draft: nn.Module) -> None:
    """The target's embedding for the draft, and its lm_head where config.json has no size (eagle_worker_v2.py)."""
    embedding, lm_head = target.get_embed_and_head()
    if draft.load_lm_head_from_target:
        draft.set_embed_and_head(embedding, lm_head)
    else:
        draft.set_embed(embedding)


def table_of(draft: nn.Module) -> Tensor:
    """The target's ids of its drafted tokens."""
    return torch.arange(draft.config.draft_vocab_size) if draft.hot_token_id is None else draft.hot_token_id


def draft_with(target: nn.Module, draft: nn.Module, exported: Exported) -> tuple[Tensor, dict[str, Tensor]]:
    """The captured states, and the logits of a draft on them, over the whole vocabulary."""
    ours, ids = exported.ours, table_of(draft)
    states = run(target, ours["ids"]).hidden_states[:-1]
    fused: list[Tensor] = []
    hook = draft.model.fc.register_forward_hook(lambda module, inputs, output: fused.append(output))
    run(draft, ours["ids"][1:], states)
    hook.remove()

    def step(tokens: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        made = run(draft, tokens, fed)
        return whole(made.next_token_logits, ids, len(ours["lm_head"])), made.hidden_states

    return states, drafted(step, ours, fused[0])


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_the_exported_tensor(case: str, server: ServerArgs):
    exported = read(case, "sglang")
    draft = load_draft(server, exported)[0]
    loaded = dict(draft.named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all()  # the target's takes its place
    assert_loaded(unpadded(draft, loaded), engine_names(exported.state))
    assert torch.equal(table_of(draft), exported.ours["d2t"])


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_draft_on_its_own_targets_states_has_our_logits(case: str, server: ServerArgs, targets: dict[str, nn.Module]):
    exported = read(case, "sglang")
    draft, target = load_draft(server, exported)[0], targets[case]
    capture(server, target, exported)
    share(target, draft)
    states, logits = draft_with(target, draft, exported)
    assert_close(f"SGLang EAGLE-3 {case}", exported.ours, states=states, **of_draft(logits, exported.ours))


# What it does not read: said, since another system may.
LOST = {"t2d-of-another-head", "q-bias", "input-norm", "ids-by-the-other-count", "embedding", "norm_before_residual"}


@pytest.mark.parametrize("defect", asked("sglang"))
@torch.inference_mode()
def test_a_defect_does_what_our_reader_predicts(defect: str, server: ServerArgs, targets: dict[str, nn.Module]):
    exported, predicted = broken(defect, "sglang")
    target = targets[DEFECTS[defect].case]
    if predicted.raises:
        with pytest.raises((ValueError, AssertionError, RuntimeError, AttributeError, TypeError)) as caught:
            share(target, load_draft(server, exported)[0])
        assert_quoted(predicted, str(caught.value))
        return
    if assert_not_built(predicted, lambda: load_draft(server, exported)):
        return
    draft, started = load_draft(server, exported)
    loaded, weights = dict(draft.named_parameters()), engine_names(predicted.weights)
    for name in ("model.embed_tokens.weight", *(["lm_head.weight"] if draft.load_lm_head_from_target else [])):
        loaded.pop(name, None)
        weights.pop(name, None)
    if loaded.get("lm_head.weight", torch.zeros(1)).isnan().all():  # the target's, if any
        del loaded["lm_head.weight"], weights["lm_head.weight"]
    settle(unpadded(draft, loaded), unpadded(draft, started), weights)
    capture(server, target, exported)
    share(target, draft)
    ids = table_of(draft)
    if len(ids.unique()) != len(ids) or ids.max() >= len(exported.ours["lm_head"]):
        assert any("adds each entry to its place and drafts" in text for text in predicted.errors)
        return
    logits = draft_with(target, draft, exported)[1]
    assert_drafts_as_predicted(predicted, logits, exported, lost=defect in LOST, unseen=defect in UNSEEN)
