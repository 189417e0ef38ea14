"""vLLM's plugin: P(accept) of drafted tokens by `modules/acceptance/served.py`, in the place of vLLM's own estimator.

vLLM loads it in each of its processes (entry point group `vllm.general_plugins`); it does nothing unless the variable
`DRAFTSMITH_VLLM_ESTIMATOR` asks for it: 1, or a file of priors. What it leans on is of vLLM 0.32 and 0.33
(v1/worker/gpu/spec_decode/), and is looked at before anything is changed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from typing import TYPE_CHECKING, Any

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.modules.acceptance.served import Start

VARIABLE = "DRAFTSMITH_VLLM_ESTIMATOR"
GPU = "vllm.v1.worker.gpu"
# Function -> its parameters. What vLLM calls of ours, and what we call of its.
SIGNATURES = {
    f"{GPU}.spec_decode.speculator:OnlineAcceptanceEstimator.__init__":
        "self max_num_reqs num_speculative_steps device",
    f"{GPU}.spec_decode.speculator:OnlineAcceptanceEstimator.step": "self idx_mapping num_sampled num_rejected",
    f"{GPU}.spec_decode.speculator:OnlineAcceptanceEstimator.predict":
        "self logits idx_mapping draft_step confidence_probs temperature",
    f"{GPU}.spec_decode.speculator:DraftModelSpeculator._maybe_predict_acceptance":
        "self logits idx_mapping draft_step",
    f"{GPU}.spec_decode.speculator:DraftModelSpeculator.observe_verification":
        "self idx_mapping num_sampled num_rejected",
    f"{GPU}.model_runner:GPUModelRunner.initialize_kv_cache":
        "self kv_cache_config is_profiling kv_cache_allocation_context",
}  # fmt: skip
# Function -> attributes that it sets or reads, which we read.
ATTRIBUTES = {
    f"{GPU}.states:RequestState.__init__": "all_token_ids total_len prefill_len index_to_req_id",
    f"{GPU}.spec_decode.speculator:DraftModelSpeculator.__init__": "draft_tokens draft_logits acceptance_estimator",
    f"{GPU}.model_runner:GPUModelRunner.__init__": "req_states speculator",
    f"{GPU}.model_runner:GPUModelRunner.sample_tokens": "postprocess_sampled observe_verification propose",
}
# Whose drafted tokens lie where the next draft step finds them.
STEP_BY_STEP = (
    f"{GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
    f"{GPU}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator",
)


def register() -> None:
    """Replace vLLM's estimator where the variable asks for it.

    Raises:
        InputError: another vLLM than this was written for, or no file of priors there.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    start = None if asked == "1" else read_start(asked)
    check_contract()
    speculator, runner = named(f"{GPU}.spec_decode.speculator"), named(f"{GPU}.model_runner:GPUModelRunner")
    base = speculator.OnlineAcceptanceEstimator
    if not hasattr(base, "attach"):  # plugins may be loaded several times
        speculator.OnlineAcceptanceEstimator = estimator_class(base, start)
        attach_to(runner)


def estimator_class(base: type, start: Start | None) -> type:
    """Ours as a subclass of vLLM's, made with its arguments."""
    from draftsmith.modules.acceptance.served import COLD, ServedEstimator

    class DraftsmithAcceptanceEstimator(ServedEstimator, base):  # type: ignore[misc, valid-type]
        def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: Any):
            super().__init__(max_num_reqs, num_speculative_steps, device, start or COLD)

    return DraftsmithAcceptanceEstimator


def attach_to(runner: type) -> None:
    """Show the estimator the texts once a model runner has them, before graphs are captured."""
    from draftsmith.modules.acceptance.served import ServedTexts

    initialize: Any = runner.initialize_kv_cache  # type: ignore[attr-defined]

    @functools.wraps(initialize)
    def initialize_kv_cache(self: Any, *args: Any, **settings: Any) -> Any:
        made = initialize(self, *args, **settings)
        speculator: Any = self.speculator
        estimator: Any = getattr(speculator, "acceptance_estimator", None)
        if hasattr(estimator, "attach") and issubclass(type(speculator), tuple(map(named, STEP_BY_STEP))):
            state = self.req_states
            texts = ServedTexts(
                tokens=state.all_token_ids.gpu,
                lengths=state.total_len.gpu,
                drafted=speculator.draft_tokens,
                greedy_drafts=speculator.draft_logits is None,
                requests=state.index_to_req_id,
                num_read=state.prefill_len.np,
            )
            estimator.attach(texts)
        return made

    runner.initialize_kv_cache = initialize_kv_cache  # type: ignore[attr-defined]


def check_contract() -> None:
    """Whether vLLM is as this was written for.

    Raises:
        InputError: it is not.
    """

    def differs(where: str, found: str, expected: str) -> InputError:
        remedy = f"Use vLLM 0.32 or 0.33, or leave {VARIABLE} out."
        return InputError(where.replace(":", "."), found, expected, remedy)

    try:
        for where, expected in SIGNATURES.items():
            found = " ".join(inspect.signature(named(where)).parameters)
            if found != expected:
                raise differs(where, f"parameters {found}", expected)
        for where, expected in ATTRIBUTES.items():
            missing = set(expected.split()) - {*inspect.unwrap(named(where)).__code__.co_names}
            if missing:
                raise differs(where, f"no {', '.join(sorted(missing))}", expected)
        for where in STEP_BY_STEP:
            named(where)
    except (ImportError, AttributeError) as error:
        raise differs("vllm", str(error), "the acceptance estimator of adaptive verification") from None


def named(where: str) -> Any:
    """What stands there: `module` or `module:name.name`."""
    module, _, names = where.partition(":")
    found = importlib.import_module(module)
    return functools.reduce(getattr, names.split("."), found) if names else found


def read_start(path: str) -> Start:
    """Priors: the fields of `Start` as JSON.

    Raises:
        InputError: it is no such file.
    """
    from draftsmith.modules.acceptance.served import NUM_FEATURES, Start

    remedy = f"Make one (docs/acceptance.md), or set {VARIABLE} to 1 to go without."
    try:
        with open(path, encoding="utf-8") as file:
            start = Start(**json.load(file))
        tensors = start.tensors(len(start.intercepts))
    except (OSError, ValueError, TypeError, RuntimeError, IndexError) as error:
        said = " ".join(str(error).split())
        raise InputError(VARIABLE, f"{path} ({said})", "1, or a file of priors", remedy) from None
    sizes = len(start.weights), len(start.information)
    if sizes != (NUM_FEATURES, len(start.intercepts)) or not all(part.isfinite().all() for part in tensors):
        expected = f"{NUM_FEATURES} weights, and an intercept and information of every place, all finite"
        raise InputError(VARIABLE, f"{path} with others", expected, remedy)
    return start
