"""EAGLE-3: its training-time test against real chains of drafting, and alignment, masks, means and validation against
loops over single tokens, in float64."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import drafts
from oracles.drafts import Linear
from oracles.heads import PlainEagle3
from torch import Tensor

from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.eagle3 import (
    Eagle3Config,
    Eagle3Head,
    Eagle3Settings,
    default_layers,
    layer_like,
)
from draftsmith.modules.drafters.vocabulary import draft_vocabulary
from draftsmith.modules.formats.base import Package
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling, captured_layers
from draftsmith.modules.types import FeatureBatch, InputError

H, V, PASSES = 12, 17, 3
LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=20, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=4,
    max_position=40, rope_scaling=RopeScaling("linear", 2.0),
)  # fmt: skip
D2T = torch.tensor([0, 1, 4, 5, 7, 9, 10, 13, 16])
LENGTHS = (9, 5, 7)


TARGET: Any = Linear(V, H)


def head_of(reduced: bool = True, window: int | None = None, num_layers: int = 1, **shape: bool) -> Eagle3Head:
    torch.manual_seed(2)
    layer = dataclasses.replace(layer_like(LLAMA), sliding_window=window, num_layers=num_layers)
    head = Eagle3Head(Eagle3Config(layer, (2, 4, 5), len(D2T) if reduced else V, **shape)).double()
    for weight in head.parameters():
        weight.data.normal_(std=0.4)
    head.cos, head.sin = head.cos.double(), head.sin.double()
    if reduced:
        head.use_draft_vocabulary(D2T)
    return head


def batch_of(packed: bool = False, num_states: int = 3) -> FeatureBatch:
    rng = torch.Generator().manual_seed(8)
    width = max(LENGTHS)
    ids = torch.randint(V, (3, width), generator=rng)
    features = torch.randn(3, width, (num_states + 1) * H, generator=rng, dtype=torch.float64)
    # The second sequence is all answer: packed, the last token of the first stands before it and must not draft it.
    mask = torch.arange(width) >= torch.tensor([3, 0, 2])[:, None]
    mask[0, 5] = False  # a second turn
    return drafts.batch_of(ids, features, mask, LENGTHS, packed)


def by_hand(head: Eagle3Head, batch: FeatureBatch, settings: Eagle3Settings) -> float:
    """Every sequence alone, every draft alone: sum over passes of weight * -sum p log q."""
    shift = {"input": 0, "previous": -1}[settings.token_mask]
    ttt_steps = [[0.0, 0] for _ in range(3)]  # weighted loss and tokens of each sequence
    for b, length in enumerate(LENGTHS):
        ids, features = batch.input_ids[b, :length], batch.features[b, :length]
        embeds = head.embedding(TARGET)(ids[1:])
        embeds = torch.cat([embeds, torch.zeros(PASSES, H, dtype=embeds.dtype)])[None]
        hidden = head.unroll(embeds, features[None, :, :-H], PASSES)
        for s in range(1, length):
            if not (0 <= s + shift < length and batch.loss_mask[b, s + shift]):
                continue
            ttt_steps[b][1] += 1
            p = TARGET.lm_head(features[s, -H:]).softmax(-1)
            known = int(p.argmax()) in D2T
            for j in range(PASSES):
                if s - 1 - j < 0 or (settings.unknown == "drop" and not known):
                    continue
                q = head.lm_head(head.norm(hidden[j][0, s - 1 - j])).softmax(-1)
                own = p[D2T] / p[D2T].sum()
                ttt_steps[b][0] += settings.ttt_step_decay**j * -(own * q.log()).sum().item()
    if settings.ttt_step_weights == "mean":
        share = sum(settings.ttt_step_decay**j for j in range(PASSES))
        ttt_steps = [[loss / share, tokens] for loss, tokens in ttt_steps]
    if settings.normalizer == "sequence":
        return sum(loss / tokens for loss, tokens in ttt_steps if tokens) / sum(tokens > 0 for _, tokens in ttt_steps)
    total = sum(loss for loss, _ in ttt_steps)
    return total / (
        sum(tokens for _, tokens in ttt_steps) if settings.normalizer == "tokens" else batch.input_ids.numel()
    )


DIALECTS = {
    "ours": {},
    "safeailab": {"token_mask": "previous", "normalizer": "padded", "ttt_step_weights": "sum"},
    "speculators": {"normalizer": "tokens", "ttt_step_decay": 1.0, "unknown": "keep", "ttt_step_weights": "sum"},
    "modelopt": {"normalizer": "tokens", "ttt_step_decay": 0.9, "unknown": "keep"},
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_the_loss_is_that_of_every_draft_alone(dialect: dict[str, Any], own: bool) -> None:
    """In validation, and in a step whose metrics are not logged; with the target's embedding or its own."""
    head, settings = head_of(own_embedding=own), Eagle3Settings(ttt_steps=PASSES, **dialect)
    wanted = pytest.approx(by_hand(head, batch_of(), settings), rel=1e-9)
    for step in (None, TrainStep(0, 1, LENGTHS, (0, 0, 0), logged=False)):
        output = head.loss(batch_of(), TARGET, settings, step)
        assert output.loss.item() == wanted
        assert output.sums.keys() == ({"loss"} if step else {"loss", "top1", "accepted", "known"})


