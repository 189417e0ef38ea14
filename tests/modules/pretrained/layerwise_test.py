"""A target of any family gives transformers' logits and states with one of its layers in memory."""

from __future__ import annotations

import pytest
import torch
from tiny_configs import LAYERS, random_model, sample, tiny_config

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.layerwise import read_layerwise
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

# Fused experts, latent attention, softcaps and windows, recurrent layers, wrappers; norms with a bias, tied embeddings.
FAMILIES = ["gpt_oss", "deepseek_v3", "gemma2", "qwen3_next", "qwen3_vl_moe", "mistral3", "llama4", "phi", "bloom"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_states_are_those_of_the_whole_model(family, tmp_path):
    model = random_model(tiny_config(family))
    model.save_pretrained(tmp_path)
    text = sample(80, 3)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    states = dict[int, torch.Tensor]()
    logits = read_layerwise(Checkpoint(tmp_path), text, lambda number, state: states.update({number: state.clone()}))
    # The same operations in the same type.
    torch.testing.assert_close(logits, whole.logits[0], rtol=0, atol=1e-5 * whole.logits.std().item())
    assert [*states] == [*range(LAYERS + 1)]
    # transformers' own list ends behind the final norm.
    last = load_lm(str(tmp_path), loader="hf").features(torch.tensor([text]), aux_layers=(LAYERS,))[0]
    for number, state in states.items():
        expected = last if number == LAYERS else whole.hidden_states[number][0]
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-5 * expected.std().item())


def test_one_layer_is_in_memory(tmp_path, monkeypatch):
    random_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    target, alive = Checkpoint(tmp_path), list[int]()
    view = target.view

    def watched(name: str) -> torch.Tensor:
        tensor = view(name).clone()
        read[name] = tensor
        return tensor

    read = dict[str, torch.Tensor]()
    monkeypatch.setattr(target, "view", watched)

    def on_state(number: int, _: torch.Tensor) -> None:
        alive.append(len(read))
        read.clear()

    read_layerwise(target, sample(8, 3), on_state)
    # What surrounds the layers, and then the tensors of one layer after the other.
    assert alive[0] == 3 and len({*alive[1:]}) == 1 and alive[1] > 10


def test_layers_that_share_weights_are_one_line(tmp_path):
    random_model(tiny_config("zamba2")).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="which transformers does not run layer by layer") as error:
        read_layerwise(Checkpoint(tmp_path), sample(8, 3), lambda *_: None)
    assert "\n" not in str(error.value)
