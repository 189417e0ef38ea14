"""MTP modules exported into copies of their targets: transformers computes what we do, and a wrong copy is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import random_model, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from worlds import tiny_tokenizer

from draftsmith.eval.check.check import run as check
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

CONTEXT = 160
# Sums of grouped experts depend on where in memory weights lie.
EAGER = {"experts_implementation": "eager"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model type -> its target, a head, and the exported copy."""
    done: dict[str, tuple[Path, Path, Path]] = {}

    def make(model_type: str) -> tuple[Path, Path, Path]:
        if model_type not in done:
            root = tmp_path_factory.mktemp(model_type)
            tokenizer = tiny_tokenizer()
            sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
            model = random_model(tiny_config(model_type, **sizes, max_position_embeddings=CONTEXT))
            model.save_pretrained(root / "target")
            tokenizer.save_pretrained(root / "target")
            torch.manual_seed(1)
            head = MtpHead(MtpHead.new_config(MtpSettings(), Checkpoint(root / "target").shape))
            for weight in head.parameters():
                weight.data += 0.2 * torch.randn_like(weight)
            identity = load_lm(str(root / "target")).info.identity
            save_head(root / "head", head, {"target": identity, "config": {"target": str(root / "target")}}, "")
            assert export(ExportConfig(format="mtp", head=root / "head", output=root / "copy")) == 0
            done[model_type] = root / "target", root / "head", root / "copy"
        return done[model_type]

    return make


def checked(made: tuple[Path, Path, Path], format: Any = "auto") -> int:
    target, head, copy = made
    return check(CheckConfig(directory=copy, format=format, target=str(target), head=head))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "mimo_v2_flash"])
def test_a_copy_holds_the_head(made, model_type, capsys):
    assert checked(made(model_type)) == 0
    assert "nothing differs" in capsys.readouterr().out
    card = (made(model_type)[2] / "README.md").read_text()
    assert """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""" in card
    # The copy is a target, and its own card is no longer the target's.
    assert not (made(model_type)[2] / "README.md").is_symlink()


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_transformers_drafts_from_a_copy_as_we_do(made, model_type, monkeypatch):
    target, directory, copy = made(model_type)
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **EAGER)
    # Its pattern has the layers' numbers of the released models.
    monkeypatch.setattr(type(plain), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\..*"])
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, **EAGER)
    theirs = MtpModel.from_pretrained(model)
    head: Any = load_head(directory)
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(4))
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    embeds, places = model.model.embed_tokens(ids), torch.arange(23)[None]
    ours = head.unroll(embeds[:, 1:], states, 1, places)[0]  # [1, T, H]
    found = theirs.forward_layer(0, states, places + 1, None, input_ids=ids[:, 1:])
    largest = (found - ours).abs().max() / ours.abs().max()
    print(f"\n{model_type}: {largest:.1e} of the largest state")
    assert largest < 1e-5
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def swapped(tensor: Tensor) -> Tensor:
    one, other = tensor.chunk(2, 1)
    return torch.cat([other, one], 1)


def test_a_copy_of_another_module_is_found(made, capsys):
    copy = made("qwen3_5_text")[2]
    sound = load_file(copy / "mtp.safetensors")
    save_file({**sound, "mtp.fc.weight": swapped(sound["mtp.fc.weight"])}, copy / "mtp.safetensors")
    try:
        assert checked(made("qwen3_5_text"), "mtp") == 1
        assert "eh_proj.weight" in capsys.readouterr().out
    finally:
        save_file(sound, copy / "mtp.safetensors")


def test_a_head_of_another_target_is_refused(made, tmp_path):
    target, head, _ = made("qwen3_5_text")
    config = json.loads((target / "config.json").read_text())
    assert "mtp_num_hidden_layers" not in config
    with pytest.raises(InputError, match="trained for another model"):
        export(ExportConfig(format="mtp", head=head, output=tmp_path / "out", target=str(made("qwen3_5_moe_text")[0])))
