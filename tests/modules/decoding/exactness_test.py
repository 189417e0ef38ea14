"""The emitted distribution equals the target's, by enumeration of every branch of whole rounds through the production
loop.

No sampling and no tolerance for luck: 1e-10 is a thousand times what float64 sums of some thousand branches lose.
"""

from __future__ import annotations

import pytest
from oracles.formulas import warped
from oracles.tables import (
    CAPACITY,
    METHODS,
    PROMPT,
    Branches,
    TableLM,
    V,
    decoded_distribution,
    enumerate_branches,
    method,
    target_distribution,
    total_variation,
)

from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.stop import CostRule, FixedLengthStop, PredictorStop
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

EXACT = 1e-10
CAUGHT = 1e-3
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7,top_k=2": SamplingParams(temperature=0.7, top_k=2),
    "T=1.5,top_p=0.8": SamplingParams(temperature=1.5, top_p=0.8),
}


@pytest.fixture(params=list(SETTINGS))
def params(request):
    return SETTINGS[request.param]


# An untruncated EAGLE head gives every token some mass: too many branches for three tokens, and of a tree that is drawn
# for any number.
FULL_SUPPORT = {"eagle:k=2", *(name for name in METHODS if name.endswith(":eagle"))}
DRAWN = {name for name in METHODS if name.endswith("drawn")}
THREE_OF_FOUR = SamplingParams(temperature=1.0, top_k=3)


# Truncated distributions meet every kind of verification once.
TRUNCATED = ["spec:k=2", "specdec++", "eagle:k=2", "tree", "drawn", "eagle-tree", "pre-verify", "hsddw",
             "medusa-static", "hydra-static", "lookahead", "pld"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, setting) for setting in SETTINGS for name in (METHODS if setting == "T=1" else TRUNCATED)],
)
def test_emitted_distribution_is_the_targets(name, setting):
    params = THREE_OF_FOUR if setting == "T=1" and name in DRAWN else SETTINGS[setting]
    # Room for whole drafts after the first token; three tokens reach into the second round after any rejection.
    target, length = TableLM(1), 2 if setting == "T=1" and name in FULL_SUPPORT | DRAWN else 3
    distribution = decoded_distribution(target, method(name, target), params, length, max_new_tokens=8)
    assert total_variation(distribution, target_distribution(target, params, length)) < EXACT


def test_drafts_follow_the_draft_model_at_the_sampling_asked_for(params):
    """Any distribution of the drafts leaves the output as it is, but one at other settings is accepted less often."""
    target, draft, seen = TableLM(1), TableLM(107), 0
    for seed in range(10):
        rounds, drafter = [], method("spec:k=3", target)()
        generate_one(target, drafter, PROMPT, params, 12, TorchSource(seed), (), DecodeOptions(rounds.append))
        text = [*PROMPT, *rounds[0].tokens]
        for done in rounds[1:]:
            for node, token in enumerate(done.tree.tokens):
                distribution = warped(draft.row((*text, *done.tree.tokens[:node]))[0], params)
                assert done.tree.draft_prob[node].tolist() == pytest.approx(distribution) and distribution[token] > 0
                seen += 1
            text += done.tokens
    assert seen > 50


@pytest.mark.parametrize("eos_ids", [(1, 3), ()])
@pytest.mark.parametrize(
    "policy", [lambda: FixedLengthStop(3), lambda: PredictorStop(OnlinePredictor(), CostRule(0.1), 1, 3)]
)
def test_a_draft_that_ends_with_an_end_token_leaves_the_distribution(policy, eos_ids):
    """Whether the answer ends there or not: the token stays in the draft."""
    target, draft, params = TableLM(4), TableLM(104), SETTINGS["T=1"]

    def drafter():
        return ChainDrafter(DraftModelNet(draft), policy(), CAPACITY, end_ids=(1, 3))

    distribution = decoded_distribution(target, drafter, params, length=3, max_new_tokens=8, eos_ids=eos_ids)
    assert total_variation(distribution, target_distribution(target, params, 3, eos_ids=eos_ids)) < EXACT
    trace = generate_one(target, drafter(), PROMPT, params, 20, TorchSource(0), ()).trace
    assert {step.num_drafted for step in trace.steps[:-3]} >= {1, 3}


