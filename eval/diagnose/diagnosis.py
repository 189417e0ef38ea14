"""Diagnose low acceptance of a trained draft head: measure its data, its target and itself, and name the cause.

The head's drafts are compared with the target's first choices on texts: as it is, and in variants that change one
factor each (layers, rotary settings, weight order, switches). A variant that drafts better is the cause.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.text.answers import Supervision, spans
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.eval.diagnose.drafts import (
    CHANCE,
    COMPARED,
    LATER_SOUND,
    STRONG,
    Drafts,
    HeadVariant,
    Rows,
    TextMeasures,
    answered,
    better_variants,
    head_variants,
    known_rope,
    longest_draft,
    mask_tokens,
    measure,
    sign_test,
)
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.heads import load_draft_head
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

# Acceptance of a draft's first token. The EAGLE paper (arXiv 2401.15077) has 0.8 for its heads and 0.6 for Medusa's;
# the acceptance length of 1.5 that users report of too little data means less than 0.5.
FIRST_SOUND = 0.5
TOKENS = 4
# The embedded target's own answers at temperature 1 and those of its draft model: 0.99 and 0.73 to 0.84 first choices,
# perplexity 1.02 and 5 to 20. Drawing 2,000 tokens again moves a share by less than 0.02.
OFF_POLICY, OFF_POLICY_PERPLEXITY = 0.05, 1.5
OWN_PROMPTS, OWN_TOKENS = 32, 64
# Share of answers that may begin elsewhere than after the served prompt: pieces of long conversations do.
MISPLACED = 0.05
# Chosen, not measured: every twentieth token then ends its draft, whatever the head has learned.
UNKNOWN = 0.05
# Loss of defects whose cost is unknown: they rank after those that are measured.
UNMEASURED = 0.01
SHOWN = 4  # variants of a factor, the best ones


@dataclass(frozen=True)
class Finding:
    """One measurement in words.

    Attributes:
        lost: share of tokens that the defect may cost; 0 if nothing is wrong.
        advice: cause and remedy.
        generic: any bad head shows it, so every other cause ranks before it.
    """

    name: str
    measured: str
    lost: float = 0.0
    advice: str = ""
    generic: bool = False


def unsound(by_place: Sequence[float]) -> str:
    """Describe what is bad about drafts, of whose first, second, ... token these shares are accepted, where those
    before it were; empty if nothing is."""
    if not by_place or by_place[0] < FIRST_SOUND:
        return f"the first token is accepted less often than {FIRST_SOUND:.0%}"
    low = min(by_place) < LATER_SOUND * by_place[0]
    return f"a later token is accepted less often than {LATER_SOUND:.0%} of the first" if low else ""


def bad_numbers(metrics: Mapping[str, float]) -> str:
    """Return `unsound` of the metrics of a validation: of tau's rounds, or of the first tokens if it has none."""
    reached = [metrics[name] for name in (f"accepted_{j}" for j in range(1, TOKENS + 1)) if name in metrics]
    reached = reached or [metrics[name] for name in ("top1",) if name in metrics]
    # A place's share counts rounds that accept it and all before it.
    return unsound([now / before for before, now in itertools.pairwise([1.0, *reached]) if before]) if reached else ""


