"""Why a head drafts badly: what can be measured of its data, its target and itself, each with a verdict."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.answering.batched import answer_all, row_uniforms
from draftsmith.data.heads.readings import AnsweredText, Measured, Reading, measure, other_readings
from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.text.answers import Supervision, spans
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

# A first token that is right less often is bad: EAGLE's papers have 0.7 to 0.8, Medusa's 0.6, and heads with an
# acceptance length of 1.5, as users report of few or foreign data, less than 0.4.
FIRST_SOUND = 0.5
# A later token, given those before it, as a share of the first: 0.85 at the fifth token in EAGLE-1's paper, 0.98 at the
# third of our EAGLE-3 head trained on three passes, 0.31 after training on one.
LATER_SOUND = 0.8
# The embedded target on its own sampled answers and on its draft's: 0.99 and 0.73 to 0.84 first choices, perplexity
# 1.02 and 5 to 20. Drawn answers of another 2,000 tokens move its share by less than 0.02.
OFF_POLICY, OFF_POLICY_PERPLEXITY = 0.05, 1.5
OWN_PROMPTS, OWN_TOKENS = 32, 64
# Answers that do not follow the served prompt: a few are conversations cut to the context.
MISPLACED = 0.05
# A quarter of a vocabulary holds 95 % of what is written (FR-Spec, arXiv 2502.14856).
UNKNOWN = 0.05
# The standard error of a difference on the same 3,000 tokens is below 0.005, and as much is nothing to win.
CLEARLY_BETTER, OTHER_TEXTS = 0.02, 48
# top1 of training above that of validation, loss above its lowest, and a last step up that says it is not done.
OVERFIT, RISEN, RISING = 0.1, 1.1, 0.02
DEPTH = 4
# Defects whose share of the tokens nobody can tell rank behind those where it is measured.
UNTOLD = 0.01


@dataclass(frozen=True)
class Subject:
    """What is diagnosed.

    name: of the target, for its tokenizer. texts: to measure on. data: the manifest of what they are from. manifest:
    the head's own. shape: the target's sizes, where they are known. curve: rows of the training's metrics.csv.
    """

    head: DraftHead
    target: CausalLM
    name: str
    texts: Sequence[AnsweredText]
    data: Manifest
    manifest: Mapping[str, Any] = field(default_factory=dict)
    shape: LlamaConfig | None = None
    curve: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Finding:
    """One thing measured, in words.

    lost: the share of tokens that it may cost; 0 where nothing is wrong, else cause and remedy say what.
    """

    name: str
    measured: str
    lost: float = 0.0
    cause: str = ""
    remedy: str = ""


def unsound(agreement: Sequence[float]) -> str:
    """What is bad about the agreement of a draft's first, second, .. token with the target; nothing where it is not."""
    if not agreement or agreement[0] < FIRST_SOUND:
        return f"the first token is right less often than {FIRST_SOUND:.0%}"
    if min(agreement) < LATER_SOUND * agreement[0]:
        return f"a later token is right less often than {LATER_SOUND:.0%} of the first"
    return ""


def bad_numbers(metrics: Mapping[str, float]) -> str:
    """`unsound` of a validation's metrics."""
    first = metrics.get("agreement_1", metrics.get("top1"))
    later = (metrics.get(f"agreement_{number}") for number in range(2, DEPTH + 1))
    return "" if first is None else unsound([first, *(value for value in later if value is not None)])


def diagnose(subject: Subject) -> tuple[list[Finding], str]:
    """All findings, in the order of a pipeline, and what is bad about the head's own numbers, if anything is.

    Raises:
        NonFinite: the target's or the head's numbers.
    """
    head = subject.head
    depth = min(DEPTH, head.longest or DEPTH)
    own = measure(subject.target, subject.texts, [Reading("", head, layers_of(subject), depth)])
    agreement = own.agreement[0]
    others = other_readings(head, subject.shape, subject.target.info.num_layers)
    read = measure(subject.target, subject.texts[:OTHER_TEXTS], others)
    findings = [
        off_policy(subject, own),
        template(subject),
        amount(subject),
        vocabulary(own),
        by_depth(subject, agreement),
        *misread(others, read),
        *trained(subject.curve),
    ]
    return findings, unsound(agreement)


def layers_of(subject: Subject) -> tuple[int, ...]:
    return subject.head.capture or (subject.target.info.num_layers,)


