"""A server that runs another model than the target is refused; one that rounds as vLLM does is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from states_server import StatesServer
from torch import Tensor
from worlds import tiny_llama_dir
from wrong_models import State, each, edited_model, low_rank

from draftsmith.data.engines import served_proof
from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_proof import Recorded, prove_served
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.store.datasets import open_dataset
from draftsmith.modules.llama_config import RopeScaling
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.targets.proof import Proof, Served
from draftsmith.modules.types import InputError, SamplingParams

LAYERS, EXPERTS_LAYERS = (2, 6, 9, 13), (2, 4, 7)
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}


Fault = Callable[[Tensor], Tensor]


def same(states: Tensor) -> Tensor:
    return states


class RoundingServer(StatesServer):
    """Rounds states from before the final norm and logits to bf16, as vLLM does. fault: changes states [T, L*H]."""

    fault: Fault = staticmethod(same)

    def states(self, row: list[int]) -> Tensor:
        return self.fault(super().states(row)).bfloat16()


@pytest.fixture(scope="module")
def target() -> LlamaLM:
    return load_lm("embedded:target")


@pytest.fixture(scope="module")
def recorded(target, tmp_path_factory) -> Recorded:
    """Prompts, and the target's greedy answers."""
    output = tmp_path_factory.mktemp("texts") / "prompts"
    rows = open_dataset(make_prompts(PromptsConfig("embedded:prompts", "embedded:target", output, limit=6)))
    return answered(target, [rows.item(i, 0)["input_ids"].tolist() for i in (5, 0, 2)], GREEDY)


def answered(lm: Any, prompts: list[list[int]], sampling: dict[str, float]) -> Recorded:
    params = SamplingParams(sampling["temperature"])
    answers = generate_all(lm, prompts, params, 200, 3, TorchSource)
    pairs = list(zip(prompts, answers, strict=True))
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in pairs]
    return Recorded([prompt + answer for prompt, answer in pairs], masks, sampling)


def prove(target: str, served: Any, recorded: Recorded, path: Path, fault: Fault = same, layers=LAYERS) -> Served:
    with RoundingServer(served, layers, path / "spool") as server, ServedStates(server.url, path / "owner") as source:
        server.fault = fault
        served = prove_served(source, load_outer(target, "bfloat16"), recorded, layers, "bf16").served
        assert Proof.from_json(json.loads(json.dumps(source.teacher))).served == served
    return served


def rolled(first: int) -> Fault:
    return lambda states: torch.cat([states[:first], states[first:].roll(1, 0)])


def first_columns(change: Callable[[Tensor], Tensor], width: int = 128) -> Fault:
    """Change the states of the first layer. change: of all states."""
    return lambda states: torch.cat([change(states)[:, :width], states[:, width:]], 1)


