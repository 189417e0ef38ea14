"""Methods of a run, ready to answer: models and heads that fit each other, loaded, and a runner for each method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.data.console import log_note
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.eval.settings import ROLES
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, Round, generate_one
from draftsmith.modules.decoding.stop import Learner, learners_of
from draftsmith.modules.decoding.tree import MAX_NODES, StaticTree
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import LabeledMethod, check_needs
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer, checkpoint_of
from draftsmith.modules.pretrained.heads import another_mode, drafter_identity, load_head
from draftsmith.modules.pretrained.hub import CHECK_PATH, resolve_model
from draftsmith.modules.pretrained.models import load_fitting, load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import InputError, SamplingParams, check_range

# Tokens beyond prompt and answer that a drafter's cache may hold: no draft of a round is longer.
DRAFT_ROOM = 130
TREE_CHARS = 100_000  # of a file, which has MAX_NODES paths


# One method, ready to answer: (prompt, most new tokens, seed) -> answer. The same seed gives the same tokens.
Runner = Callable[[Sequence[int], int, int], Generation]


@dataclass(frozen=True)
class EngineRunner:
    """Runner of this project's decoder with one drafter, or none.

    on_round: is called after every round. session: the target's, used for every prompt, with the features that the
    drafter reads; None makes one for each.
    """

    target: CausalLM
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    on_round: Callable[[Round], None] | None = None
    session: Session | None = None

    @property
    def learners(self) -> Sequence[Learner]:
        return learners_of(self.drafter)

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        options = DecodeOptions(self.on_round, self.session)
        how = self.params, max_new_tokens, TorchSource(seed), self.eos_ids, options
        return generate_one(self.target, self.drafter, prompt, *how)


def make_runners(
    named: Sequence[LabeledMethod], models: Models, modes: Sequence[SamplingParams]
) -> dict[float, dict[str, EngineRunner]]:
    """Build the runners: temperature -> label -> runner.

    Sessions are shared by all temperatures, and so are drafters that do not learn. modes: sampling at each one.
    """
    # By captured layers; a GPU's graphs are worth keeping.
    sessions: dict[tuple[int, ...], Session] = {}
    runners: dict[float, dict[str, EngineRunner]] = {params.temperature: {} for params in modes}
    for item in named:
        label, method, own = item.label, item.method, models.of(item.variant)
        drafter = method.build(own)
        aux_layers = () if drafter is None else drafter.aux_layers
        if aux_layers not in sessions:
            sessions[aux_layers] = models.target.session(1, models.capacity, aux_layers)
        for number, params in enumerate(modes):
            # Every temperature learns for itself.
            if number and learners_of(drafter):
                drafter = method.build(own)
            runners[params.temperature][label] = EngineRunner(
                models.target, drafter, params, models.ends, session=sessions[aux_layers]
            )
    return runners


def load_run(
    config: Any,
    checkpoint: Checkpoint,
    named: Sequence[LabeledMethod],
    prompts: Sequence[BenchPrompt],
    modes: Sequence[SamplingParams],
    later_turns: bool = False,
) -> Models:
    """Load the target of a command's options and the models of its methods, with room for these prompts and answers.

    config: with the options `Running`, `DraftSettings` and `AnswerLength`. checkpoint: the target. later_turns: the
    prompts' are asked too, and prompts that do not fit into the context are left out.

    Raises:
        InputError: as `load_models`; no such device; no prompt that leaves room in the context, or one that does not.
    """
    check_methods(named, config.paths)
    torch.set_num_threads(config.num_threads)
    target = load_lm(checkpoint, **config.loading)
    tokenizer = checkpoint.tokenizer if later_turns else None
    longest = longest_sequence(prompts, config.max_new_tokens, target.info.max_position, tokenizer)
    models = load_models(named, config.paths, longest, modes[0], target, **config.loading)
    if models.acceptance is not None:
        for params in modes[1:]:
            warn_about_sampling(config.paths["acceptance"], params)
    return replace(models, ends=()) if config.ignore_eos else models


def load_models(
    named: Sequence[LabeledMethod],
    paths: Mapping[str, str],
    sequence_length: int,
    params: SamplingParams,
    target: CausalLM,
    **loading: Any,
) -> Models:
    """Load the models and heads that the methods need, for a loaded target.

    Drafts end where the target's answers do; a run that ignores end tokens empties `Models.ends`.

    paths: role or kind -> what the user passed (`DraftSettings.paths`). sequence_length: tokens of the longest prompt
    with its answer. loading: arguments of `load_lm` for the target.

    Raises:
        InputError: a missing or unfitting model, or a draft whose context is too short.
    """
    # Language models.
    trees = check_methods(named, paths)
    needs = dict.fromkeys(need for item in named for need in item.keys(paths))
    longest = min(sequence_length, target.info.max_position)
    loaded: dict[str, Any] = {}
    for need in (need for need in needs if need.partition("@")[0] in (MODEL, "mid")):
        loaded[need] = load_smaller_lm(need, paths, target, longest, **loading)

    # Heads, which read the target's features.
    for need in (need for need in needs if need not in (*loaded, *ROLES)):
        loaded[need] = load_head(paths[need], target, kind=need.partition("@")[0])

    # The acceptance head.
    acceptance: AcceptanceHead | None = None
    if "acceptance" in needs:
        # It reads the hidden states of one drafter: a draft model, or a head.
        by_head = [item for item in named if "acceptance" in item.method.needs]
        readers = {next(need for need in item.keys(paths) if need not in ROLES) for item in by_head}
        if len(readers) > 1:
            found = f"methods whose acceptance head reads what {' and what '.join(sorted(readers))} drafts"
            raise InputError("methods", found, "one drafter for --acceptance", "Run them one after the other.")
        (reader,) = readers
        if reader.partition("@")[0] == MODEL:
            head = load_head(paths["acceptance"], loaded[reader], kind="acceptance")
        else:
            identity = drafter_identity(paths[reader], target)
            head = load_head(paths["acceptance"], target, kind="acceptance", identity=identity)
        assert isinstance(head, AcceptanceHead)
        acceptance = head
        warn_about_sampling(paths["acceptance"], params)
    capacity, ends = longest + DRAFT_ROOM, tuple(target.info.eos_ids)
    others = {key: model for key, model in loaded.items() if "@" in key}
    heads = {key: model for key, model in loaded.items() if key not in (*others, MODEL, "mid")}
    return Models(
        target,
        loaded.get(MODEL),
        loaded.get("mid"),
        heads,
        acceptance,
        dict(paths),
        others,
        capacity=capacity,
        ends=ends,
        trees=trees,
        times=MeasuredTimes(),
    )


def load_smaller_lm(role: str, paths: Mapping[str, str], target: CausalLM, longest: int, **loading: Any) -> CausalLM:
    """Load a draft or mid model, which has to share the target's tokens."""
    path, draft = paths[role], Checkpoint(paths[role])
    option = "head" if role.partition("@")[0] == MODEL else role
    check_same_tokenizer(checkpoint_of(target), draft, option)
    lm = load_fitting(draft, target, **loading)
    if lm.info.max_position < longest:
        found = f"{path} with a context of {lm.info.max_position}"
        raise InputError(option, found, f"{longest} or more", "Lower --max-new-tokens, or use another draft.")
    return lm


