"""The methods of a run, ready to answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftsmith.data.models.loading import name_nonfinite
from draftsmith.eval.bench.hf_baseline import HFAssisted, HFGenerate, HFRunner, load_hf_model
from draftsmith.modules.decoding.learner import Learner, learners_of
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Models, Named
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams


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

    @property
    def learners(self) -> Sequence[Learner]:
        return learners_of(self.drafter)

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        made: list[Generation] = []
        setup = DecodeOptions(self.on_round, self.session)
        with name_nonfinite(paths=self.paths):
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
                    setup,
                )
        return made


def make_runners(
    named: Sequence[Named], models: Models, modes: Sequence[SamplingParams], rows: int = 1, **how: Any
) -> dict[float, dict[str, Runner]]:
    """Temperature -> label -> method. Sessions serve every temperature, and drafters that learn nothing; transformers'
    models are loaded only for the methods that use them.

    modes: ways of sampling, one a temperature. rows: most prompts of a group. how: as of `load_lm`, for models that
        transformers runs itself.
    """
    if rows > 1:
        check_rows("target", models.target)
        check_rows("draft", models.draft)

    @functools.cache
    def hf_model(flag: str) -> Any:
        return load_hf_model(models.paths[flag], how["dtype"], how["device"], how["trust_remote_code"])

    sessions: dict[tuple[int, ...], Session] = {}  # by what is captured; a GPU's graphs are worth keeping
    runners: dict[float, dict[str, Runner]] = {params.temperature: {} for params in modes}
    for label, method in ((item.label, item.method) for item in named):
        if isinstance(method, HFAssisted | HFGenerate):
            assistant = (hf_model("draft"), method.k, method.t) if isinstance(method, HFAssisted) else ()
            for params in modes:
                runners[params.temperature][label] = HFRunner(hf_model("target"), params, models.ends, *assistant)
            continue
        drafter = method.build(models, rows)
        capture = () if drafter is None else drafter.capture
        if capture not in sessions:
            sessions[capture] = models.target.session(rows, models.capacity, capture)
        for number, params in enumerate(modes):
            if number and learners_of(drafter):  # every way of sampling learns for itself
                drafter = method.build(models, rows)
            runners[params.temperature][label] = EngineRunner(
                models.target, drafter, params, models.ends, session=sessions[capture], paths=models.paths, rows=rows
            )
    return runners


def check_rows(role: str, lm: CausalLM | None) -> None:
    """Raises:
    InputError: the model cannot read rows side by side, as it is run by transformers.
    """
    if lm is not None and not isinstance(lm, LlamaLM):
        found = "a model that only transformers can run"
        raise InputError(role, found, "a Llama-family model, to decode in batches", "Pass --batch-size 1.")