def noise(share: float) -> Callable[[str, Tensor], Tensor]:
    def change(name: str, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(weight.numel())
        return weight + share * weight.std() * torch.randn(weight.shape, generator=generator)

    return change


@dataclass(frozen=True)
class Case:
    """Changes that a server has made to the target, and KL(server || target) in nat. refused: words of the error; empty
    if it passes."""

    kl: float
    refused: str = ""
    edit: Callable[[State], Any] = lambda state: None
    settings: dict[str, Any] | None = None
    fault: Fault = same


MODEL = "a model with KL"
YARN = {"rope_scaling": RopeScaling("yarn", 4.0, original_max_position=256)}
CASES = {
    "the target": Case(0.0002),
    "low-rank fine-tune of 0.05": Case(0.0094, edit=each(low_rank(0.05), "proj")),
    "low-rank fine-tune of 0.1": Case(0.043, "layer 2 off by", each(low_rank(0.1), "proj")),
    "low-rank fine-tune of 0.2": Case(0.33, MODEL, each(low_rank(0.2), "proj")),
    "YaRN": Case(0.12, MODEL, settings=YARN),
    "rotary base x 2": Case(0.013, "layer 2 off by", settings={"rope_theta": 2e4}),
    "rotary base x 10": Case(0.34, MODEL, settings={"rope_theta": 1e5}),
    "other layers": Case(2.4, "tokens are likeliest at", each(noise(0.3), "proj")),
    "drift of the tied embedding 0.01": Case(0.00037, edit=each(noise(0.01), "embed_tokens", "lm_head")),
    "layer 6 as 2": Case(0.0002, "nearest to layer 6", fault=first_columns(lambda states: states[:, 128:])),
    "random states of layer 2": Case(0.0002, "stored states off by", fault=first_columns(torch.randn_like)),
    "layer 2 shifted from 200 on": Case(0.0002, "layer 2 off by", fault=first_columns(rolled(200))),
    "rows shifted from 128 on": Case(0.0002, "teacher: found", fault=rolled(128)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_server_of_another_model_is_refused(target, recorded, tmp_path, name) -> None:
    case = CASES[name]
    served = LlamaLM(edited_model(target, case.edit, torch.bfloat16, **(case.settings or {})), target.info)
    text = torch.tensor(recorded.rows[0])
    log_q, log_p = (lm.lm_head(lm.features(text[None])[0]).double().log_softmax(-1) for lm in (served, target))
    kl = (log_q.exp() * (log_q - log_p)).sum(-1).mean().item()
    # A server's logits are rounded too.
    assert kl == pytest.approx(case.kl, rel=0.1, abs=1e-4) and (kl < 0.05 or case.refused)
    if case.refused:
        with pytest.raises(InputError, match=case.refused) as error:
            prove("embedded:target", served, recorded, tmp_path, case.fault)
        assert "\n" not in str(error.value)
        return
    found = prove("embedded:target", served, recorded, tmp_path)
    assert found.kl == pytest.approx(kl, rel=0.3, abs=1e-3) and found.tokens == len(text) and found.first > 0.99
    assert found.layers == [2, 6, 9] and 0.005 < found.off < 0.1
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A small mixture of experts, whose logits follow from its layers."""
    settings = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "initializer_range": 0.1}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    more = {"vocab": 512, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_parameters": rope}
    family = {"family": "qwen3_moe", **settings, **more}
    directory = tiny_llama_dir(tmp_path_factory.mktemp("moe") / "small", layers=6, hidden=64, **family)
    return edited(directory, directory.parent / "larger", each(lambda _, weight: 10 * weight, "lm_head"))


def edited(directory: Path, path: Path, edit: Callable[[State], Any], **config: Any) -> Path:
    """Save a model with other weights or settings."""
    shutil.copytree(directory, path)
    state = load_file(path / "model.safetensors")
    edit(state)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **config}))
    return path


EXPERTS = {
    "the target": Case(0.0),
    "other layers": Case(0.0, MODEL, each(noise(2.0), "proj")),
    "two experts for four": Case(0.0, MODEL, settings={"num_experts_per_tok": 2}),
    "random states of layer 2": Case(0.0, "stored states off by", fault=first_columns(torch.randn_like, 64)),
    "layer 4 as 2": Case(0.0, "nearest to layer 4", fault=first_columns(lambda states: states[:, 64:], 64)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_so_is_one_of_a_family_that_only_transformers_computes(experts, tmp_path, name) -> None:
    case = EXPERTS[name]
    served = load_lm(str(edited(experts, tmp_path / "other", case.edit, **(case.settings or {}))), "bfloat16")
    row = torch.randint(3, 500, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    recorded = Recorded([row], [[True] * len(row)], None)
    if case.refused:
        with pytest.raises(InputError, match=case.refused):
            prove(str(experts), served, recorded, tmp_path, case.fault, EXPERTS_LAYERS)
        return
    found = prove(str(experts), served, recorded, tmp_path, layers=EXPERTS_LAYERS)
    assert found.kl < 0.01 and found.layers == [2, 4] and "none were within 512 tokens" in str(found)


def test_sampled_answers_are_as_likely_as_the_servers_own(target, recorded, tmp_path, monkeypatch) -> None:
    """If the files cannot be computed, the answers are compared alone."""

    def fail(*_: object) -> None:
        raise InputError("target", "a family that transformers lacks", "another one", "None.")

    monkeypatch.setattr(served_proof, "read_layerwise", fail)
    pairs = zip(recorded.rows, recorded.masks, strict=True)
    sampled = answered(target, [row[: mask.index(True)] for row, mask in pairs], {**GREEDY, "temperature": 0.7})
    right, wrong = (
        LlamaLM(edited_model(target, lambda state: None, torch.bfloat16, rope_theta=theta), target.info)
        for theta in (1e4, 1e6)
    )
    found = prove("embedded:target", right, sampled, tmp_path / "right")
    assert abs(found.excess) < 0.05 and found.perplexity < 1.5 and "a family that transformers lacks" in str(found)
    with pytest.raises(InputError, match="tokens are less likely by"):
        prove("embedded:target", wrong, sampled, tmp_path / "wrong")
