"""Wrong teachers of a trained target: what changes its distributions is refused; what passes changes them little."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from wrong_models import State, each, edited_model, low_rank

from draftsmith.data.engines.own import generate_all
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.store.datasets import open_dataset
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.targets.proof import prove_reading
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError, SamplingParams

PLAIN = Readout()
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def target() -> LlamaLM:
    return load_lm("embedded:target")


@pytest.fixture(scope="module")
def text(target: LlamaLM, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """A prompt of 209 tokens, and the target's own answer."""
    output = tmp_path_factory.mktemp("texts") / "prompts"
    rows = open_dataset(make_prompts(PromptsConfig("embedded:prompts", "embedded:target", output, limit=6)))
    prompt = rows.item(5, 0)["input_ids"].tolist()
    return torch.tensor([*prompt, *generate_all(target, [prompt], SamplingParams(), 200, 1)[0]])


@pytest.fixture(scope="module")
def right(target: LlamaLM, text: Tensor) -> Callable[[torch.dtype, int], Tensor]:
    """The target's own logits of the first tokens of the text."""
    models = {dtype: LlamaLM(edited_model(target, lambda state: None, dtype), target.info) for dtype in DTYPES.values()}
    return functools.cache(lambda dtype, length: models[dtype].logits(text[:length], length))


def read_whole(model: LlamaModel, text: Tensor) -> Tensor:
    return model.features(text[None])[0]


@dataclass(frozen=True)
class Wrong:
    """Changed weights, settings, readout or reading of the text that another process has in the target's place.

    refused: by the bars of which types.
    """

    refused: str
    edit: Callable[[State], Any] = lambda state: None
    settings: dict[str, Any] | None = None
    readout: Readout = PLAIN
    read: Callable[[LlamaModel, Tensor], Tensor] = read_whole


def swap(one: int, other: int) -> Callable[[State], None]:
    def edit(state: State) -> None:
        state["lm_head.weight"][[one, other]] = state["lm_head.weight"][[other, one]]

    return edit


def rounded(bits: int, group: int) -> Callable[[str, Tensor], Tensor]:
    """Round to integers with a scale for each group of a row."""

    def change(name: str, weight: Tensor) -> Tensor:
        groups = weight.reshape(len(weight), -1, group or weight.shape[1])
        scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return ((groups / scale).round() * scale).reshape(weight.shape)

    return change


def later(first: int) -> Callable[[LlamaModel, Tensor], Tensor]:
    """Number positions one too high from a place on."""

    def read(model: LlamaModel, text: Tensor) -> Tensor:
        tables = model.cos, model.sin
        model.cos, model.sin = (torch.cat([table[:first], table[first + 1 :]]) for table in tables)
        states = read_whole(model, text)
        model.cos, model.sin = tables
        return states

    return read


def without_first(model: LlamaModel, text: Tensor) -> Tensor:
    states = read_whole(model, text[1:])
    return torch.cat([states[:1], states])


MATRICES = ("proj.weight",)
QUERIES = ("q_proj", "v_proj")
BOTH = "float32 bf16"
WRONG = {
    "two frequent rows of lm_head swapped": Wrong(BOTH, swap(268, 563)),
    "the first token dropped": Wrong(BOTH, read=without_first),
    "rotary base 9,000 for 10,000": Wrong(BOTH, settings={"rope_theta": 9e3}),
    "window of 64": Wrong(BOTH, settings={"sliding_window": 64}),
    "positions + 1 from 100": Wrong("float32", read=later(100)),
    "softcap 50 for none": Wrong(BOTH, readout=Readout(softcap=50.0)),
    "embedding x 0.998": Wrong("float32", each(lambda _, weight: 0.998 * weight, "embed_tokens")),
    "epsilon 1e-5 for 1e-6": Wrong("float32", settings={"rms_eps": 1e-5}),
    "logits x 1.02": Wrong(BOTH, readout=Readout(scale=1.02)),
    "adapter of 2.5 % not merged": Wrong(BOTH, each(low_rank(0.025), *QUERIES)),
    "int8, a scale per row": Wrong(BOTH, each(rounded(8, 0), *MATRICES)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_teacher_is_refused_where_it_is_another_model(target, text, right, name) -> None:
    wrong, refused = WRONG[name], ""
    for kind, dtype in DTYPES.items():
        other = edited_model(target, wrong.edit, dtype, **(wrong.settings or {}))

        def head(states: Tensor, other: LlamaModel = other) -> Tensor:
            return wrong.readout.bounded(other.lm_head(states))

        def logits(text: Tensor, keep: int, dtype: torch.dtype = dtype) -> Tensor:
            return right(dtype, len(text))[-keep:]

        def read(texts: Sequence[Tensor], other: LlamaModel = other) -> list[Tensor]:
            return [wrong.read(other, own) for own in texts]

        teacher = SimpleNamespace(
            info=target.info, device=target.device, dtype=dtype, logits=logits, lm_head=head, readout=PLAIN
        )
        if kind == "float32":
            log_p, log_q = (whole.double().log_softmax(-1) for whole in (logits(text, 0), head(read([text])[0])))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        try:
            prove_reading(teacher, text, read, name)
        except InputError:
            refused += f"{kind} "
    assert refused.split() == wrong.refused.split()
    assert wrong.refused == BOTH or kl < 5e-4, "KL(target || teacher) of the whole text, in nat"