def diagnose(directory: Path, target: CausalLM, rows: Rows, data: Manifest) -> str:
    """Return all findings in the order of the pipeline, then the causes, the likeliest first, as lines for the user.

    directory: of the head. rows: input_ids and loss_mask of texts. data: the manifest of their artifact.

    Raises:
        InputError: no drafter, or another target's. NonFinite: the head's logits.
    """
    head, manifest = load_draft_head(directory, target), read_object(directory / "manifest.json", {})
    variants = head_variants(head, known_rope(target), target, mask_tokens(head, target))
    depth = longest_draft(TOKENS, variants)
    measures = measure(target, rows, variants, depth)
    ttt_steps = (manifest.get("config") or {}).get(head.depth_option)
    # Later tokens of a head that was trained on true states alone say nothing.
    most = ttt_steps or COMPARED
    drafts = {
        variant.label: dataclasses.replace(own, accepted=own.accepted.clamp_max(most))
        for variant, own in zip(variants, measures.drafts, strict=True)
    }
    as_it_is = drafts[variants[0].label]
    whole = isinstance(head.config, BlockConfig)
    better = better_variants(as_it_is, {v.label: drafts[v.label] for v in variants[1:]}, whole)
    findings = [
        off_policy(target, rows, data, measures),
        template(checkpoint_of(target), rows, data, (manifest.get("models") or {}).get("chat_template")),
        *temperature(manifest.get("sampling"), data.sampling),
        *head_findings(head, manifest, measures),
        *misread(variants, drafts, better),
    ]

    lines = [f"{'BAD ' if finding.lost else 'ok  '} {finding.name}: {finding.measured}" for finding in findings]
    causes = sorted((one for one in findings if one.lost), key=lambda one: (one.generic, -one.lost))
    prefix = "Likeliest cause"
    hits, count = max(own.counts()[0] for own in drafts.values())
    first = hits / max(1, count)
    # With so few hits, not even a variant without any could be distinguished from the best.
    unclear = first < STRONG or sign_test(hits, 0) >= CHANCE / max(1, len(variants) - 1)
    if not better and unclear and all(cause.generic for cause in causes):
        lines.append(
            f"Too weak to tell why: under its best reading the first token is accepted in {first:.0%} of the "
            f"drafts; below {STRONG:.0%}, or on few answers, no mistake in its weights or config.json shows."
        )
        prefix = "Also"
    for cause in causes:
        lines.append(f"{prefix} ({cause.name}): {cause.advice}")
        prefix = "Also"
    if prefix == "Likeliest cause":
        bad = unsound(measures.by_place)
        lines.append(f"None of these is why {bad}: train longer, or on more answers." if bad else "Nothing is wrong.")
    return "\n".join(lines)