@pytest.mark.parametrize(("num_layers", "window"), [(1, None), (1, 4), (2, 4), (3, None)])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_spans_of_a_batch_add_up_to_it(dialect: dict[str, Any], num_layers: int, window: int | None) -> None:
    """Loss, gradients, sums and counts: parts of one text, and whole texts together."""
    settings, batch = Eagle3Settings(ttt_steps=PASSES, **dialect), batch_of(packed=True)
    found = []
    for spans in ([None], [(0, 4), (4, 6), (6, 9), (9, 21)], [(0, 14), (14, 15), (15, 21)]):
        head = head_of(window=window, num_layers=num_layers, own_embedding=True)
        outputs = [head.loss(batch, TARGET, settings, TrainStep(0, 1, LENGTHS, (), span=span)) for span in spans]
        loss = torch.stack([output.loss for output in outputs]).sum()
        loss.backward()
        names = [(kind, name) for kind in ("sums", "counts") for name in outputs[0].sums]
        totals = [sum(getattr(output, kind)[name].double() for output in outputs) for kind, name in names]
        found.append([loss, *totals, *(p.grad for p in head.parameters() if p.grad is not None)])
    for whole, *others in zip(*found, strict=True):
        assert all((whole - other).abs().max() < 1e-9 for other in others)


def test_only_what_is_to_be_trained_gets_a_gradient() -> None:
    for trained in (False, True):
        head, settings = head_of(own_embedding=True), Eagle3Settings(ttt_steps=PASSES, train_lm_head=trained)
        head.freeze(settings)
        head.loss(batch_of(), TARGET, settings, None).loss.backward()
        missing = {name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()}
        assert missing == {"embed_tokens.weight"} | (set() if trained else {"lm_head.weight"})


@torch.no_grad()
def test_a_new_head_begins_with_the_targets_scaled_output() -> None:
    """Its own logits are not scaled, in any server: the target's factor goes into the norm before them."""
    head = Eagle3Head(Eagle3Config(layer_like(LLAMA), (2, 4, 5), len(D2T))).double()
    counts = torch.zeros(V, dtype=torch.long).index_fill_(0, D2T, 3)
    weights: Any = SimpleNamespace(
        token_counts=lambda: counts, end_ids=(), lm_head=lambda: TARGET.output, logit_scale=0.125
    )
    head.start(weights)
    hidden = torch.randn(4, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + head.config.llama.rms_eps).sqrt()
    torch.testing.assert_close(head.lm_head(head.norm(hidden)), 0.125 * normed @ TARGET.output[D2T].T)


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = torch.tensor([5, 0, 3, 3, 9, 0, 3])
    assert draft_vocabulary(counts, 3).tolist() == [0, 2, 4]  # of the three that occur 3 times the lowest
    assert draft_vocabulary(counts, 3, always=[5]).tolist() == [0, 4, 5]
    assert draft_vocabulary(counts, 7).tolist() == list(range(7))


@pytest.mark.parametrize(("asked", "layers"), [((), 6), ((1, 1, 2), 8), ((3, 2, 5), 8), ((1, 2, 9), 8)])
def test_layers_that_collapse_are_refused(asked: tuple[int, ...], layers: int) -> None:
    with pytest.raises(InputError, match=f"layers: found .*, expected distinct ones from 0 to {layers}"):
        captured_layers(asked, default_layers(layers), dataclasses.replace(LLAMA, num_layers=layers))


