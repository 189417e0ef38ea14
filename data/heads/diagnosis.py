"""Why a head drafts badly: what can be measured of its data, its target and itself, each with a verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.data.engines.own import RowSource, generate_all
from draftsmith.data.heads.directory import load_draft_head
from draftsmith.data.heads.readings import Measured, Reading, measure, readings_of
from draftsmith.data.models.loading import llama_shape, tokenizer_identity
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.reading import metric_rows, read_object
from draftsmith.data.text.answers import Supervision, spans
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.modules.formats.alternatives import DEPTH, STRONG, Comparison, compare_readings, right
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

Rows = Sequence[Mapping[str, Any]]
# A first token that is right less often is bad: the EAGLE paper (arXiv 2401.15077) has 0.8 for its heads and 0.6 for
# Medusa's, and the acceptance length of 1.5 that users report of too little data means less than 0.5.
FIRST_SOUND = 0.5
# A later token, where those before were right, as a share of the first: 0.94 for the fourth of our EAGLE-3 head trained
# on three passes, 0.31 for the third of the same head while it was trained on one.
LATER_SOUND, TOKENS = 0.8, 4
# The embedded target's own answers at temperature 1 and those of its draft model: 0.99 and 0.73 to 0.84 first choices,
# perplexity 1.02 and 5 to 20. Drawing 2,000 tokens anew moves a share by less than 0.02.
OFF_POLICY, OFF_POLICY_PERPLEXITY = 0.05, 1.5
OWN_PROMPTS, OWN_TOKENS = 32, 64
# Answers elsewhere than behind the served prompt: some are pieces of long conversations.
MISPLACED = 0.05
# Chosen, not measured: every twentieth token then ends its draft, whatever the head has learned.
UNKNOWN = 0.05
# top1 of training above validation's, validation loss above its lowest, a last rise of top1: twice a sound run's.
OVERFIT, RISEN, RISING = 0.1, 1.1, 0.02
# Of defects that cost nobody knows how much: they rank behind those that are measured.
UNTOLD = 0.01


@dataclass(frozen=True)
class Finding:
    """One thing that was measured, in words. lost: the share of tokens that it may cost, 0 where nothing is wrong; else
    advice is the cause and the remedy. generic: any bad head shows it, so every other cause ranks before it."""

    name: str
    measured: str
    lost: float = 0.0
    advice: str = ""
    generic: bool = False


def unsound(agreement: Sequence[float]) -> str:
    """What is bad about the agreement of a draft's first, second, .. token with the target; nothing where it is not."""
    if not agreement or agreement[0] < FIRST_SOUND:
        return f"the first token is right less often than {FIRST_SOUND:.0%}"
    low = min(agreement) < LATER_SOUND * agreement[0]
    return f"a later token is right less often than {LATER_SOUND:.0%} of the first" if low else ""


def bad_numbers(metrics: Mapping[str, float]) -> str:
    """`unsound` of the metrics of a validation."""
    names = ["agreement_1" if "agreement_1" in metrics else "top1", *(f"agreement_{j}" for j in range(2, TOKENS + 1))]
    return unsound([metrics[name] for name in names if name in metrics]) if names[0] in metrics else ""


def diagnose(directory: Path, target: CausalLM, name: str, rows: Rows, data: Manifest) -> str:
    """All findings in the order of a pipeline, then the causes, the likeliest first, in lines for the user.

    directory: of the head; where it lies in a training's output, that is read too. name: of the target, for its
    tokenizer. rows: input_ids and loss_mask of texts. data: the manifest of what they are from.

    Raises:
        InputError: no drafter, or another target's. NonFinite: the head's logits.
    """
    head, made = load_draft_head(directory, target), read_object(directory / "manifest.json", {})
    try:
        shape = llama_shape(target, name)
    except InputError:  # of a family whose rotary positions are not known
        shape = None
    readings = readings_of(head, shape, target.info.num_layers)
    depth = min(TOKENS, getattr(head.config, "num_heads", TOKENS))  # Medusa has a head for each token
    own = measure(target, rows, readings, depth)
    passes = (made.get("config") or {}).get(head.passes)
    # Of a head that was trained on true states alone, later tokens say nothing.
    lengths = {r.label: n.clamp_max(passes or DEPTH) for r, n in zip(readings, own.lengths, strict=True)}
    comparison = compare_readings(lengths[readings[0].label], {r.label: lengths[r.label] for r in readings[1:]})
    findings = [
        off_policy(target, rows, data, own),
        template(name, rows, data, (made.get("models") or {}).get("chat_template")),
        *amount((made.get("samples") or {}).get("training") or {}),
        vocabulary(*own.unknown),
        by_depth(own.agreement, head.passes, passes),
        *misread(readings, lengths, comparison),
        *trained(directory.parent / "metrics.csv"),
    ]
    lines = [f"{'BAD ' if found.lost else 'ok  '} {found.name}: {found.measured}" for found in findings]
    causes = sorted((found for found in findings if found.lost), key=lambda found: (found.generic, -found.lost))
    begins = "Likeliest cause"
    if comparison.weak and all(found.generic for found in causes):
        lines.append(
            f"Too weak to tell why: under its best reading the first token is right in {comparison.first:.0%} of the "
            f"drafts; below {STRONG:.0%}, or on few answers, no mistake in its weights or config.json shows."
        )
        begins = "Also"
    for found in causes:
        lines.append(f"{begins} ({found.name}): {found.advice}")
        begins = "Also"
    if begins == "Likeliest cause":
        bad = unsound(own.agreement)
        lines.append(f"None of these is why {bad}: train longer, or on more answers." if bad else "Nothing is wrong.")
    return "\n".join(lines)


