"""Alignment of tokens, features, positions and masks of EAGLE, in training and in decoding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from table_models import PROMPT, H, TableLM, V

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead, shift
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import FeatureBatch, SamplingParams

LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=2,
    max_position=64, qkv_bias=True,
)  # fmt: skip


def make_head(seed: int = 0, num_layers: int = 1) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig.for_target(LLAMA, num_layers)).double()
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.7)
    return head


def batch_of(ids: list[int], prompt_length: int, features: torch.Tensor | None = None) -> FeatureBatch:
    length = len(ids)
    if features is None:
        features = torch.arange(length, dtype=torch.float64)[None, :, None].expand(1, length, H) / 10
    return FeatureBatch(
        input_ids=torch.tensor([ids]),
        features=features,
        loss_mask=torch.arange(length)[None] >= prompt_length,
        position_ids=torch.arange(length)[None],
    )


def test_the_shift_on_a_sequence_by_hand():
    #        t     0   1   2   3   4   5        prompt: x0 x1 x2, response: x3 x4 x5
    inputs = shift(batch_of([70, 71, 72, 73, 74, 75], prompt_length=3))
    assert inputs.next_ids.tolist() == [[71, 72, 73, 74]]  # row t reads x_{t+1} ...
    assert (inputs.features[0, :, 0] * 10).round().int().tolist() == [0, 1, 2, 3]  # ... and f_t,
    assert (inputs.target_features[0, :, 0] * 10).round().int().tolist() == [1, 2, 3, 4]  # is to give f_{t+1},
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3]]
    # it counts where x_{t+2} is a response token: x3 is the first, predicted by row 1.
    assert inputs.loss_mask.tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("lengths", [(5, 1, 2, 7, 3), (1, 1), None])
def test_tokens_are_counted_as_the_pairing_has_them(lengths):
    size = sum(lengths or (4, 4))
    mask = (torch.rand(1, size, generator=torch.Generator().manual_seed(0)) < 0.8) if lengths else torch.ones(2, 4) > 0
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    batch = FeatureBatch(ids, mask[..., None].float(), mask, torch.zeros_like(ids), None, lengths)
    assert EagleHead.loss_count(batch, None) == int(shift(batch).loss_mask.sum())


class Spy(FixedLengthStop):
    """Keeps the hidden state behind every drafted token."""

    def start_round(self):
        self.rounds = [*getattr(self, "rounds", []), []]

    def should_stop(self, view):
        self.rounds[-1].append((view.token, view.hidden))
        return super().should_stop(view)


@pytest.mark.parametrize(("prompt", "num_layers"), [(PROMPT, 1), ((1,), 2), ((3, 1, 0, 0, 2), 2)])
def test_the_drafter_computes_what_training_computed(prompt, num_layers):
    """Round after round, the first drafted token comes from the head's teacher-forced row on TRUE features, and the
    j-th from the head unrolled on its own ones: nothing of an old draft is left in the cache, no position is off."""
    lm, head, spy = TableLM(3), make_head(1, num_layers), Spy(3)
    done = generate_one(lm, ChainDrafter(head.net(lm), [spy], 64), prompt, SamplingParams(1.0), 24, TorchSource(0))
    emitted = 1
    accepted = set()
    for step, drafted in zip(done.trace.steps, spy.rounds, strict=False):
        ids = [*prompt, *done.tokens[:emitted]]
        features = lm.features(torch.tensor([ids[:-1]]))
        next_ids = torch.tensor([ids[1:]])
        for token, hidden in drafted:
            rows = head(lm.embed(next_ids), features)
            # float64 apart from the norms, which are float32: their rounding depends on nothing but the row.
            torch.testing.assert_close(hidden, rows[0, -1].detach(), atol=1e-6, rtol=0)
            features = torch.cat([features, rows[:, -1:].detach()], dim=1)
            next_ids = torch.cat([next_ids, torch.tensor([[token]])], dim=1)
        emitted += step.num_emitted
        accepted.add(step.num_accepted)
    assert len(accepted) > 1, "no drafts were accepted: the test does not see the catching up"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_unrolled_passes_are_the_steps_of_drafts_that_begin_at_every_row(num_layers):
    # Oracle: draft step by step with `forward`, from each row, appending the head's own output as the next feature.
    head, length, num_ttt_steps = make_head(num_layers=num_layers), 8, 4
    embeds, features = torch.randn(2, 2, length, H, dtype=torch.float64)
    ttt_steps = head.unroll(embeds, features, num_ttt_steps)
    torch.testing.assert_close(ttt_steps[0], head(embeds, features))
    for first in range(length - num_ttt_steps):
        read = features[:, : first + 1]
        for step in range(num_ttt_steps):
            hidden = head(embeds[:, : first + 1 + step], read)[:, -1]
            torch.testing.assert_close(ttt_steps[step][:, first + step], hidden, atol=1e-12, rtol=1e-12)
            read = torch.cat([read, hidden[:, None]], dim=1)


def test_documents_laid_end_to_end_are_read_as_each_alone():
    head, lengths, prompts, num_ttt_steps = make_head(num_layers=2), [7, 3, 2, 12, 9], [4, 1, 1, 6, 2], 3
    ids = [torch.arange(length) + 10 * number for number, length in enumerate(lengths)]
    features = [torch.randn(1, length, H, dtype=torch.float64) for length in lengths]
    table = torch.randn(100, H, dtype=torch.float64)
    alone = [
        shift(batch_of(own.tolist(), prompt, known))
        for own, prompt, known in zip(ids, prompts, features, strict=True)
        if len(own) > 2
    ]
    flat = shift(
        FeatureBatch(
            input_ids=torch.cat(ids)[None],
            features=torch.cat(features, dim=1),
            loss_mask=torch.cat([torch.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            lengths=tuple(lengths),
        )
    )
    assert flat.documents is not None and flat.documents.lengths == (5, 1, 10, 7)  # one of two tokens leaves nothing
    for name in ("next_ids", "features", "target_features", "loss_mask", "position_ids"):
        assert torch.equal(getattr(flat, name), torch.cat([getattr(one, name) for one in alone], dim=1)), name
    ttt_steps = head.unroll(table[flat.next_ids], flat.features, num_ttt_steps, flat.position_ids, flat.documents)
    for step, hidden in enumerate(ttt_steps):
        for one, rows in zip(alone, hidden.split(flat.documents.lengths, dim=1), strict=True):
            expected = head.unroll(table[one.next_ids], one.features, num_ttt_steps, one.position_ids)[step]
            # Rows before the step mean nothing.
            torch.testing.assert_close(rows[:, step:], expected[:, step:], atol=1e-12, rtol=1e-12)


def test_a_head_for_a_target_has_what_other_systems_hold_of_its_layers():
    scaling = RopeScaling("llama3", 8.0, original_max_position=64)
    switches = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "sliding_window": 8}
    target = dataclasses.replace(LLAMA, **switches, rope_theta=5e5, rope_scaling=scaling)
    head = EagleHead(EagleConfig.for_target(target))
    names = {name.removeprefix("layers.0.") for name, _ in head.named_parameters()}
    attention = {f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")}
    mlp = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == {"fc.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight"} | attention | mlp
    assert (head.config.llama.rope_theta, head.config.llama.rope_scaling) == (5e5, scaling)
    plain = EagleConfig.for_target(target, rope="plain").llama
    assert plain == dataclasses.replace(head.config.llama, rope_scaling=RopeScaling())