def check_methods(named: Iterable[LabeledMethod], paths: Mapping[str, str]) -> dict[str, StaticTree]:
    """Check before anything is loaded that all models were passed, and read the draft trees: name -> tree."""
    trees: dict[str, StaticTree] = {}
    # What is not here is taken for a model of the hub's. A head has to be here.
    absent = MODEL in paths and not Path(resolve_model(paths[MODEL])).exists()
    for item in named:
        if absent and MODEL not in item.method.needs and not paths.keys() >= {*item.method.needs}:
            raise InputError("head", f"no directory {paths[MODEL]}", f"a head for {item.label}", CHECK_PATH)
        check_needs(item, paths)
        trees |= {name: read_tree(name) for name in item.method.trees}
    return trees


def warn_about_sampling(directory: str, params: SamplingParams) -> None:
    """Log a warning if an acceptance head's labels were made with other sampling: it may stop at wrong places."""
    warning = another_mode(directory, params)
    if warning is not None:
        log_note(f"draftsmith: warning: {warning}")


def read_tree(name: str) -> StaticTree:
    """Read a tree of configs/trees by name, or a YAML file with paths of ranks.

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
        if len(content := source.read_text("utf-8")) > TREE_CHARS or "*" in content:
            raise ValueError(f"{len(content):,} characters, or an alias")
        # A bool is an int to Python, but no rank.
        paths = yaml.safe_load(content)
        if wrong := [rank for path in paths for rank in path if type(rank) is not int]:
            raise ValueError(f"{wrong[0]!r} is no rank")
        tree = StaticTree.from_paths(paths)
    except (yaml.YAMLError, TypeError, ValueError, LookupError, RecursionError) as error:
        found = f"{name}: {str(error)[:200]}"
        raise InputError("tree", found, "a list of paths such as [0, 1]", "Correct it.") from error
    check_range("tree, nodes", len(tree.parents), high=MAX_NODES)
    return tree
