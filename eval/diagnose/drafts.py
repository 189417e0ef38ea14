"""Drafts of a head from every position of texts, as it is and under other readings, and how many the target keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.served_target import ServedLM
from draftsmith.data.text.answers import spans
from draftsmith.modules.along import Answer, kept_greedily, read
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.formats.readings import readings
from draftsmith.modules.llama_config import RotarySettings
from draftsmith.modules.pretrained.checkpoint import checkpoint_of, shape_of
from draftsmith.modules.pretrained.heads import build_head, stored_tensors
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.types import InputError, SamplingParams

Rows = Sequence[Mapping[str, Any]]
MOST_TOKENS = 2048  # of a text, whose logits are computed at once
# Chance of naming a variant that is no better, over all variants tried. Positions of a text are not independent; still,
# of 19 sound heads of the embedded pair, stopped after 5 to 840 steps, the lowest of about 170 single chances was 0.03.
CHANCE = 0.01
# Share of accepted first tokens from which every misreading that costs tokens showed on 1,815 positions (EAGLE and
# EAGLE-3 of the embedded pair, benchmarks/README.md); at 0.40 a wrong rotary base did not.
STRONG = 0.5
# A reading with fewer accepted first tokens is that of no trained head: among many, random weights guess a frequent
# token.
LEAST = 0.2
# By less than this factor, sound heads that were stopped early drafted better with norms that they had not learned to
# read: up to 1.09 first tokens and 1.06 tokens of two. The same norms wrong in files of trained ones cost 1.21 to 1.26.
UNLEARNED = 1.15
# A later token, where those before were right, relative to the first: 0.94 for the fourth of our EAGLE-3 head trained
# on three passes, 0.31 for the third of the same head trained on one.
LATER_SOUND = 0.8
COMPARED = 2  # tokens of a variant's draft: the second shows what a head learned on its own states
LONGEST = ("num_heads", "drafts")  # fields of a config that limit its drafts
MOST_MASKS = 32  # Llama 3 has 256 special tokens


@dataclass(frozen=True)
class HeadVariant:
    """A head that reads the target's states after these layers. factor, label: what differs from its config."""

    factor: str
    label: str
    head: DraftHead
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Drafts:
    """Drafts from N places, of at most COMPARED tokens.

    accepted, compared: [N] how many tokens of each the target accepts, and how many were compared with its choices: up
    to the first one that is rejected, or behind which the text goes on otherwise or ends.
    """

    accepted: Tensor
    compared: Tensor

    def share(self, place: int = 1) -> float:
        """Return the share of drafts that are accepted up to a place."""
        return math.prod(hits / max(1, count) for hits, count in self.counts(place))

    def counts(self, place: int = 1) -> list[tuple[int, int]]:
        """Return for each place up to this one how many tokens were accepted there, and compared."""
        places = range(1, place + 1)
        return [(int((self.accepted >= k).sum()), int((self.compared >= k).sum())) for k in places]


@dataclass(frozen=True)
class TextMeasures:
    """Measurements on texts.

    Attributes:
        chosen: share of the answers' tokens that are the target's first choice.
        perplexity: of these tokens, under the target at temperature 1.
        by_place: share of a draft's first, second, ... token that is the target's first choice, where those before it
            were right and equal to the text; of the first variant.
        drafts: of each variant, from the same places.
        per_text: number of those places in each text.
        unknown: shares of the answers' tokens and of the target's first choices that the first variant cannot draft.
    """

    chosen: float
    perplexity: float
    by_place: list[float]
    drafts: list[Drafts]
    per_text: list[int]
    unknown: tuple[float, float]


