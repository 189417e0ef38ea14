"""Exported EAGLE-1 and EAGLE-3 heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward
and logits, the target's layers it captures. Run by `make test-engines`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_code import load, load_draft, run, start  # isort: skip (before SGLang)
from defects import DEFECTS, IDS
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
    whole,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models import llama_eagle3
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

KINDS = ("eagle", "eagle3")
CASES = [(kind, case) for kind in KINDS for case in cases(kind, "sglang")]
BROKEN = [(kind, defect) for kind in KINDS for defect in asked(kind, "sglang")]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return start(read("eagle3", "whole", "sglang"), "EAGLE3", tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def targets(server: ServerArgs) -> dict[tuple[str, str], nn.Module]:
    return {own: load(server, read(*own, "sglang").target, draft=False)[0] for own in CASES}


def table_of(draft: nn.Module) -> Tensor:
    """Return the target's ids of its drafted tokens."""
    return torch.arange(draft.config.draft_vocab_size) if draft.hot_token_id is None else draft.hot_token_id


def draft_on(args: ServerArgs, target: nn.Module, draft: nn.Module, exported: Exported) -> tuple[Tensor, list[Tensor]]:
    """Return the captured states, and the logits of a draft on them."""
    # The target gives the states that the draft's config asks for (spec_aux_hidden_state.py).
    config = ModelConfig.from_server_args(args, model_path=str(exported.directory), is_draft_model=True)
    block = getattr(config.hf_config, "eagle_config", None) or {}
    target.set_eagle3_layers_to_capture(block.get(IDS))
    # The target's embedding for the draft, and its lm_head if config.json has no size (eagle_worker_v2.py).
    embedding, lm_head = target.get_embed_and_head()
    if draft.load_lm_head_from_target:
        draft.set_embed_and_head(embedding, lm_head)
    else:
        draft.set_embed(embedding)
    ours, ids = exported.ours, table_of(draft)
    states = run(target, ours["ids"]).hidden_states[:-1]
    fused_states: list[Tensor] = []
    hook = draft.model.fc.register_forward_hook(lambda module, inputs, output: fused_states.append(output))
    run(draft, ours["ids"][1:], states)
    hook.remove()

    def step(tokens: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        made = run(draft, tokens, fed)
        return whole(made.next_token_logits, ids, len(ours["lm_head"])), made.hidden_states

    return states, drafted(step, ours, fused_states[0])


@pytest.mark.parametrize("case", cases("eagle", "sglang"))
@torch.inference_mode()
def test_an_eagle_head_is_loaded_whole_and_gives_our_logits(
    case: str, server: ServerArgs, targets: dict[tuple[str, str], nn.Module]
):
    exported = read("eagle", case, "sglang")
    ours, target = exported.ours, targets["eagle", case]
    draft, _ = load_draft(server, exported)
    loaded = dict(draft.named_parameters())
    for name in TABLES:  # the target's take their places
        assert loaded.pop(name).isnan().all()
    expected = fused(exported.state)
    biases = {name for name in loaded if name.endswith(".bias")} - expected.keys()
    assert "model.fc.bias" in biases
    assert_loaded(loaded, expected | {name: torch.zeros_like(loaded[name]) for name in biases})
    draft.set_embed_and_head(*target.get_embed_and_head())
    features = run(target, ours["ids"]).hidden_states[:-1]
    made = run(draft, ours["ids"][1:], features)
    parts = {"features": features, "hidden": made.hidden_states, "logits.0": made.next_token_logits}
    assert_close(f"SGLang {case}", ours, **parts)


@pytest.mark.parametrize("case", cases("eagle3", "sglang"))
@torch.inference_mode()
def test_an_eagle3_head_is_loaded_whole_and_gives_our_logits(
    case: str, server: ServerArgs, targets: dict[tuple[str, str], nn.Module], monkeypatch: pytest.MonkeyPatch
):
    exported = read("eagle3", case, "sglang")
    # The flag of the printed command, which it counts in tokens before the one that attends.
    window = json.loads((exported.directory / "config.json").read_text()).get("sliding_window")
    flag = SimpleNamespace(speculative_draft_window_size=window and window - 1)
    monkeypatch.setattr(llama_eagle3, "get_spec", lambda: flag)
    draft = load_draft(server, exported)[0]
    loaded = dict(draft.named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all()  # the target's takes its place
    assert_loaded(unpadded(draft, loaded), both_norms(fused(exported.state)))
    assert torch.equal(table_of(draft), exported.ours["d2t"])
    states, logits = draft_on(server, targets["eagle3", case], draft, exported)
    assert_close(f"SGLang EAGLE-3 {case}", exported.ours, states=states)
    assert_drafts(f"SGLang EAGLE-3 {case}", exported.ours, logits)


# What our check reports and it ignores: other heads elsewhere. Biases that are announced and not in the file stay zero.
HARMLESS = {"eagle": {"attention_bias", "lm_head", "q-norm"}}
HARMLESS["eagle3"] = {"norm_before_residual", "ids-by-the-other-count", "a-window"}


@pytest.mark.parametrize(("kind", "defect"), BROKEN)
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(
    kind: str, defect: str, server: ServerArgs, targets: dict[tuple[str, str], nn.Module]
):
    exported, target = broken(kind, defect, "sglang"), targets[kind, DEFECTS[kind][defect].case]

    def compute() -> Tensor:
        draft, started = load_draft(server, exported)
        restore_unfilled(draft, {name: t for name, t in started.items() if not name.endswith(TABLES)})
        if kind == "eagle3":
            return torch.cat(draft_on(server, target, draft, exported)[1])
        draft.set_embed_and_head(*target.get_embed_and_head())
        return run(draft, exported.ours["ids"][1:], exported.ours["features"]).next_token_logits

    assert_as_checked(exported, compute, harmless=defect in HARMLESS[kind])
