"""MTP modules of every family: unrolled training and decoding against transformers' own layer over each whole draft."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.drafts import Linear
from oracles.native import MTP_FAMILIES, mtp_config
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from draftsmith.modules.drafters.mtp import LAYERS, MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.targets.native import native_layer
from draftsmith.modules.targets.shape import plain_shape
from draftsmith.modules.types import InputError

H, V, T, STEPS, CONTEXT = 64, 31, 9, 3, 48


TARGET = Linear(V, H, torch.float32)


def head_of(family: str) -> MtpHead:
    torch.manual_seed(0)
    head = MtpHead(mtp_config(family, H, V, CONTEXT))
    rng = torch.Generator().manual_seed(3)
    for weight in head.parameters():
        weight.data += 0.2 * torch.randn(weight.shape, generator=rng)
    return head


def by_transformers(head: MtpHead, embeds: Tensor, states: Tensor) -> list[Tensor]:
    """The state behind every token of one draft behind `states` [t, H], embeds [t + STEPS - 1, H]: whole texts again
    and again, with transformers' eager attention and its masks."""
    config = AutoConfig.for_model(**head.config.layer)
    model = AutoModel.from_config(config, attn_implementation="eager")
    model.layers[0].load_state_dict(head.layer.state_dict())
    model.norm.load_state_dict(head.norm.state_dict())
    own, states = [], states
    for _ in range(STEPS):
        pairs = torch.cat([head.enorm(embeds[: len(states)]), head.hnorm(states)], -1)
        # The whole model is one layer and the final norm.
        read = model(inputs_embeds=head.eh_proj(pairs)[None], use_cache=False).last_hidden_state[0]
        own.append(read[-1])
        states = torch.cat([states, read[-1:]])
    return own


@pytest.mark.parametrize("family", LAYERS)
@torch.no_grad()
def test_unrolled_rows_are_drafts_by_transformers(family: str) -> None:
    """Every row, in every pass; MiMo's window hides the first rows from the last."""
    head, rng = head_of(family), torch.Generator().manual_seed(1)
    states, ids = torch.randn(T, H, generator=rng), torch.randint(V, (T + STEPS - 1,), generator=rng)
    embeds = TARGET.embed(ids)
    passes = head.unroll(embeds[None], states[None], STEPS)
    for t in range(T):
        wanted = by_transformers(head, embeds[: t + STEPS], states[: t + 1])
        for found, one in zip(passes, wanted, strict=True):
            assert (found[0, t] - one).abs().max() < 1e-5 * one.abs().max()


# Rotary settings as Qwen3-Next, GLM-4.5 and DeepSeek-V3 were published, before transformers had `rope_parameters`.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
PUBLISHED = {
    "qwen3_next": {"rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.25, "head_dim": 16},
    "glm4_moe": {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5, "head_dim": 16},
    "deepseek_v3": {"rope_theta": 1e4, "rope_scaling": YARN, "qk_rope_head_dim": 8, **LATENT},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_module_rotates_as_its_target_by_published_spellings_too(family: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    raw = {**sizes, "model_type": family, **PUBLISHED[family]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    cos, sin = target.model.rotary_emb(torch.zeros(1, 128, 32), torch.arange(128)[None])
    native = native_layer(MtpHead.new_config(MtpSettings(), plain_shape(raw)).layer, 128)
    assert torch.equal(native.cos, cos[0]) and torch.equal(native.sin, sin[0])


@pytest.mark.parametrize("family", LAYERS)
@torch.no_grad()
def test_decoding_reads_what_training_reads(family: str) -> None:
    """Chains of STEPS tokens behind a text that is read in two parts."""
    head, rng = head_of(family), torch.Generator().manual_seed(1)
    states, tokens = torch.randn(T, H, generator=rng), torch.randint(V, (T + STEPS,), generator=rng).tolist()
    embeds, net = TARGET.embed(tokens[1:]), head.net(TARGET)
    net.allocate(CONTEXT, STEPS, static=False)
    net.begin()
    for first, last in ((0, 4), (4, T)):
        found = [net.start(tokens[: last + 1], states[first:last]).hidden]
        for depth in range(1, STEPS):
            found.append(net.expand(tokens[last + depth : last + depth + 1], None, depth).hidden)
        net.finish(0)
        wanted = head.unroll(embeds[None, : last + STEPS - 1], states[None, :last], STEPS)
        for ours, one in zip(found, wanted, strict=True):
            assert (ours - one[0, -1]).abs().max() < 1e-5 * one.abs().max()


def test_a_head_begins_as_the_module_that_the_target_ships() -> None:
    shipped, head = head_of("mimo_v2_flash").state_dict(), MtpHead(mtp_config("mimo_v2_flash", H, V, CONTEXT))
    weights: Any = SimpleNamespace(mtp=lambda: shipped)
    head.start(weights)
    assert all(torch.equal(weight, shipped[name]) for name, weight in head.state_dict().items())
    weights.mtp = dict
    head.start(weights)  # none is shipped


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("eh_proj.weight"), 'Missing key(s) in state_dict: "eh_proj.weight"'),
        (
            lambda state: state.update({"lm_head.weight": torch.zeros(V, H)}),
            'Unexpected key(s) in state_dict: "lm',
        ),
        (lambda state: state.update({"eh_proj.weight": torch.zeros(H, H)}), "size mismatch for eh_proj.weight"),
    ],
)
def test_a_shipped_module_that_does_not_fit_is_one_line(change, words) -> None:
    head = head_of("glm4_moe")
    state = dict(head.state_dict())
    change(state)
    weights: Any = SimpleNamespace(mtp=lambda: state)
    with pytest.raises(InputError) as error:
        head.start(weights)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_family_that_no_server_drafts_for_is_refused() -> None:
    raw = {**MTP_FAMILIES["glm4_moe"], "model_type": "granite", "hidden_size": H, "vocab_size": V}
    with pytest.raises(InputError, match=r"granite.*eagle3"):
        MtpHead.new_config(MtpSettings(), plain_shape({**raw, "num_hidden_layers": 2}))
    with pytest.raises(InputError, match=r"target: found llama, .*eagle3"):  # of the layers that other heads have
        MtpHead.new_config(MtpSettings(), Checkpoint("embedded:target").shape)
