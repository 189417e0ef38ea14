"""Loading what a measurement needs: models and heads that fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.data.console import log_note
from draftsmith.data.heads.directory import another_mode, drafter_identity, head_config, load_head
from draftsmith.data.models.loading import check_device, check_same_tokenizer, load_lm
from draftsmith.data.settings import MODEL, ROLES
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.tree import MAX_NODES, StaticTree
from draftsmith.modules.drafters import learned
from draftsmith.modules.drafters.methods import Models, Named, check_needs
from draftsmith.modules.engine.low_precision import Precision, check_precision
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, at_most

# Tokens beyond prompt and answer that a drafter's cache may hold: no draft of a round is longer.
DRAFT_ROOM = 130


def check_methods(named: Iterable[Named], paths: Mapping[str, str]) -> dict[str, StaticTree]:
    """What can be found wrong before anything is loaded: models that are missing, draft trees that are none. Returns
    the trees by name. paths: role or kind -> what the user passed (`DraftSettings.paths`)."""
    trees: dict[str, StaticTree] = {}
    for method in named:
        check_needs(method, paths)
        trees |= {name: read_tree(name) for name in method.method.trees}
    return trees


def load_models(
    named: Sequence[Named],
    paths: Mapping[str, str],
    sequence_length: int,
    params: SamplingParams,
    target: CausalLM,
    draft_precision: Precision = "dtype",
    **how: Any,
) -> Models:
    """The models that the methods need, on top of the loaded target; others are not read.

    Drafts end where the target's answers do; who ignores end tokens takes `Models.ends` away.

    paths: as of `check_methods`. sequence_length: longest prompt and answer together, in tokens. how: as of
        `load_lm`, for the target. draft_precision: of what drafts; `mid` stays as the target.

    Raises:
        InputError: a missing or unfitting model, or a draft whose context is too short.
    """
    trees = check_methods(named, paths)
    needed = dict.fromkeys(need for method in named for need in method.method.needs)
    longest = min(sequence_length, target.info.max_position)
    draft, mid = (
        load_draft(role, paths, target, longest, **how | own) if role in needed else None
        for role, own in ((MODEL, {"precision": draft_precision}), ("mid", {}))
    )
    heads = {}
    for kind in needed:
        if kind not in (MODEL, *ROLES):
            owner = target if head_owner(named, kind) == "target" else mid
            check_precision("draft_precision", draft_precision, str(target.device))
            head: Any = load_head(paths[kind], owner, kind=kind)
            head.draft_in(draft_precision, owner)
            heads[kind] = head
    acceptance = None
    if "acceptance" in needed:
        acceptance = load_acceptance(named, paths, target, draft)
        warn_about_sampling(paths["acceptance"], params)
    capacity, ends = longest + DRAFT_ROOM, tuple(target.info.eos_ids)
    return Models(target, draft, mid, heads, acceptance, dict(paths), capacity, ends, trees, MeasuredTimes())


def load_run(
    config: Any, named: Sequence[Named], prompts: Sequence[BenchPrompt], max_new_tokens: int, params: SamplingParams
) -> Models:
    """The target of a command's settings and the models of its methods, with room for these prompts and answers, on
    the threads that the settings say.

    Raises:
        InputError: as `load_models`; no such device; a prompt that leaves no room in the context.
    """
    check_methods(named, config.paths)
    check_device(config.device)
    torch.set_num_threads(config.num_threads)
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence(prompts, max_new_tokens, target.info.max_position)
    models = load_models(named, config.paths, longest, params, target, config.draft_precision, **config.loading)
    return replace(models, ends=()) if config.ignore_eos else models


def head_owner(named: Iterable[Named], kind: str) -> str:
    """The model that the run's head of this kind was trained for: target or mid."""
    owners = {item.method.drafts_for for item in named if kind in item.method.needs}
    if len(owners) > 1:
        found = f"methods whose {kind} head drafts for the target, and methods whose head drafts for --mid"
        raise InputError("methods", found, f"one owner of the {kind} head", "Run them one after the other.")
    return owners.pop()


def load_acceptance(
    named: Iterable[Named], paths: Mapping[str, str], target: CausalLM, draft: CausalLM | None
) -> AcceptanceHead:
    """The acceptance head, which fits one drafter: it reads the hidden states of the draft model or of a head."""
    by_head = [item.method for item in named if "acceptance" in item.method.needs]
    readers = {next(need for need in method.needs if need not in ROLES) for method in by_head}
    if len(readers) > 1:
        found = f"methods whose acceptance head reads what {' and what '.join(sorted(readers))} drafts"
        raise InputError("methods", found, "one drafter for --acceptance", "Run them one after the other.")
    directory, (reader,) = paths["acceptance"], readers
    if reader == MODEL:
        head = load_head(directory, draft, kind="acceptance")
    else:
        head = load_head(directory, target, kind="acceptance", identity=drafter_identity(paths[reader], target))
    assert isinstance(head, AcceptanceHead)
    return head


def trained_for(directory: str) -> str:
    """The drafter that an acceptance head was trained for: `draft`, or a head's kind."""
    config = head_config(directory)
    # Heads of earlier versions say it only by the drafter's hash, which stands beside those of its target.
    of_target = config.get("target") or {}
    return config.get("drafter") or next((kind for kind in learned() if kind in of_target), MODEL)


def load_draft(role: str, paths: Mapping[str, str], target: CausalLM, longest: int, **how: Any) -> CausalLM:
    """A smaller model that speaks the target's tokens."""
    path = paths[role]
    check_same_tokenizer(paths["target"], path, role)
    draft = load_lm(path, **how)
    ours, theirs = target.info, draft.info
    if theirs.vocab_size != ours.vocab_size:
        found = f"{path} of vocabulary {theirs.vocab_size}"
        raise InputError(role, found, f"{ours.vocab_size}, the target's", "Use a draft of the same family.")
    if theirs.max_position < longest:
        found = f"{path} with a context of {theirs.max_position}"
        raise InputError(role, found, f"{longest} or more", "Lower --max-new-tokens, or use another draft.")
    return draft


def warn_about_sampling(directory: str, params: SamplingParams) -> None:
    """Acceptance labels hold for the sampling settings they were made with; another mode makes the head mislead."""
    warning = another_mode(directory, params)
    if warning is not None:
        log_note(f"draftsmith: warning: {warning}")


def read_tree(name: str) -> StaticTree:
    """A tree of configs/trees by name, or a YAML file that lists paths of ranks.

    Raises:
        InputError: no such tree, or one that is not a tree.
    """
    trees = files("draftsmith.configs") / "trees"
    shipped = trees / f"{name}.yaml"
    source = shipped if shipped.is_file() else Path(name)
    if not source.is_file():
        names = ", ".join(sorted(file.name.removesuffix(".yaml") for file in trees.iterdir()))
        raise InputError("tree", repr(name), f"a YAML file, or one of: {names}", "Correct the path.")
    try:
        paths = yaml.safe_load(source.read_text())
        if odd := [rank for path in paths for rank in path if type(rank) is not int]:
            raise ValueError(f"{odd[0]!r} is no rank")
        tree = StaticTree.from_paths(paths)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise InputError("tree", f"{name}: {error}", "a list of paths such as [0, 1]", "Correct it.") from error
    at_most("tree, nodes", len(tree.parents), MAX_NODES)
    return tree
