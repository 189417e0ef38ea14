"""Methods of a run, ready to answer: models and heads that fit each other, loaded, and a runner for each method."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.settings import MODEL, ROLES
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, Round, generate
from draftsmith.modules.decoding.stop import Learner, learners_of
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import MAX_NODES, StaticTree
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.methods import LabeledMethod, check_needs
from draftsmith.modules.engine.low_precision import Precision, check_precision
from draftsmith.modules.pretrained.heads import another_mode, drafter_identity, head_config, load_head
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.models import DTYPES, load_fitting, load_lm, load_transformers
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

# Tokens beyond prompt and answer that a drafter's cache may hold: no draft of a round is longer.
DRAFT_ROOM = 130

Call = tuple[int, Tensor]  # of the target: how many tokens were in its cache, and the tokens [T] that it read


class Runner(Protocol):
    """One method, ready to answer a group of prompts."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        """Generate for each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class EngineRunner:
    """Runner of this project's decoder with one drafter, or none.

    drafter: built for as many rows as a group has prompts. on_round: is called after every round. session: the
    target's, used for every group, with the features that the drafter reads; None makes one for each.
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

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        sources = [TorchSource(seed) for seed in seeds]
        options = DecodeOptions(self.on_round, self.session)
        return generate(self.target, self.drafter, prompts, self.params, max_new_tokens, sources, self.eos_ids, options)


@dataclass(frozen=True)
class HFGenerate(Method):
    """transformers' own `generate`: a baseline that shares no code with this engine."""

    batchable = False


@dataclass(frozen=True)
class HFAssisted(Method):
    """transformers' assisted generation with the draft model: at most k drafted tokens a round.

    t: a round ends early after a drafted token of probability below t; 0 drafts all k. Where scikit-learn is installed
        transformers moves a t above 0 in every round, by what was accepted so far in the same answer.
    """

    k: int = 5
    t: float = 0.0
    uses = ("draft",)
    batchable = False

    def __post_init__(self) -> None:
        check_range("k", self.k, 1)
        if not 0 <= self.t < 1:
            raise InputError("t", self.t, "0 (off) or a probability below 1", "Correct it.")


BASELINES: dict[str, Method] = {"hf": HFGenerate(), "hf-assisted": HFAssisted()}


