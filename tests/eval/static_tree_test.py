"""`eval tree` counts what heads say of the target's own text, and writes a tree that their methods take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from table_methods import random_eagle_head, random_hydra_heads, random_medusa_heads
from table_models import PROMPT, TableLM

from draftsmith.eval import static_tree
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import read_tree
from draftsmith.eval.static_tree import rank_accuracies
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.tree import StaticTree, expected_accepted
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

HEADS = {"medusa": random_medusa_heads, "hydra": random_hydra_heads, "eagle": random_eagle_head}


@pytest.mark.parametrize("kind", HEADS)
def test_accuracies_are_those_of_trees_drafted_at_every_place(kind):
    """The oracle drafts, from every place, a tree that has all ranks, by the production drafter, and follows the
    target's text through it."""
    target, head, depth, ranks = TableLM(1), HEADS[kind](7), 2, 3
    models = SimpleNamespace(target=target, heads={kind: head}, ends=())
    prompts = [BenchPrompt(str(n), [*PROMPT, n]) for n in range(2)]
    found = rank_accuracies(models, kind, prompts, 24, depth, ranks)
    right, reached = torch.zeros(depth, ranks), torch.zeros(depth, 1)
    shape = StaticTree.from_paths([[0], [1], [2], *([a, b] for a in range(3) for b in range(3))])
    for prompt in prompts:
        made = generate_one(target, None, prompt.prompt_ids, SamplingParams(), 24, TorchSource(0), ())
        text = [*prompt.prompt_ids, *made.tokens]
        features = torch.stack([target.row(tuple(text[: i + 1]))[1] for i in range(len(text))])
        for start in range(len(prompt.prompt_ids) + 1, len(text)):
            drafter = head.tree_drafter(target, shape, 64)
            drafter.begin(0, text[: start - 1], features[: start - 1], text[start - 1])
            (tree,) = drafter.propose([depth], SamplingParams(), [TorchSource(0)])
            node = -1
            for level in range(min(depth, len(text) - start)):
                reached[level] += 1
                children = [i for i, parent in enumerate(tree.parents) if parent == node]
                hits = [rank for rank, i in enumerate(children) if tree.tokens[i] == text[start + level]]
                if not hits:
                    break
                right[level, hits[0]] += 1
                node = children[hits[0]]
    assert torch.allclose(torch.tensor(found), right / reached)
    assert 0 < right[1].sum() < reached[1]  # else the second level says nothing


@pytest.mark.parametrize("kind", ["eagle", "hydra"])
def test_the_tree_is_written_and_decoded_with(models, tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(static_tree, "RANKS", 40)
    head = str(Path(models["eagle"]).with_name(kind))
    words = ["--target", models["target"], "--prompts", models["prompts"], "--draft", head, "--ignore-eos"]
    flags = ["--nodes", "7", "--depth", "2", "--max-new-tokens", "12", "--limit", "2"]
    assert main(["eval", "tree", *words, *flags, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    summary, shape = results["summary"], read_tree(str(tmp_path / "tree.yaml"))
    assert len(shape.parents) == summary["nodes"] == sum(summary["depths"]) <= 7
    assert shape == StaticTree.from_paths(summary["paths"])
    assert summary["expected_tau"] == pytest.approx(
        1 + expected_accepted(results["accuracies"], summary["paths"]), rel=1e-4
    )  # five digits are written
    assert results["meta"]["kind"] == "tree"
    assert f"tree={tmp_path / 'tree.yaml'}" in "".join(capsys.readouterr().out.split())


def test_the_shares_of_drawn_children_are_those_that_the_decoder_accepts():
    """The oracle counts, over many rounds of the decoder from fresh prompts, which of the root's children it took."""
    target, head, params = TableLM(1), random_eagle_head(7), SamplingParams(1.0)
    models = SimpleNamespace(target=target, heads={"eagle": head}, ends=())
    prompts = [BenchPrompt(str(n), [*PROMPT, n % 4]) for n in range(400)]
    ((first, second, third),) = rank_accuracies(models, "eagle", prompts, 2, 1, 3, params)
    shape = StaticTree.from_paths([[0], [1], [2]])
    taken = torch.zeros(3)
    for number, prompt in enumerate(prompts):
        drafter, rounds = head.tree_drafter(target, replace(shape, drawn=True), 64), []
        options = DecodeOptions(rounds.append)
        # The first token comes with the prompt; the second from the first round.
        generate_one(target, drafter, prompt.prompt_ids, params, 3, TorchSource(1000 + number), (), options)
        path = rounds[1].verdict.path
        taken[list(path)[:1]] += 1
    # Four standard errors of a share over 400 rounds.
    assert (taken / len(prompts)).tolist() == pytest.approx([first, second, third], abs=0.1)
    assert min(first, second, third) > 0
