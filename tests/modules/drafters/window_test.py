"""Decoding with a window: caches that let tokens go draft what the head computes over the whole text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from worlds import tiny_llama_dir

from draftsmith.modules.decoding.loop import DecodeOptions, Generation, Round, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.net import BlockConfig, layers_like
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.eagle3 import Eagle3Config, layer_like
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

# A window whose cache, two of them and a draft, is no multiple of what slots are padded to: tokens that stand in the
# padding are lost.
WINDOW, SLOTS, VOCAB = 7, 4, 300
# Of the first nodes one is expanded three times over; ranks among a node's best tokens.
PATHS = [[0], [1], [0, 0], [0, 1], [0, 0, 1]]
PROMPTS = [[5, 9, 30], list(range(40, 61)), [8] * 7]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request, tmp_path_factory) -> LlamaLM:
    lm: Any = load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("target"), layers=8, vocab=VOCAB)))
    return LlamaLM(lm.model.double().to(request.param), lm.info)


BLOCKS = {"dspark": {}, "bidirectional": {"causal": False}, "mixed": {"full_layers": (0,)}}


@pytest.fixture(params=[("eagle3", 1), ("eagle3", 2), *((name, 2) for name in BLOCKS)], ids=str)
def head(request, target) -> Any:
    kind, num_layers = request.param
    if kind == "eagle3":
        layer = dataclasses.replace(layer_like(target.config), sliding_window=WINDOW, num_layers=num_layers)
        config: Any = Eagle3Config(layer, (2, 4, 5), VOCAB)
    else:
        shape = {"markov_rank": 5, "confidence": True, **BLOCKS[kind]}
        config = BlockConfig(layers_like(target.config, num_layers, WINDOW), (1, 3), SLOTS, 7, **shape)
    torch.manual_seed(3)
    head = head_class("dspark" if kind in BLOCKS else kind)(config).double().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.4)
    return head


@pytest.mark.parametrize(("shape", "static"), [("chain", True), ("tree", False)])
def test_rounds_far_behind_a_window_are_those_of_the_whole_text(head, target, shape, static):
    """Every drafted token, and what a chain's are drawn from, are as `BranchDrafter` finds them over an uncut text."""
    net, rounds, answered = head.net(target), list[list[Round]](), 60
    capacity = max(map(len, PROMPTS)) + answered + SLOTS
    if shape == "chain":
        drafter: Any = ChainDrafter(net, FixedLengthStop(3), capacity, static=static)
    else:
        drafter = TreeDrafter(net, StaticTree.from_paths(PATHS), capacity, static=static)
    params, done = SamplingParams(1.0 if shape == "chain" else 0.0), list[Generation]()
    for prompt in PROMPTS:
        rounds.append([])
        options = DecodeOptions(on_round=rounds[-1].append)
        done.append(generate_one(target, drafter, prompt, params, answered, TorchSource(0), (), options))
    rows_of = getattr(net, "cache", net)
    cache = rows_of.cache if hasattr(rows_of, "cache") else rows_of._cache
    reach = net.network.stack.reach if head.kind == "eagle3" else WINDOW
    grows = bool(getattr(head.config, "full_layers", ()))
    assert (cache.capacity < 2 * reach + 24 < len(PROMPTS[0]) + answered) is not grows, "memory by the window alone"
    oracle, seen = BranchDrafter(head.net(target), 3), 0  # as long a block as that of the drafts
    for number, (prompt, answer) in enumerate(zip(PROMPTS, done, strict=True)):
        whole, at = [*prompt, *answer.tokens], len(prompt)
        states = target.features(torch.tensor([whole], device=target.device), aux_layers=head.aux_layers)[0]
        for own in rounds[number]:
            tree = own.tree
            if tree is not None and tree.tokens and at > 2:
                text = states[: at - 1]
                oracle.open(whole[:at], torch.cat([text, text[:1]]))  # that of the last token is not read
                for node, token in enumerate(tree.tokens):
                    path, parent = list[int](), tree.parents[node]
                    rank = PATHS[node][-1] if shape == "tree" else 0
                    while parent >= 0:
                        path.insert(0, tree.tokens[parent])
                        parent = tree.parents[parent]
                    found = oracle.states([at], torch.tensor([path or [0]]))[0, len(path)]
                    logits = oracle.lm_head(found)
                    if shape == "chain":
                        q = tree.draft_prob[node].double()
                        torch.testing.assert_close(q, logits.softmax(-1), rtol=0, atol=1e-6)
                    else:
                        assert int(logits.topk(rank + 1).indices[-1]) == token, (number, at, node)
                    seen += 1
            at += len(own.tokens)
        assert at == len(whole)
    assert seen > 60 * len(PROMPTS)
