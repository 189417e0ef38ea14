"""The methods of a run, ready to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn

from draftsmith.data.models.naming import naming
from draftsmith.eval.bench.hf_baseline import HFAssisted, HFGenerate, HFRunner, load_hf_model
from draftsmith.modules.decoding.batch import generate_batch
from draftsmith.modules.decoding.chains import BatchDrafter
from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.loop import Generation, Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.chains import rows_lm
from draftsmith.modules.drafters.methods import Method, Models, Named
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, RowsLM, RowsSession, Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

Built = TypeVar("Built")


class Runner(Protocol):
    """One method, ready to answer a group of prompts."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        """Generate for each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class EngineRunner:
    """This project's loop with one drafter, or none: a group's prompts one after the other.

    on_round: is called after every round.
    session: the target's, used again for every prompt; None makes one for each.
    paths: flag -> what the user passed, for errors.
    """

    target: CausalLM
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    on_round: Callable[[Round], None] | None = None
    session: Session | None = None
    paths: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        with naming(paths=self.paths):
            return [
                generate(
                    self.target,
                    self.drafter,
                    prompt,
                    self.params,
                    max_new_tokens,
                    TorchSource(seed),
                    self.eos_ids,
                    self.on_round,
                    session=self.session,
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]


# One loop over rows (issue 16): `BatchRunner` goes where `generate` takes a group, and `in_batches` with it.
@dataclass(frozen=True)
class BatchRunner:
    """This project's batched loop: a group is decoded together. The session may be shared by methods in turn. Other
    fields as of `EngineRunner`."""

    target: RowsLM
    drafter: BatchDrafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    session: RowsSession
    paths: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        with naming(paths=self.paths):
            return generate_batch(
                self.target, self.drafter, prompts, self.params, max_new_tokens, seeds, self.eos_ids, self.session
            )


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

    rows_session: RowsSession | None = None
    session: Session | None = None
    runners: dict[float, dict[str, Runner]] = {params.temperature: {} for params in how.modes}
    for label, method in ((item.label, item.method) for item in named):
        made: Sequence[Runner]
        if isinstance(method, HFAssisted | HFGenerate):
            assistant = (hf_model("draft"), method.k, method.t) if isinstance(method, HFAssisted) else ()
            made = [HFRunner(hf_model("target"), params, how.eos_ids, *assistant) for params in how.modes]
        elif in_batches(method, models, how.batch_size):
            target = rows_lm("target", models.target)
            rows_session = rows_session or target.rows_session(how.batch_size, models.capacity)
            drafters = built_for_each(partial(method.build_batch, models, how.batch_size), len(how.modes))
            made = [
                BatchRunner(target, drafter, params, how.eos_ids, rows_session, models.paths)
                for drafter, params in zip(drafters, how.modes, strict=True)
            ]
        else:
            if session is None and models.target.device.type == "cuda":
                session = models.target.session(models.capacity)  # its graphs are worth keeping
            made = engine_runners(method, models, how, session)
        for params, each in zip(how.modes, made, strict=True):
            runners[params.temperature][label] = each
    return runners


def engine_runners(
    method: Method, models: Models, how: RunnerSettings, session: Session | None = None
) -> list[EngineRunner]:
    """A method of this engine, one prompt at a time: a runner for every way of sampling."""
    drafters = built_for_each(partial(method.build, models), len(how.modes))
    return [
        EngineRunner(models.target, drafter, params, how.eos_ids, session=session, paths=models.paths)
        for drafter, params in zip(drafters, how.modes, strict=True)
    ]


def in_batches(method: Method, models: Models, batch_size: int) -> bool:
    """Whether the batched loop runs it: several prompts at a time, or one on a GPU, which it keeps busier."""
    if batch_size > 1:
        return True
    lean = all(isinstance(lm, LlamaLM) for lm in (models.target, models.draft) if lm is not None)
    return models.target.device.type == "cuda" and method.batchable and lean


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
    """So many of what `build` makes, all of them one where it learns nothing: a drafter for every way of sampling."""
    first = build()
    return [first, *(build() if learners_of(first) else first for _ in range(count - 1))]