def off_policy(target: CausalLM, rows: Rows, data: Manifest, whole: Measured) -> Finding:
    """The data's answers against those that the target gives to some of the same prompts, at the data's temperature; at
    1 where none is recorded, which is the mildest comparison."""
    asked = []
    for row in rows[:OWN_PROMPTS]:
        start, end = next((span for span in spans(row["loss_mask"]) if span[0]), (0, 0))
        if 0 < start < target.info.max_position - OWN_TOKENS:
            asked.append((row["input_ids"][:start], row["input_ids"][start : min(end, start + OWN_TOKENS)]))
    said = f"{whole.chosen:.1%} of the answers' tokens are the target's first choice, perplexity {whole.perplexity:.2f}"
    if not asked:
        return Finding("answers", said)
    params = SamplingParams(**(data.sampling or {"temperature": 1.0}))
    prompts, answers = zip(*asked, strict=True)
    made = generate_all(target, prompts, params, OWN_TOKENS, OWN_PROMPTS, lambda i: RowSource("diagnose", 0, i))
    theirs, own = (
        measure(
            target,
            [
                {"input_ids": prompt + answer, "loss_mask": [False] * len(prompt) + [True] * len(answer)}
                for prompt, answer in zip(prompts, given, strict=True)
            ],
        )
        for given in (answers, made)
    )
    said += (
        f"; of the first {OWN_TOKENS} of {len(asked)} answers {theirs.chosen:.1%}, {theirs.perplexity:.2f}, and of its "
        f"own to these prompts at temperature {params.temperature:g} {own.chosen:.1%}, {own.perplexity:.2f}"
    )
    lost = own.chosen - theirs.chosen
    if lost <= OFF_POLICY and theirs.perplexity <= OFF_POLICY_PERPLEXITY * own.perplexity:
        return Finding("answers", said)
    advice = "the answers are not what the target says. Let it answer the prompts, as it is served (data responses)"
    return Finding("answers", said, max(lost, UNTOLD), f"{advice}, and train on that.")


def template(name: str, rows: Rows, data: Manifest, trained: str | None = None) -> Finding:
    """Compare where answers begin, as the mask has them, with where the target's own template ends a prompt; and the
    templates of the data and of what the head was trained on with the target's.

    trained: hash of the latter, where it is recorded.
    """
    try:
        tokenizer = load_chat_tokenizer(name)
    except InputError as error:
        return Finding("template", f"not compared ({error})")
    probes = [prompt_ids(tokenizer, [{"role": "user", "content": said}])[::-1] for said in ("Hello.", "Who?")]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False))
    ending = [token for token, _ in same][::-1]
    before = [row["input_ids"][:start] for row in rows for start, _ in spans(row["loss_mask"]) if start]
    wrong = sum(ids[len(ids) - len(ending) :] != ending for ids in before) / max(1, len(before))
    ours, theirs = tokenizer_identity(name)["chat_template"], data.identity.get("chat_template")
    said = f"{1 - wrong:.1%} of the answers begin where a served prompt ends; template {theirs}, the target's {ours}"
    if trained not in (None, theirs):
        said += f", the head was trained on {trained}"
    advice = "Make the prompts again with the template that is served, or serve with theirs"
    if wrong > MISPLACED:
        elsewhere = f"the mask's answers do not begin behind {tokenizer.decode(ending)!r}, as those of the target do"
        return Finding("template", said, wrong, f"{elsewhere}. {advice}.")
    if theirs not in (None, ours):
        return Finding("template", said, UNTOLD, f"the data has another template than the target. {advice}.")
    other = f"the head was trained on another template than the target's. {advice}, and train on that."
    return Finding("template", said, UNTOLD * (trained not in (None, ours)), other)