def head_variants(
    head: DraftHead, rope: RotarySettings | None, target: CausalLM, masks: Sequence[int] = (), in_files: bool = False
) -> list[HeadVariant]:
    """Return the head as it is, then with one factor changed each, of whose states the target has those of all layers.

    rope: of the target, if it is known. masks: tokens that may fill a block drafter's slots (`mask_tokens`).
    in_files: only those that a head's directory can hold.

    Raises:
        InputError: the target's server does not have the head's own layers.
    """
    num_layers = target.info.num_layers
    layers = head.aux_layers or (final_state(num_layers),)
    variants = [HeadVariant("", "as it is", head, layers)]
    if not head.aux_layers and num_layers > 1 and not in_files:  # no directory says which state such heads read
        label = f"layers {num_layers - 1} in place of the final norm's state"
        variants.append(HeadVariant("layers", label, head, (num_layers - 1,)))
    device = next(head.parameters()).device
    for other in readings(head.config, stored_tensors(head), num_layers, rope, masks):
        built = build_head(head.kind, other.config, other.state).eval().to(device)
        variants.append(HeadVariant(other.factor, other.label, built, built.aux_layers or layers))
    return served_variants(variants, target) if isinstance(target, ServedLM) else variants


def served_variants(variants: Sequence[HeadVariant], target: ServedLM) -> list[HeadVariant]:
    """Return the variants of whose layers a server has the states; log how many are left out.

    Raises:
        InputError: the first one is not among them.
    """
    final = final_state(target.info.num_layers)
    readable = [one for one in variants if {*one.layers, final} <= {*target.layers}]
    start = target.start({layer for variant in variants for layer in variant.layers})
    if variants[0] not in readable:
        found = f"a server with states of layers {', '.join(map(str, target.layers))}"
        wanted = ", ".join(map(str, sorted({*variants[0].layers, final})))
        raise InputError("server", found, wanted, f"Start it: {start}")
    if readable != variants:
        log_note(f"{len(variants) - len(readable)} readings of other layers are left out. To try them: {start}")
    return readable


