"""Medusa's heads: their loss as the paper's formula has it, and an lm_head of their own beside the target's."""

from __future__ import annotations

import pytest
import torch
from table_methods import random_hydra_heads, random_medusa_heads
from table_models import H, TableLM, V

from draftsmith.eval.bench.runner import read_tree
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead, MedusaSettings
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.drafters.net import TreeDrafter
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import FeatureBatch, InputError, SamplingParams

OWN = pytest.mark.parametrize("own", [False, True], ids=["target", "own"])


def batch(rng: torch.Generator) -> FeatureBatch:
    shape = (2, 9)
    mask = torch.rand(shape, generator=rng) < 0.7
    features = torch.randn(*shape, H, generator=rng, dtype=torch.float64)
    ids = torch.randint(V, shape, generator=rng)
    return FeatureBatch(ids, features, mask, torch.arange(shape[1]).expand(shape))


@OWN
@pytest.mark.parametrize(("rows_at_once", "loss"), [(2, "hard"), (100, "hard"), (2, "soft")])
def test_the_loss_is_the_papers_formula_in_float64(monkeypatch, own: bool, rows_at_once: int, loss: str) -> None:
    """Section 2.2.1: sum_k lambda_k (-log p_k(y_{t+k+1})), p_k = softmax(W_k (h + SiLU(W h + b))), k from 1; soft, the
    mean of -log p_k by the target's distribution of that token."""
    monkeypatch.setattr("draftsmith.modules.losses.CHUNK_ELEMENTS", rows_at_once * V)
    target, head = TableLM(1), random_medusa_heads(3, own).requires_grad_(True)
    data, decay = batch(torch.Generator().manual_seed(0)), 0.7
    output = head.loss(data, target, MedusaSettings(head_decay=decay, loss=loss), None)
    terms, counted = [], 0
    for row in range(2):
        for t in range(9):
            for k in range(1, head.config.num_heads + 1):
                if t + k + 1 >= 9 or not data.loss_mask[row, t + k + 1]:
                    continue
                h, block = data.features[row, t], head.heads[k - 1][0].linear
                x = block.weight @ h + block.bias
                state = h + x / (1 + torch.exp(-x))
                logits = (head.lm_heads[k - 1].weight if own else target._lm_head) @ state
                log_p = logits - logits.exp().sum().log()
                entropy = -log_p[data.input_ids[row, t + k + 1]]
                if loss == "soft":
                    entropy = -((target._lm_head @ data.features[row, t + k]).softmax(-1) * log_p).sum()
                terms.append(decay ** (k - 1) * entropy)
                counted += k == 1
    wanted = torch.stack(terms).sum() / counted
    assert float((output.loss - wanted).detach()) == pytest.approx(0, abs=1e-12)  # sums of some dozen float64 terms
    weights = list(head.parameters())
    assert len(weights) == 3 * (2 + own)
    ours, theirs = torch.autograd.grad(output.loss, weights), torch.autograd.grad(wanted, weights)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


class Weights:
    """Of a target; nothing else is asked for."""

    def lm_head(self) -> torch.Tensor:
        return torch.arange(V * H, dtype=torch.float32).view(V, H)


def test_lm_heads_of_their_own_begin_as_the_targets() -> None:
    """So that a new head repeats the target's own choice, as one that reads the target's does."""
    head = MedusaHead(MedusaConfig(H, V, 32, num_heads=2, own_lm_head=True))
    head.start(Weights())
    assert [torch.equal(layer.weight, Weights().lm_head()) for layer in head.lm_heads] == [True, True]
    assert len({layer.weight.data_ptr() for layer in head.lm_heads}) == 2  # each its own


@OWN
def test_states_of_drafts_are_read_by_the_lm_head_of_their_level(own: bool) -> None:
    target, head = TableLM(1), random_medusa_heads(2, own)
    branches = BranchDrafter(head.net(target), 2)
    hidden, level = torch.randn(7, H, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0, 0])
    wanted = [(head.lm_heads[n].weight if own else target._lm_head) @ h for n, h in zip(level, hidden, strict=True)]
    assert torch.allclose(branches.lm_head(hidden, level), torch.stack(wanted))
    assert torch.allclose(branches.lm_head(hidden[3], 2), wanted[3])


def test_lm_heads_of_their_own_draft_in_fewer_bits() -> None:
    """The target's lm_head is then nobody's, and is not copied."""
    target = TableLM(1)
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(H, V, 32, own_lm_head=True))
    head.draft_in("int8", target)
    assert head.output is None and head.precision == "int8"
    hidden = torch.randn(4, H, dtype=torch.float64)
    found, exact = BranchDrafter(head.net(target), 1).lm_head(hidden), hidden @ head.lm_heads[0].weight.double().T
    assert not torch.equal(found, exact) and torch.allclose(found, exact, atol=0.05)  # 8 bits of 1 and less


def test_the_published_tree_is_shipped() -> None:
    """Its counts of nodes by depth, and its most children, as published."""
    tree = read_tree("medusa-63")
    assert [len(tree.level(depth)) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2] and len(tree.parents) == 63
    assert max(tree.ranks) == 9


@pytest.mark.parametrize("rows", [1, 3])
@OWN
def test_a_node_is_what_the_head_of_its_depth_ranks(own: bool, rows: int) -> None:
    """Whatever its parent is, and of the last token's state alone."""
    target, head = TableLM(1), random_medusa_heads(2, own)
    paths = [[0], [2], [0, 1], [2, 0], [2, 3], [2, 3, 1]]
    drafter = TreeDrafter(head.net(target), StaticTree.from_paths(paths), 32, rows)
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(rows, 3, H, generator=rng, dtype=torch.float64)
    for row in range(rows):
        drafter.begin(row, [1, 2, 0], features[row], 3)
    for row, tree in enumerate(drafter.propose([8] * rows, Sampler(SamplingParams(), [TorchSource(0)] * rows))):
        ranked = []
        for i, block in enumerate(head.heads):
            logits = (head.lm_heads[i].weight if own else target._lm_head) @ block(features[row, -1])
            ranked.append(logits.argsort(descending=True).tolist())
        wanted = [ranked[len(path) - 1][path[-1]] for path in sorted(paths, key=lambda path: (len(path), path))]
        assert list(tree.tokens) == wanted and tree.draft_calls == 1


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_chain_has_a_token_a_head_at_most(kind: str) -> None:
    heads = {"medusa": random_medusa_heads, "hydra": random_hydra_heads}[kind](1)
    models = Models(TableLM(1), heads={kind: heads}, capacity=32)
    with pytest.raises(InputError, match=r"k: found 4, expected a whole number, 3 or less"):
        parse_method(f"{kind}:k=4").build(models)
    assert [parse_method(f"{kind}{k}").policies(models, 1)[0].max_drafted for k in ("", ":k=2")] == [3, 2]
