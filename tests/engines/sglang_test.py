"""Exported EAGLE-1 heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits.
Run by `make test-engines`."""

from __future__ import annotations

import pytest
import torch

from sglang_code import load, load_draft, run, start  # isort: skip (before SGLang)
from defects import EAGLE
from exported import (
    Exported,
    asked,
    assert_as_checked,
    assert_close,
    assert_loaded,
    broken,
    cases,
    fused,
    read,
    restore_unfilled,
)
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

CASES = cases("eagle", "sglang")
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return start(read("eagle", "llama", "sglang"), "EAGLE", tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def targets(server: ServerArgs) -> dict[str, nn.Module]:
    return {case: load(server, read("eagle", case, "sglang").target, draft=False)[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_an_export_is_loaded_whole_and_gives_our_logits(case: str, server: ServerArgs, targets: dict[str, nn.Module]):
    exported = read("eagle", case, "sglang")
    ours, target = exported.ours, targets[case]
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


def compute(server: ServerArgs, exported: Exported, target: nn.Module) -> Tensor:
    draft, started = load_draft(server, exported)
    restore_unfilled(draft, {name: t for name, t in started.items() if name not in TABLES})
    draft.set_embed_and_head(*target.get_embed_and_head())
    return run(draft, exported.ours["ids"][1:], exported.ours["features"]).next_token_logits


# The attention's biases that are announced and not in the file stay zero.
HARMLESS = {"attention_bias", "lm_head", "q-norm"}


@pytest.mark.parametrize("defect", asked("eagle", "sglang"))
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(
    defect: str, server: ServerArgs, targets: dict[str, nn.Module]
):
    exported, target = broken("eagle", defect, "sglang"), targets[EAGLE[defect].case]
    assert_as_checked(exported, lambda: compute(server, exported, target), harmless=defect in HARMLESS)
