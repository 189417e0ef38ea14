"""Medusa's and Hydra's heads: their losses as the papers' formulas have them, and nodes by their paths' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import drafts
from oracles.tables import H, TableLM, V, random_hydra_heads, random_medusa_heads
from torch import Tensor

from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.hydra import HydraHead
from draftsmith.modules.drafters.net import TreeDrafter
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import FeatureBatch, SamplingParams

LENGTHS = (9, 7)
HEADS = {
    "medusa": lambda seed: random_medusa_heads(seed, False),
    "medusa, own": lambda seed: random_medusa_heads(seed, True),
    "hydra": lambda seed: random_hydra_heads(seed, False),
    "hydra, own": lambda seed: random_hydra_heads(seed, True),
}
NUM_WEIGHTS = {"medusa": 3 * 2, "medusa, own": 3 * 3, "hydra": 3 * 4, "hydra, own": 3 * 6}
EACH = pytest.mark.parametrize("name", HEADS)


def batch(packed: bool = False) -> FeatureBatch:
    rng, shape = torch.Generator().manual_seed(0), (2, 9)
    ids = torch.randint(V, shape, generator=rng)
    features = torch.randn(*shape, H, generator=rng, dtype=torch.float64)
    return drafts.batch_of(ids, features, torch.rand(shape, generator=rng) < 0.7, LENGTHS, packed)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def logits_of(head: Any, target: TableLM, number: int, state: Tensor, tokens: list[int]) -> Tensor:
    """Medusa: W_k (h + SiLU(W h + b)), whatever the tokens are. Hydra, section 3: head i reads the state and the
    embeddings of the tokens between, by a layer with a linear way around it."""
    assert len(tokens) == number + 1
    net = head.heads[number]
    if isinstance(head, HydraHead):
        x = torch.cat([state, *(target._embedding[token] for token in tokens)])
        x = net.skip.weight @ x + net.skip.bias + silu(net.linear.weight @ x + net.linear.bias)
    else:
        x = state + silu(net.linear.weight @ state + net.linear.bias)
    if not head.config.own_lm_head:
        return target._lm_head @ x
    bias = head.lm_heads[number].bias
    return head.lm_heads[number].weight @ x + (0 if bias is None else bias)


@pytest.mark.parametrize(
    ("name", "loss", "packed"),
    [
        ("medusa", "hard", False), ("medusa", "soft", True), ("medusa, own", "hard", True),
        ("medusa, own", "soft", False), ("hydra", "soft", True), ("hydra, own", "hard", True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rows_at_once", [2, 100])
def test_the_loss_is_the_papers_formula_in_float64(monkeypatch, name, loss, packed, rows_at_once) -> None:
    """sum_i lambda^i CE(p_i(. | h_t, ..), x_{t+2+i}) (Medusa, section 2.2.1), or in place of that token the target's
    distribution of it."""
    monkeypatch.setattr("draftsmith.modules.losses.CHUNK_ELEMENTS", rows_at_once * V)
    target, head = TableLM(1), HEADS[name](3).requires_grad_(True)
    # Tables of random numbers this large saturate everything: smaller ones leave gradients to compare.
    for weight in head.parameters():
        weight.data *= 0.4
    data, decay = batch(), 0.7
    output = head.loss(batch(packed), target, head.Settings(head_decay=decay, loss=loss), None)
    terms, counted = [], 0
    for row, length in enumerate(LENGTHS):
        states, ids = data.features[row, :length], data.input_ids[row].tolist()
        for t in range(length):
            for i in range(head.config.num_heads):
                place = t + 2 + i
                if place >= length or not data.loss_mask[row, place]:
                    continue
                log_q = logits_of(head, target, i, states[t], ids[t + 1 : t + 2 + i]).log_softmax(-1)
                wanted = F.one_hot(torch.tensor(ids[place]), V).double()
                if loss == "soft":
                    wanted = (target._lm_head @ data.features[row, place - 1]).softmax(-1)
                terms.append(decay**i * -(wanted * log_q).sum())
                counted += i == 0
    wanted = torch.stack(terms).sum() / counted
    # Some dozen float64 terms.
    assert float((output.loss - wanted).detach()) == pytest.approx(0, abs=1e-12)
    weights = list(head.parameters())
    assert len(weights) == NUM_WEIGHTS[name]
    ours, theirs = torch.autograd.grad(output.loss, weights), torch.autograd.grad(wanted, weights)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(ours, theirs, strict=True))
    assert all(weight.any() for weight in ours)


@EACH
def test_a_node_is_what_the_head_of_its_depth_ranks_behind_the_tokens_of_its_path(name: str) -> None:
    target, head, rng = TableLM(1), HEADS[name](2), torch.Generator().manual_seed(0)
    paths = sorted([[0], [2], [0, 1], [2, 0], [2, 3], [2, 3, 1]], key=lambda path: (len(path), path))
    drafter = TreeDrafter(head.net(target), StaticTree.from_paths(paths), 32)
    for length in (4, 6):
        text = torch.randint(V, (length,), generator=rng).tolist()
        features = torch.randn(len(text) - 1, H, generator=rng, dtype=torch.float64)
        drafter.start(text[:-1], features, text[-1])
        tree = drafter.propose(8, Sampler(SamplingParams(), TorchSource(0)))
        state, found = features[-1], {(): text[-1:]}
        for path in paths:
            above = found[tuple(path[:-1])]
            ranked = logits_of(head, target, len(path) - 1, state, above).argsort(descending=True)
            found[tuple(path)] = [*above, int(ranked[path[-1]])]
        assert list(tree.tokens) == [found[tuple(path)][-1] for path in paths] and tree.draft_calls == (
            3 if "hydra" in name else 1
        )