def test_a_draft_vocabulary_of_the_targets_size_is_whole() -> None:
    assert not Eagle3Head.new_config(Eagle3Settings(), LLAMA).reduced
    assert Eagle3Head.new_config(Eagle3Settings(draft_vocab=5), LLAMA).reduced
    config = Eagle3Head.new_config(Eagle3Settings(rope_theta=7.0), LLAMA)
    assert config.norm_before_fc and not config.norm_output and config.llama.rope_theta == 7.0
    for version, norms in {"3": (False,) * 3, "3-norm": (False, True, False), "3.1": (True, False, True)}.items():
        config = Eagle3Head.new_config(Eagle3Settings(version=version), LLAMA)
        assert (config.fc_norm, config.norm_before_fc, config.norm_output) == norms
    assert config.aux_layers == (2, 4, 5)


NUM_STEPS = 4
SHAPES = [
    {},
    {"window": 5},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"num_layers": 2, "norm_before_residual": True},
    {"num_layers": 3, "window": 4},
]
OWN = {"own_embedding": True}


@pytest.mark.parametrize(("shape", "reduced"), [*((shape, True) for shape in SHAPES), (OWN, False)], ids=str)
def test_decoding_computes_what_training_computed(shape: dict[str, Any], reduced: bool) -> None:
    """States and logits of drafts from a text, token by token."""
    head = head_of(reduced, **shape).requires_grad_(False)
    text, drafted, target = [3, 1, 4, 1, 5, 9], [2, 6, 5], TARGET
    features = torch.randn(len(text), 3 * H, dtype=torch.float64)
    branches: Any = BranchDrafter(head.net(target), len(drafted))
    branches.open(text, features)
    found = branches.states([len(text)], torch.tensor([drafted]))[0]
    embeds = head.embedding(target)([*text, *drafted])[None, 1:]
    ttt_steps = head.unroll(embeds, features[None, : len(text) - 1], len(drafted) + 1)
    for j, hidden in enumerate(ttt_steps):
        wanted = hidden[0, len(text) - 2]
        assert (found[j] - wanted).abs().max() < 1e-9
        logits = branches.lm_head(found[j])
        assert (logits[head.d2t] - head.lm_head(head.logits_input(wanted))).abs().max() < 1e-9
        unknown = sorted(set(range(V)) - set(head.d2t.tolist()))
        assert logits[unknown].eq(-torch.inf).all()


def chain(net: Eagle3Head, embeds: Tensor, states: Tensor, start: int, ttt_steps: int) -> list[Tensor]:
    """What a chain from row `start` reads and gives: true states up to there, its own ones from then on."""
    tensors = {f"mid{name}" if name.startswith("layer.") else name: own for name, own in net.named_parameters()}
    fields = {"norm_before_residual": net.config.norm_before_residual, "num_hidden_layers": net.config.llama.num_layers}
    plain = PlainEagle3(Package(fields, tensors), net.config.llama)
    read, given = list(net.read(states)[: start + 1]), []
    for j in range(ttt_steps):
        last = plain.layers(embeds[: start + 1 + j], torch.stack(read))[-1]
        given.append(plain.norm("norm", last) if net.config.norm_output else last)
        read.append(given[-1])
    return given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_is_a_real_chain(shape: dict[str, Any]) -> None:
    net, rows = head_of(**shape), 9
    embeds, states = torch.randn(2, rows + NUM_STEPS - 1, 12).double(), torch.randn(2, rows, 36).double()
    ttt_steps = net.unroll(embeds, states, NUM_STEPS)
    for b in range(2):
        for t in range(rows):
            for j, wanted in enumerate(chain(net, embeds[b], states[b], t, NUM_STEPS)):
                assert (ttt_steps[j][b, t] - wanted).abs().max() < 1e-10, (b, t, j)


def test_its_gradients_are_those_of_the_chains() -> None:
    net, rows = head_of(num_layers=2), 5
    embeds, states = torch.randn(1, rows + NUM_STEPS - 1, 12).double(), torch.randn(1, rows, 36).double()
    weights = [weight for part in (net.layer, net.layers, net.fc) for weight in part.parameters()]
    scale = torch.randn(NUM_STEPS, rows, 12).double()
    ours = sum((scale[j] * h[0]).sum() for j, h in enumerate(net.unroll(embeds, states, NUM_STEPS)))
    chains = [chain(net, embeds[0], states[0], t, NUM_STEPS) for t in range(rows)]
    theirs = sum((scale[j, t] * h).sum() for t, own in enumerate(chains) for j, h in enumerate(own))
    pairs = zip(torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True)
    assert max(((a - b).abs() / b.abs().clamp_min(1)).max() for a, b in pairs) < 1e-10