@dataclass(frozen=True)
class HFRunner:
    """`generate` of one transformers model, assisted by another when `assistant` is given.

    eos_ids: tokens that end the answer; () never ends. num_assistant_tokens: most drafted tokens of a round, without a
    schedule. confidence_threshold: a round ends early after a drafted token of lower probability; 0 never.
    """

    model: Any
    params: SamplingParams
    eos_ids: Sequence[int]
    assistant: Any | None = None
    num_assistant_tokens: int = 5
    confidence_threshold: float = 0.0

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        """Generate one after the other, and cut at the first end token and at `max_new_tokens` before counting."""
        return [self.answer(prompt, max_new_tokens, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def answer(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        """Generate for one prompt, and count target calls with a hook."""
        from transformers import GenerationConfig

        # Options of `generate`.
        params = self.params
        sampling: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            # 0 and 1 switch the filters off in transformers as here; None would bring its default top_k of 50 back.
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k,
                        "top_p": params.top_p}  # fmt: skip
        end = {"eos_token_id": list(self.eos_ids) or None, "pad_token_id": self.eos_ids[0] if self.eos_ids else 0}
        if self.assistant is not None:
            # `generate` reads these three from the assistant, and one assistant serves all settings of a run.
            self.assistant.generation_config = GenerationConfig(
                num_assistant_tokens=self.num_assistant_tokens,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=self.confidence_threshold,
                **end,
            )
        room = min(max_new_tokens, self.model.config.max_position_embeddings - len(prompt))
        config = GenerationConfig(max_new_tokens=room, **sampling, **end)

        calls: list[Call] = []

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("past_key_values")
            calls.append((int(cache.get_seq_length()) if cache is not None else 0, kwargs["input_ids"][0]))

        input_ids = torch.tensor([list(prompt)], device=self.model.device)  # [1, T]
        # A hook leaves the signature of `forward` alone. Behind a wrapper `generate` stops passing position ids.
        hook = self.model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with torch.random.fork_rng(enabled=not params.greedy):
                if not params.greedy:
                    torch.manual_seed(seed)
                output = self.model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    generation_config=config,
                    assistant_model=self.assistant,
                )
        finally:
            hook.remove()
        tokens = output[0, len(prompt) :].tolist()
        end_at = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        tokens = tokens if end_at is None else tokens[: end_at + 1]
        return Generation(tokens, trace_of(calls, len(prompt), tokens), end_at is not None)


def trace_of(calls: Sequence[Call], prompt_length: int, tokens: Sequence[int]) -> DecodeTrace:
    """Derive the counts of one generation from what its target calls read.

    Before the first call the prompt is known; before a later one, one token more than is cached. What was read beyond
    the known tokens was drafted; the growth of the known tokens until the next call was emitted. Assisted generation
    drafts before its first target call, so the prefill is a round like any other.

    The common beginning of a draft and of what was emitted was accepted: a rejected token is never drawn again in its
    own place, because the residual distribution gives it no mass.
    """
    known = [0, *(num_cached + 1 - prompt_length for num_cached, _ in calls[1:]), len(tokens)]
    steps = []
    for i, (num_cached, read) in enumerate(calls):
        drafted, emitted = read[prompt_length + known[i] - num_cached :].tolist(), tokens[known[i] : known[i + 1]]
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafted, emitted, strict=False))
        steps.append(DecodeStep(len(drafted), sum(1 for _ in equal), len(emitted), len(drafted)))
    return DecodeTrace(steps, prefill_calls=0)


def load_hf_model(path: str, dtype: str, device: str, trust_remote_code: bool = False) -> Any:
    """Load a transformers model without generation defaults of its own, which `generate` would apply unasked."""
    from transformers import GenerationConfig

    # Assisted generation warns about the arguments that it passes to itself.
    logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)
    wanted = "auto" if dtype == "auto" else DTYPES[dtype]
    model = load_transformers(model_directory(path), wanted, trust_remote_code)
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


def make_runners(
    named: Sequence[LabeledMethod], models: Models, modes: Sequence[SamplingParams], rows: int = 1, **loading: Any
) -> dict[float, dict[str, Runner]]:
    """Build the runners: temperature -> label -> runner.

    Sessions are shared by all temperatures, and so are drafters that do not learn. transformers' models are loaded only
    for the methods that use them.

    modes: sampling at each temperature. rows: most prompts of a group. loading: arguments of `load_lm`, for models that
    transformers runs itself.
    """
    for role, lm in (("target", models.target), ("draft", models.draft)):
        if rows > 1 and lm is not None and not isinstance(lm, LlamaLM):
            found = "a model that only transformers can run"
            raise InputError(role, found, "a Llama-family model, to decode in batches", "Pass --batch-size 1.")

    # A model of transformers serves all methods and temperatures.
    @functools.cache
    def hf_model(path: str) -> Any:
        return load_hf_model(path, loading["dtype"], loading["device"], loading["trust_remote_code"])

    # By captured layers; a GPU's graphs are worth keeping.
    sessions: dict[tuple[int, ...], Session] = {}
    runners: dict[float, dict[str, Runner]] = {params.temperature: {} for params in modes}
    for item in named:
        label, method, own = item.label, item.method, models.of(item.variant)
        if isinstance(method, HFAssisted | HFGenerate):
            assistant = (hf_model(own.paths["draft"]), method.k, method.t) if isinstance(method, HFAssisted) else ()
            target = hf_model(own.paths["target"])
            for params in modes:
                runners[params.temperature][label] = HFRunner(target, params, models.ends, *assistant)
            continue
        drafter = method.build(own, rows)
        aux_layers = () if drafter is None else drafter.aux_layers
        if aux_layers not in sessions:
            sessions[aux_layers] = models.target.session(rows, models.capacity, aux_layers)
        for number, params in enumerate(modes):
            # Every temperature learns for itself.
            if number and learners_of(drafter):
                drafter = method.build(own, rows)
            runners[params.temperature][label] = EngineRunner(
                models.target, drafter, params, models.ends, session=sessions[aux_layers]
            )
    return runners


