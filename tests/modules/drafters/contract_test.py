"""What every head must do: a finite loss, gradients everywhere, an exact round trip, lossless decoding.

Learned drafters are those of the registry, which is the folder: a new one is tested here without being named. Its shape
is the one that its settings give for LLAMA; one that this leaves untried in part may be given in SHAPES.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, get_type_hints

import pytest
import torch
from oracles import drafts
from oracles.drafts import Given, Linear, Spy
from oracles.tables import H, TableLM, V, captured, decoded_distribution, target_distribution, total_variation
from torch import Tensor, nn

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.loop import DecodeOptions, Round, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters import branches, head_class, learned
from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config, layers_like
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.drafters.eagle3 import Eagle3Config, layer_like
from draftsmith.modules.drafters.medusa import MedusaConfig
from draftsmith.modules.drafters.method import CostModel, Models
from draftsmith.modules.drafters.methods import DynamicTreeMethod, methods_of
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.drafters.vocabulary import VocabularyHead
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.pretrained.heads import class_of, head_kinds, kind_at, load_head, save_head
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets.shape import plain_shape
from draftsmith.modules.types import FeatureBatch, LossOutput, SamplingParams
from draftsmith.train.config import TrainConfig, TrainDrafterConfig, drafter_config

CAPACITY, LENGTHS, LAYERS = 32, (7, 5), 4
LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=2,
    max_position=CAPACITY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
    rope_scaling=RopeScaling("llama3", 4.0, original_max_position=16),
)  # fmt: skip
# MiMo-V2: a window, sinks, and values narrower than keys.
NARROW_VALUES = plain_shape(
    {
        "model_type": "mimo_v2_flash", "vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "v_head_dim": 2, "intermediate_size": 8,
        "max_position_embeddings": CAPACITY, "sliding_window": CAPACITY, "partial_rotary_factor": 0.5,
    }
)  # fmt: skip
SHAPES: dict[str, Any] = {
    "dflash": BlockConfig(layers_like(LLAMA, 2), (1, 3), 8, V - 1, "fill-in"),
    "dflash2": DFlash2Config(layers_like(LLAMA, 2), (1, 3), 8, V - 1, "fill-in", selector_top_k=3, conv_group=3),
    "dspark": BlockConfig(
        layers_like(LLAMA, 2),
        (1, 2, 3),
        7,
        V - 1,
        markov_rank=2,
        markov_type="rnn",
        confidence=True,
        draft_vocab_size=V - 1,
    ),
    "eagle": EagleConfig(LLAMA, fc_bias=True),
    "medusa": MedusaConfig(H, V, CAPACITY, own_lm_head=True),
    "hydra": MedusaConfig(H, V, CAPACITY, num_heads=4, own_lm_head=True),
    "eagle3": Eagle3Config(
        dataclasses.replace(layer_like(LLAMA), num_layers=2),
        (1, 2, 3),
        V - 1,
        True,
        norm_output=True,
        own_embedding=True,
    ),
    "mtp": MtpHead.new_config(MtpSettings(), NARROW_VALUES),
}
SAMPLING = SamplingParams(temperature=0.9, top_k=2)


def shape_of(kind: str) -> Any:
    drafter = head_class(kind)
    return SHAPES.get(kind) or drafter.new_config(drafter.Settings(), LLAMA)


def make(kind: str) -> Any:
    return AcceptanceHead(AcceptanceHeadConfig(H)) if kind == AcceptanceHead.kind else head_class(kind)(shape_of(kind))


def batch_of(head: DraftHead, seed: int, packed: bool = False) -> FeatureBatch:
    """Two texts of LENGTHS."""
    rng = torch.Generator().manual_seed(seed)
    count, width = len(LENGTHS), max(LENGTHS)
    states = H * max(1, len(head.loss_layers(head.config, LAYERS)))
    ids = torch.randint(V, (count, width), generator=rng)
    features = torch.randn(count, width, states, generator=rng)
    mask = (torch.rand(count, width, generator=rng) < 0.7) | (torch.arange(width) == 4)
    return drafts.batch_of(ids, features, mask, LENGTHS, packed)


def loss_of(head: Any, seed: int = 0) -> LossOutput:
    if isinstance(head, DraftHead):
        step = TrainStep(0, 10, LENGTHS, seeds=(1, 2))
        return head.loss(batch_of(head, seed), Linear(V, H, torch.float32), head.Settings(), step)
    rng = torch.Generator().manual_seed(seed)
    hidden, prob = torch.randn(2, 7, H, generator=rng), torch.rand(2, 7, generator=rng)
    return acceptance_loss(head(hidden), prob)


def random_head(kind: str) -> Any:
    """Make a head that is random everywhere: what a new one has of zeros would hide mistakes."""
    torch.manual_seed(0)
    head = make(kind)
    for weight in head.parameters():
        weight.data.normal_(std=0.5)
    if isinstance(head, VocabularyHead) and head.tokens is not None:
        head.use_draft_vocabulary(torch.arange(1, V))
    return head


@pytest.fixture(params=sorted({*head_kinds(), *learned()}))
def head(request) -> nn.Module:
    return random_head(request.param)


@pytest.fixture(params=sorted(learned()))
def drafter(request) -> DraftHead:
    return random_head(request.param)


def test_the_loss_is_finite_and_every_trainable_weight_gets_a_gradient(head):
    output = loss_of(head)
    assert torch.isfinite(output.loss) and output.loss > 0
    assert output.sums and output.sums.keys() == output.counts.keys()
    assert not any(value.requires_grad for value in output.sums.values())
    output.loss.backward()
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    assert trained
    for name, weight in trained.items():
        assert weight.grad is not None and torch.isfinite(weight.grad).all(), name
        assert weight.grad.any(), name


# A draft model is saved as a transformers directory: tests/train/prepare_test.py.
@pytest.mark.parametrize("head", head_kinds(), indirect=True)
def test_saving_and_loading_is_exact(head, tmp_path):
    directory = save_head(tmp_path / "head", head, {}, "# A head\n")
    loaded = load_head(directory)
    assert loaded.config == head.config and kind_at(directory) == head.kind
    ours, theirs = head.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [loss_of(h, 1).loss for h in (head, loaded)]
    assert torch.equal(*losses)


# The methods of a draft model take any language model: tests/modules/decoding/exactness_test.py.
@pytest.mark.parametrize("drafter", [kind for kind in learned() if not head_class(kind).saved_as_model], indirect=True)
def test_each_of_its_methods_is_lossless(drafter):
    """With the settings that a user leaves out; dynamic trees have more than this vocabulary (`table_methods`)."""
    target, shape = TableLM(1), StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    heads, times = {drafter.kind: drafter.double()}, CostModel()
    times.step_cost = lambda *_: 0.1
    models = Models(target, heads=heads, capacity=CAPACITY, trees={"eagle-1": shape}, times=times)
    own = methods_of(drafter.kind).values()
    methods = [method for method in own if not isinstance(method, DynamicTreeMethod)]
    for method in methods:
        found = decoded_distribution(
            target, lambda method=method: method.build(models), SAMPLING, length=3, max_new_tokens=5
        )
        assert total_variation(found, target_distribution(target, SAMPLING, 3)) < 1e-10, method
    assert methods


# A head without a tree of ranks has no such setting.
STATIC = [kind for kind in learned() if "static" in head_class(kind).drafts]


@pytest.mark.parametrize("drafter", STATIC, indirect=True)
@pytest.mark.parametrize("drawn", [False, True])
def test_its_static_tree_is_drawn_where_it_is_asked_for(drafter, drawn):
    target, shape, rounds = TableLM(1), StaticTree.from_paths([[0], [1], [0, 0]]), list[Round]()
    models = Models(target, heads={drafter.kind: drafter.double()}, capacity=CAPACITY, trees={"eagle-1": shape})
    method = dataclasses.replace(methods_of(drafter.kind)[f"{drafter.kind}-static"], drawn=drawn)
    made = method.build(models)
    generate_one(target, made, [2, 0], SamplingParams(1.0), 9, TorchSource(0), (), DecodeOptions(rounds.append))
    trees = [done.tree for done in rounds if done.tree is not None and done.tree.tokens]
    assert trees and all((tree.drawn is not None) == drawn for tree in trees)


def test_the_loss_is_a_mean_over_the_tokens_that_count_however_they_are_laid(drafter):
    padded, packed = (batch_of(drafter, 3, packed) for packed in (False, True))
    settings, target = drafter.Settings(), Linear(V, H, torch.float32)
    output, flat = (drafter.loss(batch, target, settings, None) for batch in (padded, packed))
    counted = drafter.loss_count(padded, settings)
    assert counted == drafter.loss_count(packed, settings) == int(output.counts["loss"]) > 0
    assert drafter.logit_rows(padded, settings) == drafter.logit_rows(packed, settings) > 0
    assert output.loss.item() == pytest.approx(float(output.sums["loss"]) / counted, rel=1e-5)
    assert flat.loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    without = dataclasses.replace(padded, features=None)  # the target has not read them yet
    assert drafter.loss_count(without, settings) == counted


# A field that may be FILE.py:FUNCTION; others choose between losses.
OWN_LOSS = [kind for kind in learned() if "str" in str(get_type_hints(head_class(kind).Settings).get("loss"))]


@pytest.mark.parametrize("drafter", OWN_LOSS, indirect=True)
def test_a_loss_of_the_users_own_is_what_it_learns(drafter):
    seen = list[tuple[torch.Size, torch.Size]]()

    def squares(logits: Tensor, p: Tensor) -> Tensor:
        seen.append((logits.shape, p.shape))
        return (logits.softmax(-1) - p).square().sum(-1)

    settings, batch = drafter.Settings(), batch_of(drafter, 3)
    for own in (settings, dataclasses.replace(settings, loss=squares)):
        drafter.zero_grad()
        output = drafter.loss(batch, Linear(V, H, torch.float32), own, None)
        output.loss.backward()
        seen.append((output.loss, next(weight.grad for weight in drafter.parameters() if weight.grad is not None)))
    (loss, grad), *called, (other, own_grad) = seen
    assert called and all(logits == p for logits, p in called)
    assert loss != other and not torch.equal(grad, own_grad) and own_grad.isfinite().all()


def test_what_is_behind_a_text_or_in_the_other_one_does_not_change_its_loss(drafter):
    batch, settings, target = batch_of(drafter, 3), drafter.Settings(), Linear(V, H, torch.float32)
    features = batch.features.clone()
    features[1, LENGTHS[1] :] = 9.0
    ids = batch.input_ids.clone()
    ids[1, LENGTHS[1] :] = V - 1
    other = dataclasses.replace(batch, features=features, input_ids=ids)
    losses = [drafter.loss(data, target, settings, None).loss for data in (batch, other)]
    assert torch.equal(*losses)


def test_validation_reports_the_loss_and_what_picks_the_best_head(drafter):
    batch, settings, target = batch_of(drafter, 3), drafter.Settings(), Linear(V, H, torch.float32)
    with torch.no_grad():
        found, again = (drafter.loss(batch, target, settings, None) for _ in range(2))
    assert {"loss", drafter.monitor} <= found.sums.keys() == found.counts.keys()
    assert all(torch.equal(value, again.sums[name]) for name, value in found.sums.items())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, 3)], ids=str)
def test_its_branches_draft_what_its_chains_draft(drafter, params, monkeypatch):
    """From several places of a text, two side by side, greedily and drawn, by the same logits."""
    monkeypatch.setattr(branches, "GROUP_TOKENS", 6)
    target, text, drafter = TableLM(1), [2, 0, 1, 3, 0, 1, 2], drafter.double()
    features = captured(
        torch.stack([target.row(tuple(text[: i + 1]))[1] for i in range(len(text))]), drafter.aux_layers
    )
    branched, starts = BranchDrafter(drafter.net(target), 3), [2, 4, 5, len(text)]
    branched.open(text[::-1], features)  # leaves nothing behind
    branched.open(text, features)
    uniforms = torch.rand(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drafted = branched.draft(starts, 3, params, uniforms)
    for number, start in enumerate(starts):
        spy = Spy(3)
        chain = ChainDrafter(drafter.net(target), spy, CAPACITY)
        chain.start(text[: start - 1], features[: start - 1], text[start - 1])
        tree = chain.propose(3, Sampler(params, Given(uniforms[number].tolist())))
        assert drafted.tokens[number].tolist() == list(tree.tokens)
        logits = branched.lm_head(drafted.hidden[number])
        # Rotations are in float32.
        torch.testing.assert_close(logits, torch.stack([logits for _, _, logits in spy.rounds[0]]), rtol=0, atol=1e-5)
    assert torch.allclose(branched.states(starts, drafted.tokens)[:, :3], drafted.hidden)


def test_policies_are_shown_the_result_of_every_round_but_the_last(drafter):
    target, stop = TableLM(1), Spy(2)
    chain = ChainDrafter(drafter.double().net(target), stop, 64)
    steps = generate_one(target, chain, [2, 0], SamplingParams(1.0), 20, TorchSource(0), ()).trace.steps
    assert stop.results == [(step.num_drafted, step.num_accepted) for step in steps[:-1]]
    assert any(accepted for _, accepted in stop.results)


@pytest.mark.parametrize(("own", "theirs"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_it_drafts_in_the_targets_type_whatever_its_own_is(drafter, own, theirs):
    target, text, drafter = TableLM(1, dtype=theirs), [2, 0, 1, 3, 0, 1], drafter.to(own)
    features = captured(
        torch.stack([target.row(tuple(text[: i + 1]))[1] for i in range(len(text))]), drafter.aux_layers
    )
    shape = StaticTree.from_paths([[0], [1], [0, 0]])
    drafted = []
    for head in (drafter, copy.deepcopy(drafter).to(theirs)):
        branched = BranchDrafter(head.net(target), 3)
        branched.open(text, features)
        found = [branched.draft([len(text)], 3).tokens.tolist()]
        drafters = [ChainDrafter(head.net(target), FixedLengthStop(3), CAPACITY)]
        if head.drafts:  # a draft model has chains only
            drafters.append(TreeDrafter(head.net(target), shape, CAPACITY))
        for each in drafters:
            done = generate_one(target, each, text, SAMPLING, 8, TorchSource(0), ())
            found.append((done.tokens, done.trace.num_draft_tokens))
            assert done.trace.num_draft_tokens > 0
        drafted.append(found)
    assert drafted[0] == drafted[1] and {weight.dtype for weight in drafter.parameters()} == {own}


def test_its_copy_for_decoding_holds_no_weight_twice(drafter):
    """A head may be large, and tau is measured while it is trained."""
    weight = next(drafter.parameters())
    own = {tensor.data_ptr() for tensor in drafter.parameters()}
    same = drafter.like(TableLM(1, dtype=weight.dtype))
    assert {tensor.data_ptr() for tensor in same.parameters()} == own
    other = drafter.like(TableLM(1, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in other.parameters()} == {torch.bfloat16} and weight.dtype != torch.bfloat16


@pytest.mark.parametrize("kind", sorted(learned()))
def test_its_training_asks_for_its_settings_on_one_flat_page(kind, tmp_path):
    drafter, config = head_class(kind), drafter_config(kind)
    assert drafter.kind == kind and class_of(kind) is drafter and learned()[kind]
    made = config(data=tmp_path, output=tmp_path, target="t")
    assert isinstance(made, (drafter.Settings, TrainDrafterConfig, TrainConfig)) and made.drafter is drafter
    assert {name: getattr(made, name) for name in drafter.Settings.defaults} == drafter.Settings.defaults
    own = {field.name for field in dataclasses.fields(drafter.Settings)}
    common = {field.name for field in dataclasses.fields(TrainDrafterConfig)}
    assert own & common <= {"init"}, "a setting of its own hides one of every training"
