"""Exported EAGLE-1 heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward. Run by
`make test-engines`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from vllm_code import engine_config, load, one_process, share  # isort: skip (before vLLM)
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
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

CASES = cases("eagle", "vllm")


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("eagle", "llama", "vllm"), "eagle", tmp_path_factory.mktemp("store") / "store"):
        yield


@functools.cache
def load_target(case: str) -> nn.Module:
    return load(engine_config(read("eagle", case, "vllm"), "eagle"), draft=False)[0]


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_an_export_is_loaded_whole_and_gives_our_logits(case: str):
    exported = read("eagle", case, "vllm")
    ours, config = exported.ours, engine_config(exported, "eagle")
    target, draft = load_target(case), load(config, draft=True)[0]
    loaded = dict(draft.named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all()  # the target's takes its place
    assert_loaded(loaded, fused(exported.state))
    share(config, target, draft)
    with set_current_vllm_config(config):
        positions = torch.arange(len(ours["ids"]))
        features = target(ours["ids"], positions)[:-1]
        to_head, to_next_step = draft(ours["ids"][1:], positions[:-1], features)
        logits = draft.compute_logits(to_head)
    assert torch.equal(to_head, to_next_step)
    assert_close(f"vLLM {case}", ours, features=features, hidden=to_head, **{"logits.0": logits})


def compute(exported: Exported, case: str) -> Tensor:
    config, ours = engine_config(exported, "eagle"), exported.ours
    draft, started = load(config, draft=True)
    restore_unfilled(draft, {name: t for name, t in started.items() if "embed_tokens" not in name})
    share(config, load_target(case), draft)
    with set_current_vllm_config(config):
        hidden, _ = draft(ours["ids"][1:], torch.arange(len(ours["ids"]) - 1), ours["features"])
        return draft.compute_logits(hidden)


@pytest.mark.parametrize("defect", asked("eagle", "vllm"))
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(defect: str):
    exported = broken("eagle", defect, "vllm")
    assert_as_checked(exported, lambda: compute(exported, EAGLE[defect].case), harmless=False)
