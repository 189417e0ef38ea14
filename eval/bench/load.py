"""Loading what a measurement needs: models and heads that fit each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from draftsmith.data.heads.directory import another_mode, drafter_identity, head_config, load_head
from draftsmith.data.models.loading import check_same_tokenizer, load_lm
from draftsmith.eval.cost.auto import MeasuredTimes
from draftsmith.eval.methods import check_needs
from draftsmith.eval.methods.base import Models, Named
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

# Settings of a command that say how its models are loaded, as `load_lm` takes them.
LOADING = ("dtype", "device", "engine", "trust_remote_code", "packed")
# Tokens beyond prompt and answer that a drafter's cache may hold: no draft of a round is longer.
DRAFT_ROOM = 130


def load_models(
    named: Iterable[Named],
    paths: Mapping[str, str | None],
    sequence_length: int,
    params: SamplingParams,
    target: CausalLM,
    **how: Any,
) -> Models:
    """The models that the methods need, on top of the loaded target; others are not read.

    Drafts end where the target's answers do; who ignores end tokens takes `Models.ends` away.

    paths: flag -> what the user passed. sequence_length: longest prompt and answer together, in tokens.
    how: LOADING.

    Raises:
        InputError: a missing or unfitting model, or a draft whose context is too short.
    """
    named = list(named)
    for method in named:
        check_needs(method, paths)
    needed = {flag for method in named for flag in method.method.needs}
    longest = min(sequence_length, target.info.max_position)
    draft = mid = eagle = acceptance = None
    if "draft" in needed:
        draft = load_draft("draft", paths, target, longest, **how)
    if "mid" in needed:
        mid = load_draft("mid", paths, target, longest, **how)
    if "eagle" in needed:
        eagle = load_head(str(paths["eagle"]), target if eagle_owner(named) == "target" else mid, kind="eagle")
    if "acceptance" in needed:
        acceptance = load_acceptance(named, paths, target, draft)
        warn_about_sampling(str(paths["acceptance"]), params)
    ends = tuple(target.info.eos_ids)
    return Models(target, draft, mid, eagle, acceptance, dict(paths), longest + DRAFT_ROOM, ends, MeasuredTimes())


def eagle_owner(named: Iterable[Named]) -> str:
    """Flag of the model that the run's EAGLE head was trained for."""
    owners = {item.method.eagle_for for item in named if "eagle" in item.method.needs}
    if len(owners) > 1:
        found = "methods whose EAGLE head drafts for the target, and methods whose head drafts for --mid"
        raise InputError("methods", found, "one owner of --eagle", "Run them one after the other.")
    return owners.pop()


def load_acceptance(
    named: Iterable[Named], paths: Mapping[str, str | None], target: CausalLM, draft: CausalLM | None
) -> nn.Module:
    """The acceptance head, which fits one drafter: it reads the hidden states of the draft model or the EAGLE head."""
    readers = {
        "eagle" if "eagle" in item.method.needs else "draft" for item in named if "acceptance" in item.method.needs
    }
    if len(readers) > 1:
        found = "methods whose acceptance head reads --draft, and methods whose head reads --eagle"
        raise InputError("methods", found, "one drafter for --acceptance", "Run them one after the other.")
    directory = str(paths["acceptance"])
    if readers == {"draft"}:
        head = load_head(directory, draft, kind="acceptance")
    else:
        head = load_head(directory, target, kind="acceptance", identity=drafter_identity(str(paths["eagle"]), target))
    assert isinstance(head, AcceptanceHead)
    check_judges(directory, head, named)
    return head


def check_judges(directory: str, head: AcceptanceHead, named: Iterable[Named]) -> None:
    """A head judges the drafted token of a chain or the children of a tree's node, whose probabilities differ.

    Raises:
        InputError: a method's head judges the other, or methods need both.
    """
    judged = {item.method.judged for item in named if "acceptance" in item.method.needs}
    if len(judged) > 1:
        found = "methods whose acceptance head judges chains, and methods whose head judges trees"
        raise InputError("methods", found, "one kind of --acceptance", "Run them one after the other.")
    if judged != {head.config.judges}:
        (wanted,) = judged
        labels = " --children C in its labels and" if wanted == "tree" else ""
        found = f"{directory}, which judges {head.config.judges}s"
        raise InputError(
            "acceptance", found, f"a head that judges {wanted}s", f"Train one with{labels} --judges {wanted}."
        )


def reads(directory: str) -> Literal["draft", "eagle"]:
    """The drafter that an acceptance head was trained for."""
    return "eagle" if "eagle" in (head_config(directory).get("target") or {}) else "draft"


def load_draft(flag: str, paths: Mapping[str, str | None], target: CausalLM, longest: int, **how: Any) -> CausalLM:
    """A smaller model that speaks the target's tokens."""
    path = str(paths[flag])
    check_same_tokenizer(str(paths["target"]), path, flag)
    draft = load_lm(path, **how)
    ours, theirs = target.info, draft.info
    if theirs.vocab_size != ours.vocab_size:
        found = f"{path} of vocabulary {theirs.vocab_size}"
        raise InputError(flag, found, f"{ours.vocab_size}, the target's", "Use a draft of the same family.")
    if theirs.max_position < longest:
        found = f"{path} with a context of {theirs.max_position}"
        raise InputError(flag, found, f"{longest} or more", "Lower --max-new-tokens, or use another draft.")
    return draft


def warn_about_sampling(directory: str, params: SamplingParams) -> None:
    """Acceptance labels hold for the sampling settings they were made with; another mode makes the head mislead."""
    warning = another_mode(directory, params)
    if warning is not None:
        print(f"draftsmith: warning: {warning}", file=sys.stderr)
