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
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.eagle3.net import default_layers
from draftsmith.modules.formats.alternatives import DEPTH, SWITCHES, other_ropes, other_weights
from draftsmith.modules.formats.rope import Rope
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# Of a text; the logits of so many are made at once.
MOST_TOKENS = 2048


@dataclass(frozen=True)
class Reading:
    """A head that is fed the target's states after these many layers. factor, label: what differs from its config, and
    how."""

    factor: str
    label: str
    head: DraftHead
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What texts say.

    chosen: share of the answers' tokens that are the target's first choice. perplexity: of them, under the target at
    temperature 1. agreement: of the first reading, how often a draft's first, second, ... token is the target's first
    choice where those before it were right and the text's. lengths: of each reading, how many tokens of the draft from
    each place [N] the target would accept, at most DEPTH. unknown: shares of the answers' tokens and of the target's
    first choices that the first reading's head cannot draft.
    """

    chosen: float
    perplexity: float
    agreement: list[float]
    lengths: list[Tensor]
    unknown: tuple[float, float]


def readings_of(head: DraftHead, target: LlamaConfig | None, num_layers: int) -> list[Reading]:
    """The head as it is, then with one factor changed each: its layers, its rotary settings, the order of what its
    weights read, its switches. target: its sizes, where they are known."""
    own = head.capture or (num_layers,)
    layers = [tuple(layer + by for layer in own) for by in (-1, 1)]
    layers += [default_layers(num_layers)] * (len(head.capture) == 3)
    possible = [one for one in layers if one[0] >= 0 and one[-1] < num_layers and list(one) == sorted({*one})]
    possible += [own[::-1]] * (len(own) > 1)
    found = [Reading("", "as it is", head, own)]
    found += [Reading("layers", f"layers {' '.join(map(str, one))}", head, one) for one in possible if one != own]
    llama, state, device = getattr(head.config, "llama", None), stored_tensors(head), next(head.parameters()).device
    if llama is None:
        return found

    def read_as(factor: str, label: str, state: Mapping[str, Tensor] = state, **changes: Any) -> Reading:
        other = build_head(head.kind, dataclasses.replace(head.config, **changes), state)
        return Reading(factor, label, other.eval().to(device), own)

    rope = Rope(target.rope_theta, target.rope_scaling) if target else None
    found += [read_as("rotary", label, llama=turned) for label, turned in other_ropes(llama, rope)]
    found += [read_as("weights", label, other) for label, other in other_weights(state, llama.head_dim)]
    for name in SWITCHES:
        if hasattr(head.config, name):
            on = getattr(head.config, name)
            found.append(read_as("switches", f"{name} {'off' if on else 'on'}", state, **{name: not on}))
    return found


@torch.inference_mode()
def measure(
    target: CausalLM, rows: Sequence[Mapping[str, Any]], readings: Sequence[Reading] = (), depth: int = 1
) -> Measured:
    """Read every row's text once with the target, and as often as asked with the head.

    rows: of an artefact with answers; what is behind MOST_TOKENS or a context is left out. depth: tokens of the first
    reading's drafts; the others draft at most DEPTH.

    Raises:
        NonFinite: the head's logits.
    """
    last = target.info.num_layers
    layers = tuple(sorted({last, *(layer for reading in readings for layer in reading.layers)}))
    context = min([MOST_TOKENS, target.info.max_position, *(reading.head.config.max_position for reading in readings)])
    depths = [depth, *[min(depth, DEPTH)] * len(readings)][: len(readings)]
    drafting = [reading.head.branches(target, own) for reading, own in zip(readings, depths, strict=True)]
    tally, lengths = torch.zeros(2, depth), [list[Tensor]() for _ in readings]
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, chosen, -log p, unknown tokens, unknown choices
    for row in rows:
        ids, mask = torch.tensor(row["input_ids"][:context]), torch.tensor(row["loss_mask"][:context], dtype=torch.bool)
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
            right, compared = agreed(drafted.tokens.cpu(), starts, ids, choices)
            lengths[number].append(right.sum(1).clamp_max(DEPTH))
            if number == 0:
                tally += torch.stack([right.sum(0), compared.sum(0)])
                known = branches.lm_head(drafted.hidden[:1, 0])[0].isfinite().cpu()
                sums[3:] += torch.stack([(~known[tokens]).sum() for tokens in (ids[places + 1], choices[places])])
    _, chosen, surprise, *unknown = (sums / sums[0].clamp_min(1)).tolist()
    agreement = [right / count for right, count in tally.T.tolist() if count]
    joined = [torch.cat([torch.zeros(0, dtype=torch.long), *own]) for own in lengths]
    return Measured(chosen, math.exp(min(surprise, 100.0)), agreement, joined, (unknown[0], unknown[1]))


def agreed(drafted: Tensor, starts: Tensor, ids: Tensor, choices: Tensor) -> Tensor:
    """[2, S, K]: which tokens of greedy drafts [S, K] were compared and are the target's first choice, and which were
    compared: those in the answer whose draft was right and the text's until then.

    choices: [T], after each token of the text [T] where an answer's token follows; -1 elsewhere.
    """
    places = starts[:, None] + torch.arange(drafted.shape[1])
    after, inside = places.clamp_max(len(ids) - 1), places < len(ids)
    wanted = choices[after - 1].where(inside, -1)
    right = drafted == wanted
    goes_on = (right & (drafted == ids[after])).cumprod(-1).bool()
    compared = (wanted >= 0) & torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], 1)
    return torch.stack([compared & right, compared])