def off_policy(subject: Subject, whole: Measured) -> Finding:
    """Answers of the data against the target's own to some of the same prompts, at the data's temperature; at 1 where
    none is recorded, which is the mildest comparison."""
    target, asked = subject.target, []
    for text in subject.texts:
        start, end = next((span for span in spans(text.mask) if span[0] > 0), (0, 0))
        if 0 < start < target.info.max_position - 1 and len(asked) < OWN_PROMPTS:
            asked.append((text.ids[:start], text.ids[start : min(end, start + OWN_TOKENS)]))
    said = f"{whole.chosen:.1%} of the answers' tokens are the target's first choice, perplexity {whole.perplexity:.2f}"
    if not asked:
        return Finding("answers", said)
    sampling = subject.data.sampling or {"temperature": 1.0}
    if isinstance(sampling["temperature"], list):  # of labels
        sampling = {"temperature": 1.0}
    params, prompts = SamplingParams(**sampling), [prompt for prompt, _ in asked]
    made = answer_all(
        target, prompts, params, OWN_TOKENS, OWN_PROMPTS, lambda i: row_uniforms("diagnose", 0, i, OWN_TOKENS)
    )
    theirs, ours = (
        measure(target, [answered(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)])
        for answers in ([answer for _, answer in asked], made)
    )
    lost = ours.chosen - theirs.chosen
    said += (
        f"; of the first {OWN_TOKENS} of {len(asked)} answers {theirs.chosen:.1%}, {theirs.perplexity:.2f}, of its own "
        f"to the same prompts at temperature {params.temperature:g} {ours.chosen:.1%}, {ours.perplexity:.2f}"
    )
    if lost <= OFF_POLICY and theirs.perplexity <= OFF_POLICY_PERPLEXITY * ours.perplexity:
        return Finding("answers", said)
    recorded, weights = subject.data.identity.get("target") or {}, target.info.identity.get("weights")
    another = recorded.get("weights") not in (None, weights)
    cause = "the answers are not what the target would say" + (", and another target is recorded" if another else "")
    remedy = "Let the target answer the prompts (data responses) as it is served, and train on that"
    return Finding("answers", said, max(lost, UNTOLD), cause, remedy)


def answered(prompt: list[int], answer: list[int]) -> AnsweredText:
    return AnsweredText(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def template(subject: Subject) -> Finding:
    """Whether answers, as the mask has them, begin where the target's own template ends a prompt."""
    try:
        tokenizer = load_chat_tokenizer(subject.name)
    except InputError as error:
        return Finding("template", f"not compared ({error})")
    probes = [prompt_ids(tokenizer, [{"role": "user", "content": said}]) for said in ("Hello.", "Who?")]
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, probes), strict=False))
    ending = [token for token, _ in common][::-1]
    begins = [text.ids[:start] for text in subject.texts for start, _ in spans(text.mask) if start]
    right = sum(ids[len(ids) - len(ending) :] == ending for ids in begins)
    share = right / max(1, len(begins))
    ours, theirs = tokenizer_identity(subject.name)["chat_template"], subject.data.identity.get("chat_template")
    said = f"{share:.1%} of the answers begin where a served prompt ends"
    same = theirs in (None, ours)
    said += f"; the data's template is {'the' if same else 'not the'} target's"
    if begins and share < 1 - MISPLACED:
        cause = f"answers begin elsewhere than behind {tokenizer.decode(ending)!r}, where the target is asked to answer"
        remedy = "Make the prompts again with the served template; its {% generation %} marks the answers"
        return Finding("template", said, 1 - share, cause, remedy)
    if not same:
        cause = f"the data was made with template {theirs}, and the target's is {ours}"
        return Finding("template", said, UNTOLD, cause, "Serve with the data's template, or make the prompts again")
    return Finding("template", said)


def amount(subject: Subject) -> Finding:
    """Whether the head had enough to learn from, by what its training recorded; else by the texts at hand."""
    recorded = (subject.manifest.get("samples") or {}).get("training") or {}
    names = [spec.name for spec in dataclasses.fields(Supervision)]
    if recorded.keys() >= set(names):
        learned = Supervision(**{name: recorded[name] for name in names})
    else:
        return Finding("amount", "the head does not say what it was trained on")
    warning = learned.warning()
    if warning is None:
        return Finding("amount", learned.text())
    cause, _, remedy = warning.removeprefix("warning: ").rpartition(". Use ")
    return Finding("amount", learned.text(), UNTOLD, cause, f"Use {remedy.removesuffix('.')}")