def answered(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return prompts with their answers as rows, with `input_ids` and `loss_mask`."""
    return [
        {"input_ids": [*prompt, *answer], "loss_mask": [False] * len(prompt) + [True] * len(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def longest_draft(tokens: int, variants: Sequence[HeadVariant]) -> int:
    """Return how many of so many tokens all variants can draft: Medusa has a head for each token, a block a slot."""
    return min(tokens, *(getattr(variant.head.config, name, tokens) for variant in variants for name in LONGEST))


def known_rope(target: CausalLM) -> RotarySettings | None:
    """Return a target's rotary settings; None for a family whose settings are unknown."""
    try:
        return RotarySettings.of(shape_of(target))
    except InputError:
        return None


def mask_tokens(head: DraftHead, target: CausalLM) -> list[int]:
    """Return the tokens of a target that a block drafter may take for its mask, the likeliest first.

    These are the last id, the first one that is no token, and the special tokens. Other heads have none.
    """
    if not isinstance(head.config, BlockConfig):
        return []
    tokenizer, vocab_size = checkpoint_of(target).tokenizer, head.config.vocab_size
    special = [token for token, added in sorted(tokenizer.added_tokens_decoder.items()) if added.special]
    named = [tokenizer.mask_token_id, tokenizer.pad_token_id]
    ids = dict.fromkeys([vocab_size - 1, len(tokenizer), *named, *special[:MOST_MASKS]])
    return [token for token in ids if token is not None and token < vocab_size]


@torch.inference_mode()
def measure(target: CausalLM, rows: Rows, variants: Sequence[HeadVariant] = (), depth: int = 1) -> TextMeasures:
    """Read every row's text once with the target, and draft from every position with every variant.

    rows: truncated to MOST_TOKENS and the contexts. depth: tokens of the first variant's drafts; the others draft at
    most COMPARED.
    """
    layers = {layer for variant in variants for layer in variant.layers}
    context = min([MOST_TOKENS, target.info.max_position, *(variant.head.config.max_position for variant in variants)])
    context -= max(0, depth - COMPARED)  # a draft behind the last token reads its own tokens there
    depths = [depth, *[min(depth, COMPARED)] * len(variants)][: len(variants)]
    drafting = [BranchDrafter(variant.head.net(target), own) for variant, own in zip(variants, depths, strict=True)]
    tally, counts = torch.zeros(2, depth), [[torch.zeros(2, 0, dtype=torch.long)] for _ in variants]
    per_text: list[int] = []
    sums = torch.zeros(5, dtype=torch.float64)  # tokens, chosen, -log p, unknown tokens, unknown choices
    for row in rows:
        ids = row["input_ids"][:context]
        answers = [Answer(begin, end, end) for begin, end in spans(row["loss_mask"][:context])]
        if not answers:
            continue
        text = read(target, ids, answers, SamplingParams(), [*layers])
        sums[:3] += torch.tensor([len(text.best), (~text.foreign).sum(), text.surprise.sum()])
        begun = torch.cat([answer.starts for answer in answers])
        for number, (variant, branches) in enumerate(zip(variants, drafting, strict=True)):
            starts = begun[begun >= branches.min_start]
            if not len(starts):
                continue
            drafted = text.open(branches, len(ids), variant.layers).draft(starts.tolist(), depths[number])
            # Which drafted tokens are accepted, and which are compared: [2, S, K].
            judged = kept_greedily(drafted.tokens.cpu(), starts, text)
            counts[number].append(judged.sum(-1).clamp_max(COMPARED))
            if number == 0:
                per_text.append(len(starts))
                tally += judged.sum(1)
                known = branches.lm_head(drafted.hidden[:1, 0])[0].isfinite().cpu()  # [V]
                said = torch.tensor(ids)[text.places], text.best
                sums[3:] += torch.stack([(~known[tokens]).sum() for tokens in said])
    _, chosen, surprise, *unknown = (sums / sums[0].clamp_min(1)).tolist()
    by_place = [hits / count for hits, count in tally.T.tolist() if count]
    drafts = [Drafts(*torch.cat(own, -1)) for own in counts]
    perplexity = math.exp(min(surprise, 100.0))
    return TextMeasures(chosen, perplexity, by_place, drafts, per_text, (unknown[0], unknown[1]))


def better_variants(as_it_is: Drafts, others: Mapping[str, Drafts], whole: bool = False) -> list[str]:
    """Return the variants that draft better, the best first, by a paired sign test over positions.

    First tokens are compared; later ones where a variant changes no first token, since those also depend on how far the
    head was trained on its own states. whole: compare whole drafts, of a block drafter, which never reads its own
    states.
    """
    better = []
    for label, drafts in others.items():
        lengths, own_lengths = drafts.accepted, as_it_is.accepted
        first, own_first = lengths > 0, own_lengths > 0
        later = whole or torch.equal(first, own_first)
        pair = (lengths, own_lengths) if later else (first.int(), own_first.int())
        wins, losses = int((pair[0] > pair[1]).sum()), int((pair[0] < pair[1]).sum())
        share, own = (float(one.float().mean()) for one in pair)
        gains, reads_own = share >= UNLEARNED * own, drafts.share(2) >= LATER_SOUND * drafts.share() ** 2
        learned = whole or (gains and reads_own if later else gains or share >= STRONG)
        if learned and drafts.share() >= LEAST and sign_test(wins, losses) < CHANCE / len(others):
            better.append(label)
    return sorted(better, key=lambda label: -float(others[label].accepted.float().mean()))


def sign_test(wins: int, losses: int) -> float:
    """Return the probability of at least so many wins in so many fair draws (one-sided sign test, exact)."""
    draws = wins + losses
    k = torch.arange(wins, draws + 1, dtype=torch.float64)
    total = torch.tensor(draws + 1.0, dtype=torch.float64)
    logs = torch.lgamma(total) - torch.lgamma(k + 1) - torch.lgamma(draws - k + 1) - draws * math.log(2)
    return min(1.0, math.exp(torch.logsumexp(logs, 0)))