@pytest.mark.parametrize("name", ["spec:k=2", "eagle:k=2", "tree"])
def test_end_tokens_and_the_limit_cut_the_same_distribution(name):
    target, params = TableLM(4), SETTINGS["T=1"]
    distribution = decoded_distribution(
        target, method(name, target), params, length=4, max_new_tokens=4, eos_ids=(1, 3)
    )
    assert any(len(tokens) < 4 for tokens in distribution)
    assert total_variation(distribution, target_distribution(target, params, 4, eos_ids=(1, 3))) < EXACT


def test_the_draft_of_full_support_is_exact():
    # Every token can be drafted and nearly every one rejected: other branches than with sparse distributions.
    target, draft = TableLM(5, support=(V,)), TableLM(6, support=(V,))
    distribution = decoded_distribution(
        target,
        lambda: ChainDrafter(DraftModelNet(draft), FixedLengthStop(2), CAPACITY),
        SETTINGS["T=1"],
        2,
        max_new_tokens=8,
    )
    assert total_variation(distribution, target_distribution(target, SETTINGS["T=1"], 2)) < EXACT


def test_a_draft_equal_to_the_target_is_never_rejected():
    target, params = TableLM(1), SETTINGS["T=1.5,top_p=0.8"]

    def run(source: Branches):
        drafter = ChainDrafter(DraftModelNet(TableLM(1)), FixedLengthStop(2), CAPACITY)
        return generate_one(target, drafter, PROMPT, params, 4, source).trace

    for trace, _ in enumerate_branches(run):
        assert trace.num_accepted == trace.num_draft_tokens == 2 and trace.num_discarded == 0


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        # SpecDec++'s head reads a token one forward after it was drafted, so a draft has two tokens at least.
        ("specdec++", {2, 3}), ("specdec++calibrated", {2, 3}), ("specdec++:eagle", {2, 3}),
        ("confidence", {1, 2, 3}), ("confidence:eagle", {1, 2, 3}), ("self-verify", {1, 2, 3}),
        ("self-verify:eagle", {1, 2, 3}),
        ("cost", {1, 2, 3}), ("cost:eagle", {1, 2, 3}), ("online", {1, 2, 3}), ("online:eagle", {1, 2, 3}),
    ],
)  # fmt: skip
def test_a_stop_policy_ends_drafts_at_several_lengths(name, lengths):
    # Else the cases above would be fixed lengths in disguise.
    target, params = TableLM(1), SETTINGS["T=1"]
    make = method(name, target)
    runs = [generate_one(target, make(), PROMPT, params, 12, TorchSource(seed)) for seed in range(40)]
    # Near the limit drafts are cut whatever the policy says: only rounds that leave room for four tokens count.
    seen = set()
    for run in runs:
        emitted = 1
        for step in run.trace.steps:
            seen |= {step.num_drafted} if 12 - emitted > 4 else set()
            emitted += step.num_emitted
    assert seen == lengths


@pytest.mark.parametrize("name", METHODS)
def test_at_temperature_zero_the_distribution_is_one_answer_the_argmax_of_every_row(name):
    for seed in (1, 8, 9):
        target = TableLM(seed)
        answer = list(PROMPT)
        for _ in range(9):
            answer.append(max(range(V), key=lambda token: float(target.row(tuple(answer))[0][token])))
        distribution = decoded_distribution(
            target, method(name, target, seed), SamplingParams(), length=9, max_new_tokens=9
        )
        assert distribution == {tuple(answer[len(PROMPT) :]): 1.0}


class DropsByValue(ChainDrafter):
    """Wrong: the last sampled token leaves the draft when it is token 0."""

    def propose(self, max_drafted, sampler):
        tree = super().propose(max_drafted, sampler)
        if tree.tokens and tree.tokens[-1] == 0:
            return DraftTree(tree.tokens[:-1], tree.parents[:-1], tree.draft_prob[:-1])
        return tree


def test_a_biased_drafter_is_caught():
    target, draft, params = TableLM(5, support=(V,)), TableLM(6, support=(V,)), SETTINGS["T=1"]
    distribution = decoded_distribution(
        target,
        lambda: DropsByValue(DraftModelNet(draft), FixedLengthStop(1), CAPACITY),
        params,
        length=2,
        max_new_tokens=8,
    )
    assert sum(distribution.values()) == pytest.approx(1)  # a distribution, but another one
    assert total_variation(distribution, target_distribution(target, params, 2)) > CAUGHT
