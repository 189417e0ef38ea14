"""A head's drafts beside its target's own choices, on texts: token by token of a draft, and read in other ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.heads.directory import build_head, stored_tensors
from draftsmith.data.text.answers import answer_mask
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.eagle3.net import default_layers
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# What published heads were trained with, whatever their targets have.
COMMON_BASE = 10_000.0
# Of a text; the logits of so many are made at once.
MOST_TOKENS = 2048


@dataclass(frozen=True)
class Reading:
    """A head that is fed the target's states after these many layers. label: how this differs from its config."""

    label: str
    head: DraftHead
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What texts say.

    chosen: share of the answers' tokens that are the target's first choice. perplexity: of them, under the target at
    temperature 1. agreement: of each reading, how often a draft's first, second, ... token is the target's first choice
    where those before it were right and the text's. unknown: shares of the answers' tokens and of the target's first
    choices that the first reading's head cannot draft.
    """

    chosen: float
    perplexity: float
    agreement: list[list[float]]
    unknown: tuple[float, float]


def readings_of(head: DraftHead, target: LlamaConfig | None, num_layers: int) -> list[Reading]:
    """The head as it is; with its layers one up, one down and the default ones; with a rotary base of 10,000, and with
    its target's rotary positions. target: its sizes, where they are known."""
    own = head.capture or (num_layers,)
    layers = [tuple(layer + by for layer in own) for by in (-1, 1)]
    layers += [default_layers(num_layers)] * (len(head.capture) == 3)
    possible = [one for one in layers if one[0] >= 0 and one[-1] < num_layers and list(one) == sorted({*one})]
    found = [Reading("as it is", head, own)]
    found += [Reading(f"layers {' '.join(map(str, one))}", head, one) for one in possible if one != own]
    llama, device = getattr(head.config, "llama", None), next(head.parameters()).device
    if llama is None:
        return found
    ropes = {(COMMON_BASE, RopeScaling())} | ({(target.rope_theta, target.rope_scaling)} if target else set())
    for theta, scaling in sorted(ropes, key=str):
        if (theta, scaling.kind) != (llama.rope_theta, llama.rope_scaling.kind):
            turned = dataclasses.replace(llama, rope_theta=theta, rope_scaling=scaling)
            other = build_head(head.kind, dataclasses.replace(head.config, llama=turned), stored_tensors(head))
            found.append(Reading(f"rotary base {theta:g}, scaling {scaling.kind}", other.eval().to(device), own))
    return found


@torch.inference_mode()
def measure(
    target: CausalLM, rows: Sequence[Mapping[str, Any]], readings: Sequence[Reading] = (), depth: int = 1
) -> Measured:
    """Read every row's text once with the target, and as often as asked with the head.

    rows: of an artefact with answers; what is behind MOST_TOKENS or a context is left out. depth: tokens of the first
    reading's drafts; the others draft one.

    Raises:
        NonFinite: the head's logits.
    """
    last = target.info.num_layers
    layers = tuple(sorted({last, *(layer for reading in readings for layer in reading.layers)}))
    context = min([MOST_TOKENS, target.info.max_position, *(reading.head.config.max_position for reading in readings)])
    depths = [depth, *[1] * len(readings)][: len(readings)]
    drafting = [reading.head.branches(target, own) for reading, own in zip(readings, depths, strict=True)]
    tallies = [torch.zeros(2, own) for own in depths]
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, chosen, -log p, unknown tokens, unknown choices
    for row in rows:
        ids, mask = torch.tensor(row["input_ids"][:context]), torch.tensor(answer_mask(row)[:context], dtype=torch.bool)
        places = mask[1:].nonzero()[:, 0]  # tokens that an answer's follow
        read = target.features(ids[None].to(target.device), capture=layers)[0]
        states = dict(zip(layers, read.chunk(len(layers), -1), strict=True))
        logits = target.lm_head(states[last][places.to(target.device)]).float()
        choices = torch.full_like(ids, -1).scatter(0, places, logits.argmax(-1).cpu())
        surprise = F.cross_entropy(logits, ids[places + 1].to(target.device), reduction="sum")
        sums[:3] += torch.tensor([len(places), (choices[places] == ids[places + 1]).sum(), surprise])
        # The first token of an answer is never drafted: the target gives it once it has read the prompt.
        begun = places[mask[places]] + 1
        for number, (reading, branches) in enumerate(zip(readings, drafting, strict=True)):
            starts = begun[begun >= branches.min_start]
            if not len(starts):
                continue
            branches.open(ids.tolist(), torch.cat([states[layer] for layer in reading.layers], -1))
            drafted = branches.draft(starts.tolist(), depths[number], [SamplingParams()] * len(starts))
            tallies[number] += agreed(drafted.tokens.cpu(), starts, ids, choices)
            if number == 0:
                known = branches.lm_head(drafted.hidden[:1, 0])[0].isfinite().cpu()
                sums[3:] += torch.stack([(~known[tokens]).sum() for tokens in (ids[places + 1], choices[places])])
    _, chosen, surprise, *unknown = (sums / sums[0].clamp_min(1)).tolist()
    agreement = [[right / count for right, count in tally.T.tolist() if count] for tally in tallies]
    return Measured(chosen, math.exp(min(surprise, 100.0)), agreement, (unknown[0], unknown[1]))


def agreed(drafted: Tensor, starts: Tensor, ids: Tensor, choices: Tensor) -> Tensor:
    """[2, K]: of greedy drafts [S, K] how many tokens are the target's first choice, and how many were compared: those
    in the answer whose draft was right and the text's until then.

    choices: [T], after each token of the text [T] where an answer's token follows; -1 elsewhere.
    """
    places = starts[:, None] + torch.arange(drafted.shape[1])
    after, inside = places.clamp_max(len(ids) - 1), places < len(ids)
    wanted = choices[after - 1].where(inside, -1)
    right = drafted == wanted
    goes_on = (right & (drafted == ids[after])).cumprod(-1).bool()
    compared = (wanted >= 0) & torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], 1)
    return torch.stack([(compared & right).sum(0), compared.sum(0)])