def load_run(
    config: Any,
    named: Sequence[LabeledMethod],
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    params: SamplingParams,
) -> Models:
    """Load the target of a command's options and the models of its methods, with room for these prompts and answers.

    config: with the options `Running`, `DraftSettings` and `AnswerLength`, and a target.

    Raises:
        InputError: as `load_models`; no such device; a prompt that leaves no room in the context.
    """
    check_methods(named, config.paths)
    torch.set_num_threads(config.num_threads)
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence(prompts, max_new_tokens, target.info.max_position)
    models = load_models(named, config.paths, longest, params, target, config.draft_precision, **config.loading)
    return replace(models, ends=()) if config.ignore_eos else models


def load_models(
    named: Sequence[LabeledMethod],
    paths: Mapping[str, str],
    sequence_length: int,
    params: SamplingParams,
    target: CausalLM,
    draft_precision: Precision = "dtype",
    **loading: Any,
) -> Models:
    """Load the models and heads that the methods need, for a loaded target.

    Drafts end where the target's answers do; a run that ignores end tokens empties `Models.ends`.

    paths: role or kind -> what the user passed (`DraftSettings.paths`). sequence_length: tokens of the longest prompt
    with its answer. loading: arguments of `load_lm` for the target. draft_precision: of what drafts; `mid` stays as the
    target.

    Raises:
        InputError: a missing or unfitting model, or a draft whose context is too short.
    """
    # Language models.
    trees = check_methods(named, paths)
    needs = dict.fromkeys(need for item in named for need in item.keys(paths))
    longest = min(sequence_length, target.info.max_position)
    loaded: dict[str, Any] = {}
    for need in (need for need in needs if need.partition("@")[0] in (MODEL, "mid")):
        changes = {} if need == "mid" else {"precision": draft_precision}
        loaded[need] = load_smaller_lm(need, paths, target, longest, **loading | changes)

    # Heads, which read the target's features.
    for need in (need for need in needs if need not in (*loaded, *ROLES)):
        check_precision("draft_precision", draft_precision, str(target.device))
        loaded[need] = load_head(paths[need], target, kind=need.partition("@")[0])
        loaded[need].draft_in(draft_precision, target)

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
    path = paths[role]
    check_same_tokenizer(paths["target"], path, role)
    lm = load_fitting(path, target, **loading)
    if lm.info.max_position < longest:
        found = f"{path} with a context of {lm.info.max_position}"
        raise InputError(role, found, f"{longest} or more", "Lower --max-new-tokens, or use another draft.")
    return lm


def check_methods(named: Iterable[LabeledMethod], paths: Mapping[str, str]) -> dict[str, StaticTree]:
    """Check before anything is loaded that all models were passed, and read the draft trees: name -> tree."""
    trees: dict[str, StaticTree] = {}
    for item in named:
        check_needs(item, paths)
        trees |= {name: read_tree(name) for name in item.method.trees}
    return trees


def trained_for(directory: str) -> str:
    """Return the drafter that an acceptance head was trained for: `draft`, or a head's kind."""
    return head_config(directory).get("drafter") or MODEL


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
        # A bool is an int to Python, but no rank.
        paths = yaml.safe_load(source.read_text())
        if wrong := [rank for path in paths for rank in path if type(rank) is not int]:
            raise ValueError(f"{wrong[0]!r} is no rank")
        tree = StaticTree.from_paths(paths)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise InputError("tree", f"{name}: {error}", "a list of paths such as [0, 1]", "Correct it.") from error
    check_range("tree, nodes", len(tree.parents), high=MAX_NODES)
    return tree