def amount(recorded: Mapping[str, Any]) -> Iterator[Finding]:
    """What the training recorded of its answers, if it did."""
    names = {field.name for field in fields(Supervision)}
    if recorded.keys() >= names:
        learned = Supervision(**{name: recorded[name] for name in names})
        advice = learned.warning() or ""
        yield Finding("amount", learned.text(), UNTOLD * bool(advice), advice.removeprefix("warning: "), generic=True)


def vocabulary(tokens: float, choices: float) -> Finding:
    """tokens, choices: shares of the answers' tokens and of the target's first choices that the head does not know."""
    advice = "its draft vocabulary lacks tokens that the target often says. Train with a larger --draft-vocab (0: all)."
    said = f"it cannot draft {tokens:.1%} of the answers' tokens, {choices:.1%} of the target's first choices"
    return Finding("vocabulary", said, choices if choices > UNKNOWN else 0.0, advice)


def by_depth(agreement: Sequence[float], setting: str, passes: int | None) -> Finding:
    """Later tokens of a draft. Where the first is bad already, the cause is another one. setting: see
    `DraftHead.passes`; passes: what it was."""
    shown = ", ".join(f"{share:.3f}" for share in agreement)
    said = f"tokens 1 to {len(agreement)} of a draft are right, where those before were: {shown}"
    if not setting or not agreement or agreement[0] < FIRST_SOUND or not unsound(agreement):
        return Finding("depth", said)
    known = "" if passes is None else f" ({setting} was {passes})"
    advice = f"it has not learned to read its own states{known}. Train on more, --{setting} 3 or 7, or longer."
    return Finding("depth", said, agreement[0] - min(agreement), advice, generic=True)


def misread(readings: Sequence[Reading], lengths: Mapping[str, Tensor], comparison: Comparison) -> Iterator[Finding]:
    """Compare how the head drafts as it is with how it drafts under other readings, a finding for each factor that they
    change. lengths: as of `Measured`, by label."""
    shown = {label: f"{right(own):.3f} / {right(own, 2):.3f}" for label, own in lengths.items()}
    own = lengths[readings[0].label]
    for factor in dict.fromkeys(reading.factor for reading in readings[1:]):
        labels = [reading.label for reading in readings if reading.factor == factor]
        said = "; ".join(f"{label} {shown[label]}{' (alike)' * (label in comparison.alike)}" for label in labels)
        said = f"first token / first two right {shown[readings[0].label]} as it is; {said}"
        best = next((label for label in comparison.better if label in labels), "")
        lost = max(right(lengths[best], depth) - right(own, depth) for depth in (1, 2)) if best else 0.0
        advice = (
            f"it drafts better with {best}: it is not read as it was made. Correct that and import it, or train it."
        )
        yield Finding(factor, said, lost, advice)


def trained(file: Path) -> Iterator[Finding]:
    """Validation against training along the steps, of a training's metrics.csv, if it is there."""
    curve = metric_rows(file) if file.is_file() else []
    names = ("val/loss", "val/top1", "train/top1")
    loss, top1, learned = ([float(row[name]) for row in curve if row.get(name)] for name in names)
    if min(len(loss), len(top1)) < 2 or not learned:
        return
    gap, risen, rise = learned[-1] - top1[-1], loss[-1] / min(loss), top1[-1] - top1[-2]
    said = f"top1 of training {learned[-1]:.3f}, of validation {top1[-1]:.3f}, {rise:+.3f} since the one before; "
    said += f"validation loss {risen - 1:.0%} above its lowest, validation {loss.index(min(loss)) + 1} of {len(loss)}"
    if gap > OVERFIT or risen > RISEN:
        advice = "it overfits. Train for fewer --epochs, or on more answers."
        yield Finding("training", said, max(gap, UNTOLD), advice, generic=True)
    else:
        lost = rise if rise > RISING else 0.0
        advice = "it ended while the head still learned. Train for more --epochs."
        yield Finding("training", said, lost, advice, generic=True)
