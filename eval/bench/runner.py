"""The methods of a run, ready to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn

from draftsmith.data.models.naming import naming
from draftsmith.eval.bench.hf_baseline import HFAssisted, HFGenerate, HFRunner, load_hf_model
from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.loop import Generation, Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Method, Models, Named
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams

Built = TypeVar("Built")


class Runner(Protocol):
    """One method, ready to answer a group of prompts."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        """Generate for each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class EngineRunner:
    """This project's loop with one drafter, or none.

    on_round: is called after every round.
    session: the target's, used again for every group, with the features that the drafter reads; None makes one for
        each.
    paths: flag -> what the user passed, for errors.
    rows: prompts that are decoded together, which the drafter was built for; the others of a group follow.
    """

    target: CausalLM
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    on_round: Callable[[Round], None] | None = None
    session: Session | None = None
    paths: Mapping[str, str | None] = field(default_factory=dict)
    rows: int = 1

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        made: list[Generation] = []
        with naming(paths=self.paths):
            for start in range(0, len(prompts), self.rows):
                some = slice(start, start + self.rows)
                made += generate(
                    self.target,
                    self.drafter,
                    prompts[some],
                    self.params,
                    max_new_tokens,
                    [TorchSource(seed) for seed in seeds[some]],
                    self.eos_ids,
                    self.on_round,
                    session=self.session,
                )
        return made


@dataclass(frozen=True)
class RunnerSettings:
    """How methods answer.

    modes: ways of sampling, of which each has its own runner. eos_ids: tokens that end an answer. batch_size: most
    prompts of a group. dtype, trust_remote_code: of the models that transformers runs itself.
    """

    modes: Sequence[SamplingParams]
    eos_ids: tuple[int, ...]
    batch_size: int = 1
    dtype: str = "float32"
    trust_remote_code: bool = False


def make_runners(named: Sequence[Named], models: Models, how: RunnerSettings) -> dict[float, dict[str, Runner]]:
    """Temperature -> label -> method. Sessions serve every temperature, and drafters that learn nothing; transformers'
    models are loaded only for the methods that use them."""
    loaded: dict[str, Any] = {}

    def hf_model(flag: str) -> Any:
        if flag not in loaded:
            path, device = str(models.paths[flag]), str(models.target.device)
            loaded[flag] = load_hf_model(path, how.dtype, device, how.trust_remote_code)
        return loaded[flag]

    sessions: dict[tuple[int, ...], Session] = {}  # by what is captured; a GPU's graphs are worth keeping
    if how.batch_size > 1:
        check_rows("target", models.target)
        check_rows("draft", models.draft)
    runners: dict[float, dict[str, Runner]] = {params.temperature: {} for params in how.modes}
    for label, method in ((item.label, item.method) for item in named):
        made: Sequence[Runner]
        if isinstance(method, HFAssisted | HFGenerate):
            assistant = (hf_model("draft"), method.k, method.t) if isinstance(method, HFAssisted) else ()
            made = [HFRunner(hf_model("target"), params, how.eos_ids, *assistant) for params in how.modes]
        else:
            made = engine_runners(method, models, how, how.batch_size, sessions)
        for params, each in zip(how.modes, made, strict=True):
            runners[params.temperature][label] = each
    return runners


def engine_runners(
    method: Method,
    models: Models,
    how: RunnerSettings,
    rows: int = 1,
    sessions: dict[tuple[int, ...], Session] | None = None,
) -> list[EngineRunner]:
    """A method of this engine: a runner for every way of sampling. sessions: those to use, by what they capture, to
    which those are added that are made; None makes one for each group."""
    drafters = built_for_each(partial(method.build, models, rows), len(how.modes))
    capture = () if drafters[0] is None else drafters[0].capture
    if sessions is not None and capture not in sessions:
        sessions[capture] = models.target.session(rows, models.capacity, capture)
    session = None if sessions is None else sessions[capture]
    return [
        EngineRunner(models.target, drafter, params, how.eos_ids, session=session, paths=models.paths, rows=rows)
        for drafter, params in zip(drafters, how.modes, strict=True)
    ]


def check_rows(role: str, lm: CausalLM | None) -> None:
    """Raises:
    InputError: the model cannot read rows side by side, as it is run by transformers.
    """
    if lm is not None and not isinstance(lm, LlamaLM):
        found = "a model that only transformers can run"
        raise InputError(role, found, "a Llama-family model, to decode in batches", "Pass --batch-size 1.")


def learners_of(owner: Any) -> list[Learner]:
    """All that a drafter, or a runner's, has learned or will, always in the same order."""
    found: list[Learner] = []
    seen: set[int] = set()
    unseen = [owner]
    while unseen:
        item = unseen.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Learner):
            found.append(item)
        elif isinstance(item, list | tuple):
            unseen += reversed(item)
        elif isinstance(item, dict):
            unseen += reversed(item.values())
        elif type(item).__module__.startswith("draftsmith.") and not isinstance(item, nn.Module):
            unseen += reversed(list(getattr(item, "__dict__", {}).values()))
    return found


def learned_by(owner: Any) -> list[dict[str, Any]]:
    """What a drafter or a runner has learned, as JSON values, for `teach`."""
    return [learner.state_dict() for learner in learners_of(owner)]


def teach(owner: Any, states: Sequence[dict[str, Any]]) -> None:
    """Let it know what `learned_by` said of it, or of another that was built alike."""
    for learner, state in zip(learners_of(owner), states, strict=True):
        learner.load_state_dict(state)


def remember(owner: Any) -> Callable[[], None]:
    """What puts everything back that it knows now: repeated work is the same work."""
    states = learned_by(owner)
    return lambda: teach(owner, states)


def built_for_each(build: Callable[[], Built], count: int) -> list[Built]:
    """As many as asked for of what `build` makes, all of them one where it learns nothing: a drafter for every way of
    sampling."""
    first = build()
    return [first, *(build() if learners_of(first) else first for _ in range(count - 1))]
