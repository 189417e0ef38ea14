"""What a round of `eagle2:nodes=auto` takes on this machine, measured once a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from draftsmith.eval.clocks import clock_of, synchronised
from draftsmith.eval.costs import PROBE_TOKENS, Costs, Overhead, drafter_of, measure_costs, tree_family
from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods.base import Models
from draftsmith.eval.methods.trees import Eagle2
from draftsmith.modules.decoding.nodes import TreeTimes
from draftsmith.modules.types import SamplingParams

PROBE_PROMPT = 128  # tokens, or less in a short context
SEED = 0


def tree_times(models: Models, method: Eagle2) -> TreeTimes:
    """Seconds, by a prompt of random tokens: what is in them changes no forward's time."""
    family = tree_family(method)
    key = f"times, {family}, depth {method.depth}"
    if key not in models.measured:
        models.measured[key] = times_of(measure(models, method), family, method.most_nodes)
    return models.measured[key]


def measure(models: Models, method: Eagle2) -> Costs:
    """Of the method's trees. Small ones and large ones are decoded, for what a round takes beyond its forwards."""
    device = models.target.device
    clock = clock_of(str(device)) if device.type == "cpu" and torch.get_num_threads() == 1 else synchronised
    room = min(models.capacity, models.target.info.max_position) - PROBE_TOKENS - method.most_nodes
    length = max(2, min(PROBE_PROMPT, room))
    draws = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(models.target.info.vocab_size, (length,), generator=draws).tolist()
    settings = [replace(method, nodes=nodes) for nodes in sorted({1, method.most_nodes})]
    shallow = replace(method, nodes=1, depth=1)
    probes = {tree_family(method): [*settings, shallow]}
    return measure_costs(models, [BenchPrompt("probe", prompt)], probes, SamplingParams(), SEED, clock)


def times_of(costs: Costs, family: str, most_nodes: int) -> TreeTimes:
    """Of trees of up to so many nodes, from what was measured."""
    drafter = drafter_of(family)
    assert drafter is not None
    cost, beyond = costs.drafters[drafter], costs.families.get(family, Overhead(0.0, 0.0))
    # A target reads more rows in no less time: where the clock says so, it errs.
    calls = itertools.accumulate((costs.target_s(nodes + 1, tree=nodes > 1) for nodes in range(most_nodes + 1)), max)
    verify = tuple(beyond.round + call for call in calls)
    return TreeTimes(cost.first + beyond.step, cost.step + beyond.step, verify)
