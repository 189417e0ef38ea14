"""Every architecture of transformers that writes text as a tiny random target: decoding, and states to learn from.

`python tests/architectures.py` writes architectures.yaml, in a few minutes of one core, and says which came out
otherwise than before. `tests/modules/targets/architectures_test.py` compares some of them.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import papers_drafters  # noqa: F401
import torch
import torch.nn.functional as F
import transformers
import yaml
from tiny_configs import LAYERS, OMITTED, WINDOW, causal_types, multimodal_types, random_model, sample, tiny_config
from torch import Tensor

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.targets.proof import Proof, Reference, prove
from draftsmith.modules.targets.readout import Readout, candidates
from draftsmith.modules.types import InputError, SamplingParams

KNOWN = Path(__file__).parent / "architectures.yaml"
PROMPT, ANSWER = 30, 16  # beyond the window
GREEDY = SamplingParams()
# Of the logits' spread, in float32. A recurrence rounds otherwise where a text is read in parts, and random layers
# amplify that; a wrong cache or mask changes states by their own size.
WHOLE_ERROR, PARTS_ERROR = 1e-5, 1e-3


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}}


LATE_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
LATE_WINDOW["layer_types"] = ["full_attention", *["sliding_attention"] * (LAYERS - 1)]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
# Settings that real models have and the defaults of their config class have not.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic rope": ("llama", rope("dynamic", original_max_position_embeddings=32)),
    "qwen2, window": ("qwen2", LATE_WINDOW),
    "gemma2, no softcap": ("gemma2", {"final_logit_softcapping": None}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "granite, scale 1": ("granite", {"logits_scaling": 1.0}),
    "falcon, ALiBi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}),
}  # fmt: skip
WAYS = {"alone": "ar", "chains": "spec:k=3", "trees": "lookahead:w=4:n=3:g=4"}
# Architectures that may come out otherwise on another CPU, whose sums round otherwise.
NEAR_TIES = 2


@dataclass
class Outcome:
    """Result of an architecture: each of `WAYS`, `states` and `teacher` -> equal, refused or wrong.

    reasons: of the refusals.
    """

    engine: str
    found: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def cells(self) -> str:
        """The columns of architectures.yaml: engine, decoding, states, teacher, reasons."""
        columns = (tuple(WAYS), ("states",), ("teacher",))
        reasons = "; ".join(dict.fromkeys(self.reasons)) or "none"
        return " | ".join([self.engine, *map(self._cell, columns), reasons])

    def _cell(self, names: Sequence[str]) -> str:
        values = [self.found.get(name, "refused") for name in names]
        if len(set(values)) == 1:
            return values[0]
        others = [f"{value} {name}" for name, value in zip(names, values, strict=True) if value != "equal"]
        return f"equal; {', '.join(others)}"

    @property
    def whole(self) -> bool:
        """Everything but trees, which some caches cannot hold, is equal."""
        return all(self.found.get(name) == "equal" for name in {*WAYS, "states", "teacher"} - {"trees"})

    def attempt(self, name: str, equal: Callable[[], bool]) -> None:
        try:
            self.found[name] = "equal" if equal() else "wrong"
        except InputError as error:
            self.found[name] = "refused"
            self.reasons.append(reason(error))


def architectures() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> `model_type`, and the settings that are not the generated ones."""
    names = [*causal_types(), *multimodal_types()]
    return {name: (name, {}) for name in names if name not in OMITTED} | VARIANTS


def known() -> dict[str, str]:
    """Architecture -> its `cells`, as they came out last."""
    rows: dict[str, list[str]] = yaml.safe_load(KNOWN.read_text("utf-8"))
    return {name: cells for cells, alike in rows.items() for name in alike}


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Write architectures.yaml: `cells` -> the architectures that came out so."""
    rows: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        rows.setdefault(outcome.cells, []).append(name)
    KNOWN.write_text(yaml.safe_dump(rows, width=120, sort_keys=False, default_flow_style=None), "utf-8")


def build(name: str, directory: Path) -> Any:
    """A random model of an architecture, saved in `directory`."""
    model_type, settings = architectures()[name]
    model = random_model(tiny_config(model_type, **settings))
    model.save_pretrained(directory)
    return model


def outcome(name: str) -> Outcome:
    """Every column of an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(name, Path(folder))
        try:
            lm = load_lm(folder)
        except InputError as error:
            return Outcome("-", reasons=[reason(error)])
        result = Outcome("lean" if type(lm).__name__ == "LlamaLM" else "hf")
        with torch.no_grad():
            decode(model, lm, result)
            result.attempt("states", lambda: states(model, lm))
            result.attempt("teacher", lambda: teacher(model, lm))
    return result


def decode(model: Any, lm: CausalLM, result: Outcome) -> None:
    """Compare greedy answers in each way with a whole forward without a cache."""
    prompt, room = sample(PROMPT, 1), min(ANSWER, lm.info.max_position - PROMPT)

    def answer(method: str) -> list[int]:
        drafter = parse_method(method).build(Models(target=lm, draft=lm, capacity=lm.info.max_position + 8))
        return generate_one(lm, drafter, prompt, GREEDY, room, TorchSource(0), ()).tokens

    for way, method in WAYS.items():
        result.attempt(way, lambda method=method: is_greedy(model, prompt, answer(method)))


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Return whether each token of an answer is the first choice after those before it."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return bool(answer) and logits.argmax(-1).tolist() == answer


