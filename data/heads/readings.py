"""A head's drafts beside its target's own choices, on texts: token by token of a draft, and read in other ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.heads.directory import build_head, head_state
from draftsmith.data.text.answers import answer_mask
from draftsmith.modules.decoding.branches import pieces
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# Places of a text whose logits are made at once: 256 MB in float32 for a vocabulary of 128k.
ROWS = 512
# What published heads were trained with, whatever their targets have.
COMMON_BASE = 10_000.0


@dataclass(frozen=True)
class AnsweredText:
    """ids [T] of a text, and which of them [T] are answers."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Reading:
    """A head that is fed the target's states after these many layers, the final ones where there are none, and drafts
    `depth` tokens. label: how this differs from what config.json says."""

    label: str
    head: DraftHead
    layers: tuple[int, ...]
    depth: int = 1


@dataclass(frozen=True)
class Measured:
    """What texts say.

    tokens: answer tokens. chosen: share of them that are the target's first choice. perplexity: of them, under the
    target at temperature 1. agreement: of each reading, how often a draft's first, second, ... token is the target's
    first choice, where those before it were the text's. unknown_tokens, unknown_choices: shares of the answer tokens
    and of the target's first choices that the first reading's head cannot draft.
    """

    tokens: int
    chosen: float
    perplexity: float
    agreement: list[list[float]]
    unknown_tokens: float = 0.0
    unknown_choices: float = 0.0


def texts_of(rows: Iterable[Mapping[str, Any]], context: int) -> list[AnsweredText]:
    """The rows of an artefact as far as target and head can read; those without an answer are left out."""
    texts = [AnsweredText(list(row["input_ids"])[:context], list(answer_mask(row))[:context]) for row in rows]
    return [text for text in texts if any(text.mask[1:])]


def other_readings(head: DraftHead, target: LlamaConfig | None, num_layers: int) -> list[Reading]:
    """The head as it is, then with its layers one up, one down and the default ones, then with other rotary positions:
    plain ones of base 10,000 and of its target's, and the target's with their scaling.

    target: its sizes, where they are known.
    """
    own = head.capture or (num_layers,)
    layers = [tuple(layer + by for layer in own) for by in (-1, 1)]
    if len(head.capture) == 3:
        layers.append((2, num_layers // 2, num_layers - 3))
    layers = [
        one for one in layers if one != own and list(one) == sorted(set(one)) and 0 <= one[0] <= one[-1] < num_layers
    ]
    found = [Reading("as it is", head, own)]
    found += [Reading(f"layers {' '.join(map(str, one))}", head, one) for one in dict.fromkeys(layers)]
    llama = getattr(head.config, "llama", None)
    if llama is None:
        return found
    ropes = {(COMMON_BASE, RopeScaling())}
    if target is not None:
        ropes |= {(target.rope_theta, RopeScaling()), (target.rope_theta, target.rope_scaling)}
    for theta, scaling in sorted(ropes, key=str):
        if theta == llama.rope_theta and scaling.kind == llama.rope_scaling.kind:
            continue
        config = dataclasses.replace(
            head.config, llama=dataclasses.replace(llama, rope_theta=theta, rope_scaling=scaling)
        )
        label = f"rotary base {theta:g}" + ("" if scaling.kind == "default" else f", scaling {scaling.kind}")
        found.append(Reading(label, reshaped(head, config), own))
    return found


@torch.inference_mode()
def measure(target: CausalLM, texts: Sequence[AnsweredText], readings: Sequence[Reading] = ()) -> Measured:
    """Read every text once with the target, and as often as asked with the head.

    Raises:
        NonFinite: logits of the target or the head.
    """
    last = target.info.num_layers
    layers = tuple(sorted({last, *(layer for reading in readings for layer in reading.layers)}))
    drafting = [reading.head.branches(target, reading.depth) for reading in readings]
    tallies = [torch.zeros(2, reading.depth, dtype=torch.float64) for reading in readings]
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, chosen, -log p, unknown tokens, unknown choices
    for text in texts:
        ids, mask = torch.tensor(text.ids), torch.tensor(text.mask)
        places = mask[1:].nonzero()[:, 0] + 1
        # The first token of an answer is never drafted: the target gives it when it has read the prompt.
        starts = places[mask[places - 1]]
        read = target.features(ids[None].to(target.device), capture=layers)[0]
        states = dict(zip(layers, read.chunk(len(layers), -1), strict=True))
        choices, log_p = said(target, states[last], ids)
        after = places - 1
        sums[:3] += torch.tensor([len(places), (choices == ids[1:])[after].sum(), -log_p[after].sum()])
        for number, (reading, branches) in enumerate(zip(readings, drafting, strict=True)):
            branches.open(text.ids, torch.cat([states[layer] for layer in reading.layers], -1))
            begun = starts[starts >= branches.min_start]
            if not len(begun):
                continue
            drafted = branches.draft(begun.tolist(), reading.depth, [SamplingParams()] * len(begun))
            tallies[number] += agreed(drafted.tokens.cpu(), begun, ids, choices, mask)
            if number == 0:
                known = branches.lm_head(drafted.hidden[:1, 0])[0].isfinite().cpu()
                sums[3:] += torch.tensor([(~known[ids[places]]).sum(), (~known[choices[after]]).sum()])
    tokens, chosen, surprise, unknown_tokens, unknown_choices = sums.tolist()
    return Measured(
        int(tokens),
        chosen / max(1, tokens),
        math.exp(min(surprise / max(1, tokens), 100.0)),
        [[right / count for right, count in tally.T.tolist() if count] for tally in tallies],
        unknown_tokens / max(1, tokens),
        unknown_choices / max(1, tokens),
    )


def said(target: CausalLM, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's first choice [T-1] after each token of a text [T] but the last, and the log-probability [T-1] of
    the token that is there; states [T, H]."""
    choices, log_p = [], []
    for piece in pieces(len(ids) - 1, ROWS):
        logits = target.lm_head(states[:-1][piece]).float()
        choices.append(logits.argmax(-1).cpu())
        log_p.append(logits.log_softmax(-1).cpu().gather(-1, ids[1:][piece, None])[:, 0])
    return torch.cat(choices), torch.cat(log_p)


def agreed(drafted: Tensor, starts: Tensor, ids: Tensor, choices: Tensor, mask: Tensor) -> Tensor:
    """[2, K]: of greedy drafts [S, K] how many tokens are the target's first choice, and how many were compared: those
    in an answer whose draft was the text until then.

    choices: [T-1], after each token of the text [T] but the last.
    """
    places = starts[:, None] + torch.arange(drafted.shape[1])
    inside = places < len(ids)
    places = places.clamp_max(len(ids) - 1)
    inside &= mask[places]
    right = drafted == choices[places - 1]
    goes_on = (inside & right & (drafted == ids[places])).cumprod(-1).bool()
    compared = inside & torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], 1)
    return torch.stack([(compared & right).sum(0), compared.sum(0)]).double()


def reshaped(head: DraftHead, config: Any) -> DraftHead:
    """The same weights in a head of another config."""
    made = build_head(head.kind, config, head_state(head))
    return made.to(next(head.parameters()).device).eval().requires_grad_(False)