def vocabulary(own: Measured) -> Finding:
    shares = f"{own.unknown_tokens:.1%} of the answers' tokens, {own.unknown_choices:.1%} of the target's first choices"
    said = f"it cannot draft {shares}"
    if own.unknown_choices <= UNKNOWN:
        return Finding("vocabulary", said)
    cause = "its draft vocabulary lacks tokens that the target says often"
    remedy = "Train with a larger --draft-vocab, on data like that which will be served (0 takes all tokens)"
    return Finding("vocabulary", said, own.unknown_choices, cause, remedy)


def by_depth(subject: Subject, agreement: Sequence[float]) -> Finding:
    """Later tokens of a draft; where the first is bad already, its cause is another one."""
    shown = ", ".join(f"{share:.3f}" for share in agreement)
    said = f"tokens 1 to {len(agreement)} of a draft are the target's first choice, where those before were: {shown}"
    setting = subject.head.passes
    if not setting or not unsound(agreement) or agreement[0] < FIRST_SOUND:
        return Finding("depth", said)
    passes = (subject.manifest.get("config") or {}).get(setting)
    known = "" if passes is None else f" ({setting} was {passes})"
    cause = f"later tokens are read behind its own states, which it has not learned to do{known}"
    more = "Train longer with more passes" if isinstance(passes, int) and passes > 1 else "Train on more passes"
    return Finding("depth", said, agreement[0] - min(agreement), cause, f"{more} (--{setting} 3 or more)")


def misread(readings: Sequence[Reading], read: Measured) -> Iterator[Finding]:
    """The head as it is against itself with other layers, and with other rotary positions."""
    own, *found = [(one[0] if one else 0.0) for one in read.agreement]
    others = list(zip(readings[1:], found, strict=True))
    for name in ("layers", "rotary"):
        tried = {reading.label: first for reading, first in others if reading.label.startswith(name)}
        if not tried:
            continue
        said = f"first token {own:.3f} as it is; " + "; ".join(f"{label} {first:.3f}" for label, first in tried.items())
        best = max(tried, key=lambda label: tried[label])
        if tried[best] - own <= CLEARLY_BETTER:
            yield Finding(name, said)
            continue
        remedy = f"Correct its config.json where it comes from ({best}) and import it, or train it again"
        if name == "layers":
            remedy += "; systems that number the outputs of layers say one less"
        yield Finding(name, said, tried[best] - own, f"it is better with {best} than with its own", remedy)


def trained(curve: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Validation against training, along the steps."""

    def column(name: str) -> tuple[np.ndarray, np.ndarray]:
        kept = [(float(row["step"]), float(row[name])) for row in curve if row.get(name)]
        steps, values = np.array(kept).reshape(-1, 2).T
        return steps, values

    (steps, loss), (_, top1), (_, learned) = column("val/loss"), column("val/top1"), column("train/top1")
    if len(steps) < 2 or len(top1) < 2 or not len(learned):
        return
    lowest = int(loss.argmin())
    gap, risen = float(learned[-3:].mean() - top1[-1]), float(loss[-1] / loss[lowest])
    said = (
        f"top1 of training {learned[-3:].mean():.3f}, of validation {top1[-1]:.3f}; validation loss lowest at step "
        f"{steps[lowest]:.0f} of {steps[-1]:.0f}, {risen - 1:.0%} above that at the end"
    )
    if gap > OVERFIT or risen > RISEN:
        remedy = "Train for fewer --epochs, or on more data"
        yield Finding(
            "training", said, max(gap, UNTOLD), "it overfits: training goes on and validation does not", remedy
        )
    elif top1[-1] - top1[-2] > RISING:
        rise = float(top1[-1] - top1[-2])
        yield Finding("training", said, rise, "its training ended while it still learned", "Train for more --epochs")
    else:
        yield Finding("training", said)


def curve_of(head: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv of the run that a head's directory lies in; none where it lies in none."""
    file = head.parent / "metrics.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def report(findings: Sequence[Finding], bad: str) -> str:
    """Lines for the user: every finding, then the causes, the likeliest first."""
    lines = [f"{'BAD ' if found.lost else 'ok  '} {found.name}: {found.measured}" for found in findings]
    causes = sorted((found for found in findings if found.lost), key=lambda found: -found.lost)
    for number, found in enumerate(causes):
        lines.append(f"{'Also' if number else 'Likeliest cause'} ({found.name}): {found.cause}. {found.remedy}.")
    if not causes:
        lines.append(
            f"None of these is the cause: {bad}. Train longer, or on more answers." if bad else "Nothing is wrong."
        )
    return "\n".join(lines)