def misread(variants: Sequence[HeadVariant], drafts: Mapping[str, Drafts], better: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each factor that the variants change."""
    shown = {label: f"{own.share():.3f} {own.share(2):.3f}" for label, own in drafts.items()}
    as_it_is = drafts[variants[0].label]
    for factor in dict.fromkeys(variant.factor for variant in variants[1:]):
        labels = [variant.label for variant in variants if variant.factor == factor]
        best_ones = sorted(labels, key=lambda label: -float(drafts[label].accepted.float().mean()))[:SHOWN]
        text = "; ".join(f"{label} {shown[label]}" for label in best_ones)
        text = f"accepted by place {shown[variants[0].label]} as it is; {text}"
        best = next((label for label in better if label in labels), "")
        lost = max(drafts[best].share(place) - as_it_is.share(place) for place in (1, 2)) if best else 0.0
        advice = (
            f"it drafts better with {best}: it is not read as it was made. Correct that and import it, or train it."
        )
        yield Finding(factor, text, lost, advice)


def off_policy(target: CausalLM, rows: Rows, data: Manifest, whole: TextMeasures) -> Finding:
    """Compare the data's answers with those that the target gives to the same prompts at the data's temperature.

    Where none is recorded, the temperature is 1: the mildest comparison.
    """
    asked = []
    for row in rows[:OWN_PROMPTS]:
        start, end = next((span for span in spans(row["loss_mask"]) if span[0]), (0, 0))
        if 0 < start < target.info.max_position - OWN_TOKENS:
            asked.append((row["input_ids"][:start], row["input_ids"][start : min(end, start + OWN_TOKENS)]))
    text = f"{whole.chosen:.1%} of the answers' tokens are the target's first choice, perplexity {whole.perplexity:.2f}"
    if not asked:
        return Finding("answers", text)
    params = SamplingParams(**(data.sampling or {"temperature": 1.0}))
    prompts, answers = zip(*asked, strict=True)
    generated = generate_all(target, prompts, params, OWN_TOKENS, OWN_PROMPTS, lambda i: RowUniforms("diagnose", 0, i))

    theirs, own = (measure(target, answered(prompts, given)) for given in (answers, generated))
    text += (
        f"; of the first {OWN_TOKENS} of {len(asked)} answers {theirs.chosen:.1%}, {theirs.perplexity:.2f}, and of its "
        f"own to these prompts at temperature {params.temperature:g} {own.chosen:.1%}, {own.perplexity:.2f}"
    )
    lost = own.chosen - theirs.chosen
    if lost <= OFF_POLICY and theirs.perplexity <= OFF_POLICY_PERPLEXITY * own.perplexity:
        return Finding("answers", text)
    advice = "the answers are not what the target says. Let it answer the prompts, as it is served (data responses)"
    return Finding("answers", text, max(lost, UNMEASURED), f"{advice}, and train on that.")


def template(target: Checkpoint, rows: Rows, data: Manifest, trained: str | None = None) -> Finding:
    """Compare where answers begin with where the target's template ends a prompt, and the templates' hashes.

    trained: hash of the template that the head was trained on, if it is recorded.
    """
    try:
        tokenizer = load_chat_tokenizer(target)
    except InputError as error:
        return Finding("template", f"not compared ({error})")
    # The common ending of two prompts is what the template adds before an answer.
    probes = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[::-1] for text in ("Hello.", "Who?")]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False))
    ending = [token for token, _ in same][::-1]
    before = [row["input_ids"][:start] for row in rows for start, _ in spans(row["loss_mask"]) if start]
    wrong = sum(ids[len(ids) - len(ending) :] != ending for ids in before) / max(1, len(before))
    ours, theirs = target.tokenizer_identity["chat_template"], data.identity.get("chat_template")
    text = f"{1 - wrong:.1%} of the answers begin where a served prompt ends; template {theirs}, the target's {ours}"
    if trained not in (None, theirs):
        text += f", the head was trained on {trained}"
    advice = "Make the prompts again with the template that is served, or serve with theirs"
    if wrong > MISPLACED:
        elsewhere = f"the mask's answers do not begin behind {tokenizer.decode(ending)!r}, as those of the target do"
        return Finding("template", text, wrong, f"{elsewhere}. {advice}.")
    if theirs not in (None, ours):
        return Finding("template", text, UNMEASURED, f"the data has another template than the target. {advice}.")
    other = f"the head was trained on another template than the target's. {advice}, and train on that."
    return Finding("template", text, UNMEASURED * (trained not in (None, ours)), other)


def temperature(trained: Mapping[str, Any] | None, data: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Compare the temperatures of the answers that the head was trained on and of these, where both are recorded."""
    if not (trained and data):
        return
    was, now = trained["temperature"], data["temperature"]
    text = f"the head was trained on answers at temperature {was:g}, these are at {now:g}"
    advice = f"{text}. Train on answers at the temperature that is served (data responses --temperature)."
    yield Finding("temperature", text, UNMEASURED * (was != now), advice)


def head_findings(head: DraftHead, manifest: Mapping[str, Any], measures: TextMeasures) -> Iterator[Finding]:
    """Judge the amount of training data, the draft vocabulary, and the later tokens of drafts.

    manifest: of the head; a training records the amount of its data and how many tokens deep it unrolled the head.
    """
    recorded = (manifest.get("samples") or {}).get("training") or {}
    names = {field.name for field in fields(Supervision)}
    if recorded.keys() >= names:
        data = Supervision(**{name: recorded[name] for name in names})
        warning = data.warning() or ""
        advice = warning.removeprefix("warning: ")
        yield Finding("amount", data.text(), UNMEASURED * bool(warning), advice, generic=True)

    tokens, choices = measures.unknown
    text = f"it cannot draft {tokens:.1%} of the answers' tokens, {choices:.1%} of the target's first choices"
    larger = "with a larger --draft-vocab (0: all)" if "draft_vocab" in head.shape(head.config) else "a new head"
    advice = f"its draft vocabulary lacks tokens that the target often says. Train {larger}."
    yield Finding("vocabulary", text, choices if choices > UNKNOWN else 0.0, advice)

    by_place, ttt_steps = measures.by_place, (manifest.get("config") or {}).get(head.depth_option)
    shown = " ".join(f"{share:.3f}" for share in by_place)
    text = f"accepted by place, where the tokens before were: {shown}"
    # Where the first token is bad already, the cause is another one.
    lost = by_place[0] - min(by_place) if head.depth_option and by_place and by_place[0] >= FIRST_SOUND else 0.0
    value = "" if ttt_steps is None else f" ({head.depth_option} was {ttt_steps})"
    option = head.depth_option
    advice = f"it has not learned to read its own states{value}. Train on more, --{option} 3 or 7, or longer."
    if isinstance(head.config, BlockConfig):
        more = "" if getattr(head, "sequential", None) else ", or a head that sees the tokens before (train dspark)"
        advice = f"slots far from the anchor know less of what precedes them. Train longer{more}."
    yield Finding("depth", text, lost if unsound(by_place) else 0.0, advice, generic=True)
