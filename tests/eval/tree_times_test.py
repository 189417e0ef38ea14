"""What a round of a tree takes, from curves by hand and on a small model."""

from __future__ import annotations

import pytest
from quick_heads import varied_tree_head
from tiny_models import tiny_llama_dir

from draftsmith.data.models import load_lm
from draftsmith.eval.costs import DraftCost
from draftsmith.eval.methods import parse_method
from draftsmith.eval.methods.base import Models
from draftsmith.eval.tree_times import times_of, tree_times
from draftsmith.modules.heads.eagle import EagleConfig, EagleHead


def test_the_rows_of_a_call_are_the_nodes_and_the_root_and_no_more_rows_take_less():
    times = times_of({1: 4.0, 3: 8.0, 4: 7.0, 6: 13.0}, DraftCost(9.0, 2.0, 0.5), 7)
    assert times.verify == (4, 6, 8, 8, 10, 13, 16, 19)
    assert [times.draft(calls) for calls in (1, 4)] == [2.0, 3.5]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("tiny"))))
    eagle = EagleHead(EagleConfig.for_target(target.config)).eval().requires_grad_(False)
    return Models(target, eagle=eagle, acceptance=varied_tree_head(target.info.hidden_size), capacity=400)


def test_a_run_measures_the_target_once_and_every_kind_of_tree_once(models):
    first = tree_times(models, parse_method("eagle2:nodes=auto:topk=3"))
    known = dict(models.measured)
    assert len(first.verify) == 129 and min(first.verify) > 0 and first.first > 0
    assert tree_times(models, parse_method("eagle2:nodes=auto:topk=3:depth=2")) == first
    judged = tree_times(models, parse_method("eagle2:nodes=auto:topk=3:value=head"))
    assert judged.verify == first.verify
    assert {key: models.measured[key] for key in known} == known and len(models.measured) == len(known) + 1