def states(model: Any, lm: CausalLM) -> bool:
    """Compare states that a session reads in parts with those of a whole forward: by logits, and layer by layer."""
    ids = sample(PROMPT + ANSWER, 3)
    num_layers = lm.info.num_layers
    layers = [0, 1, LAYERS // 2, num_layers, final_state(num_layers)]
    try:
        lm.features(torch.tensor([ids]), aux_layers=(num_layers,))
    except InputError:  # no list of layers, or a final norm that reads more: their heads read other states
        layers.remove(num_layers)
    whole = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    session = lm.session(1, len(ids), tuple(layers))
    read = torch.cat([session.extend([part]).features[0] for part in (ids[:PROMPT], ids[PROMPT:])])
    captured = read.split(lm.info.hidden_size, -1)
    theirs = [*(state[0] for state in whole.hidden_states)]
    theirs.insert(num_layers, unnormed(model, torch.tensor(ids)))
    pairs = [(own, theirs[number]) for own, number in zip(captured, layers, strict=True)]
    taught = lm.lm_head(lm.features(torch.tensor([ids])))[0]
    in_parts = all(close(*pair, PARTS_ERROR) for pair in [*pairs, (lm.lm_head(captured[-1]), whole.logits[0])])
    return in_parts and close(taught, whole.logits[0])


def close(ours: Tensor, theirs: Tensor, error: float = WHOLE_ERROR) -> bool:
    ours, theirs = ours.double(), theirs.double()
    spread = theirs - theirs.mean(-1, keepdim=True)
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= error * spread.norm())


def teacher(model: Any, lm: CausalLM) -> bool:
    """Whether a target's files and its states from before the final norm give its logits, and every other way from
    states to logits is refused: another gain, no norm, no softcap or scale, another layer, rows shifted by one."""
    text = torch.tensor(sample(PROMPT + ANSWER, 3))
    before, logits = unnormed(model, text), model(input_ids=text[None], use_cache=False).logits[0]
    outer = load_outer(lm.info.path)
    weights = outer.weights
    reference = Reference.of_logits(logits, torch.cat([text[1:], torch.tensor([-1])]))
    readouts = list(candidates(Checkpoint(lm.info.path).text))

    def proof(states: Tensor, among: Sequence[Readout] = readouts) -> Proof | None:
        def logits_by(readout: Readout) -> Tensor:
            return readout.logits(readout.normed(states, weights.norm, weights.norm_bias), weights.output, weights.bias)

        try:
            return prove("states", among, logits_by, reference, torch.float32)
        except InputError:
            return None

    right = proof(before)
    if right is None:
        found = "states, which no norm, scale and softcap of its files turn into its logits"
        raise InputError("teacher", found, "its logits", "")
    normed = right.readout.normed(before, weights.norm, weights.norm_bias)
    same = close(right.readout.logits(normed, weights.output, weights.bias), logits)
    layers = lm.features(text[None], aux_layers=tuple(range(lm.info.num_layers)))[0].split(lm.info.hidden_size, -1)
    # Mamba counts the states behind its layers from 0.
    layer = next(states for states in reversed(layers) if not close(states, before))
    wrong = [proof(before.roll(1, 0)), proof(layer)]
    wrong += [proof(before, [other]) for other in readouts if other != right.readout]
    return same and not any(wrong)


def unnormed(model: Any, text: Tensor) -> Tensor:
    """Last states [T, H] before the final norm: what the last module reads whose output the output embedding gets."""
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            calls.append((inputs[0], output))

    # A norm that ends a layer is not the final one.
    modules = [own for name, own in model.named_modules() if not re.search(r"\.\d+\.", name)]
    hooks = [module.register_forward_hook(keep) for module in modules if not list(module.children())]
    vocab = model(input_ids=text[None], use_cache=False).logits.shape[-1]
    for hook in hooks:
        hook.remove()
    head = next(number for number, (own, out) in enumerate(calls) if own.shape[-1] != vocab == out.shape[-1])
    read = calls[head][0]
    # Some families scale the states before the output embedding.
    same = (own for own, out in reversed(calls[:head]) if out.shape == own.shape == read.shape
            and F.cosine_similarity(out.flatten(), read.flatten(), 0) > 1 - 1e-6)  # fmt: skip
    return next(same, read).reshape(len(text), -1)


def reason(error: InputError) -> str:
    """The error's cause without names of classes and paths, and without numbers, which differ between machines."""
    found = re.sub(r" \(.*|/\S+ ", "", str(error.found))
    return found.partition(", which ")[2] or found


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main() -> None:
    quiet()
    before, outcomes = known(), {name: outcome(name) for name in architectures()}
    write(outcomes)
    tried, multimodal = outcomes.keys() - VARIANTS.keys(), {*multimodal_types()}
    whole = {name for name in tried if outcomes[name].whole}
    wrong = [name for name, outcome in outcomes.items() if "wrong" in outcome.found.values()]
    changed = [name for name, outcome in outcomes.items() if outcome.cells != before.get(name)]
    sys.stdout.write(
        f"{len(outcomes)} architectures; wrong: {wrong or 'none'}; otherwise than before: {changed or 'none'}\n"
        f"{len(whole)} of {len(tried)} pass all but trees, among them {len(whole & multimodal)} of "
        f"{len(multimodal & tried)} that only multimodal classes load\n"
    )
    if wrong or len(changed) > NEAR_TIES:
        sys.exit(1)


if __name__ == "__main__":
    main()
