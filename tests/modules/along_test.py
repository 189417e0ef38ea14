"""Reading along texts: greedy drafts against a loop, texts from storage, and rounds by place against decoding's."""

from __future__ import annotations

import torch
from oracles.acceptance import right_by_place
from oracles.tables import PROMPT, LogitTable
from worlds import run_models, small_models

from draftsmith.modules.along import Answer, Text, along_head, along_model, kept_greedily, read, rounds_by_place, tau_of
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()


def test_greedy_drafts_are_compared_with_the_targets_choices_along_the_text():
    """The text is not greedy: a draft that is right, but not the text, is not followed."""
    target, draft, ids = LogitTable(1), LogitTable(2), [2, 0, 1, 3, 3, 0, 2, 1, 1, 0, 3, 2]
    answers = [Answer(2, 6, 6), Answer(8, 12, 12)]
    seen = read(target, ids, answers, GREEDY, ())
    starts = torch.cat([answer.starts for answer in answers])
    drafted = seen.open(BranchDrafter(DraftModelNet(draft), 3), len(ids)).draft(starts.tolist(), 3).tokens
    own = {place for answer in answers for place in range(answer.begin, answer.end)}
    choices = [int(target.row(tuple(ids[:place]))[0].argmax()) if place in own else -1 for place in range(len(ids))]
    assert seen.best.tolist() == [choice for choice in choices if choice >= 0]
    right, compared = right_by_place(drafted.tolist(), starts.tolist(), ids, choices)
    assert kept_greedily(drafted, starts, seen).sum(1).tolist() == [right, compared]
    assert 0 < sum(right) < sum(compared)


def test_rounds_by_place_and_tau_are_those_of_decoding():
    models, sums, walks = run_models(LogitTable(1), LogitTable(1, (3, 3, 3)), capacity=64), torch.zeros(2, 3), []
    tokens = calls = 0
    for last in range(4):
        prompt = [*PROMPT, last]
        made = generate_one(models.target, parse_method("spec:k=3").build(models), prompt, GREEDY, 20, TorchSource(0))
        for step in made.trace.steps:
            sums[0, : step.num_accepted] += 1
            sums[1, : step.num_drafted] += 1
        tokens, calls = tokens + made.trace.num_tokens, calls + made.trace.num_target_calls
        answer = Answer(len(prompt), len(prompt) + 20, len(prompt) + 20)
        seen = read(models.target, [*prompt, *made.tokens], [answer], GREEDY, ())
        walks += [walk for (walk,) in along_model(3, models.draft, "draft").walk(seen, [3])]
    assert torch.equal(rounds_by_place(walks).float(), sums) and sums[0, 0] > 0
    assert tau_of(walks) == tokens / calls


def test_a_text_with_stored_states_gives_what_the_target_gives():
    models, ids = small_models(), [1 + i % 7 for i in range(20)]
    head, answers = models.heads["eagle3"], [Answer(4, 20, 20)]
    seen = read(models.target, ids, answers, GREEDY, head.aux_layers)
    layers = sorted(seen.states)
    features = models.target.features(torch.tensor([ids]), aux_layers=tuple(layers))[0]
    stored = read(models.target, ids, answers, GREEDY, (), Text.of(ids, answers, features, layers))
    along = along_head(3, head.net(models.target), head.config.max_position)
    (own,), (theirs,) = (along.walk(text, [3])[0] for text in (seen, stored))
    assert torch.equal(own.calls, theirs.calls) and torch.equal(own.reached, theirs.reached)
