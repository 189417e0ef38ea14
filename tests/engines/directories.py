"""Exported heads and what our own head says with them, for the engines' own code to be held against.

    python directories.py OUT

writes for every case OUT/CASE/target (a transformers directory), OUT/CASE/FORMAT (an export) for each of its formats,
and OUT/CASE/ours.safetensors:

ids [T + 1], features, hidden [T, H], logits [T, V]
    Row t has ids[t + 1] and the feature of ids[t], sits at position t and scores ids[t + 2]; float32.
embed_tokens, lm_head [V, H]
    Of the target.
state.NAME
    The head's parameters.

and for every defect of `defects.py` and every format of its case OUT/broken/DEFECT/FORMAT/directory, the export with
that defect, and beside it what our reader of that format predicts:

reading.json
    raises, errors, notes: texts of its findings. dropped: names in the file that it does not use.
reading.safetensors
    weights.NAME: `Reading.weights`, NaN where nothing defined is. logits [T, V]: on the rows above, by
    `modules/formats/compare.py`; NaN from such weights.

EAGLE-3 heads are written by `eagle3_directories.py`. Both run with this project's Python. The engines live in
environments of their own and read only what is written here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from defects import DEFECTS, Defect
from tiny_models import tiny_llama_dir

from draftsmith.data.export.directory import read_package
from draftsmith.data.export.export import ExportConfig, write_package
from draftsmith.data.export.export import run as export
from draftsmith.data.export.states import facts_of
from draftsmith.data.heads.directory import save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, Reading
from draftsmith.modules.formats.compare import net_of

LENGTH = 48
SPREAD = 0.1  # of random weights: far from any initial value


@dataclass(frozen=True)
class Case:
    """family, extra: as `tiny_llama_dir` takes them; formats: those that can hold such a head."""

    formats: tuple[str, ...]
    family: str = "llama"
    num_layers: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "llama": Case(("eagle", "vllm", "sglang")),
    "two-layers": Case(("eagle", "vllm", "sglang"), num_layers=2),
    "theta": Case(("eagle", "vllm", "sglang"), extra={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3-rope": Case(("vllm", "sglang"), extra={"rope_parameters": LLAMA3_ROPE}),
    "head-dim": Case(("vllm", "sglang"), extra={"head_dim": 16}),
    "qwen2": Case(("eagle", "vllm", "sglang"), family="qwen2"),
}


def random_head(target: Path, num_layers: int) -> EagleHead:
    config = load_lm(str(target), engine="lean").config
    torch.manual_seed(1)
    head = EagleHead(EagleConfig.for_target(config, num_layers))
    for name, parameter in head.named_parameters():
        # Large scores: attention, and with it every position, shows in the result.
        spread = 4 * SPREAD if "q_proj" in name or "k_proj" in name else SPREAD
        parameter.data.normal_(1.0 if "layernorm" in name else 0.0, spread)
    return head


@torch.inference_mode()
def write(case: Case, directory: Path) -> None:
    target = tiny_llama_dir(directory / "target", layers=3, family=case.family, **case.extra)
    head = random_head(target, case.num_layers)
    lm = load_lm(str(target), engine="lean")
    saved = save_head(directory / "head", head, {"target": lm.info.identity}, "")
    for kind in case.formats:
        config = ExportConfig(format=kind, head=saved, target=str(target), output=directory / kind)
        assert export(config) == 0, "export says why"
    ids = torch.randint(lm.info.vocab_size, (1, LENGTH + 1))
    features = lm.features(ids)[:, :-1]
    hidden = head(lm.embed(ids[:, 1:]), features)
    save_file(
        {
            "ids": ids[0],
            "features": features[0].contiguous(),
            "hidden": hidden[0].contiguous(),
            "logits": lm.lm_head(hidden)[0].contiguous(),
            "embed_tokens": lm.model.embed_tokens.weight.detach().contiguous(),
            "lm_head": lm.model.lm_head.weight.detach().clone(),
            **{f"state.{name}": tensor.detach().contiguous() for name, tensor in head.named_parameters()},
        },
        directory / "ours.safetensors",
    )


@torch.inference_mode()
def break_and_predict(defect: Defect, case: Path, directory: Path) -> None:
    """The case's exports with the defect, and what our readers say of them."""
    lm = load_lm(str(case / "target"), engine="lean")
    facts, ours = facts_of(str(case / "target"), lm), load_file(case / "ours.safetensors")
    for kind in CASES[case.name].formats:
        exported = read_package(str(case / kind))
        package = Package(*defect.apply(exported.config, exported.tensors, ours))
        (directory / kind / "directory").mkdir(parents=True)
        write_package(directory / kind / "directory", package)
        reading = formats()[kind, "eagle"].read(package, facts)
        save_prediction(directory / kind, package, reading, lambda reading: predicted_logits(reading, ours))


def save_prediction(
    directory: Path, package: Package, reading: Reading, logits_of: Callable[[Reading], Tensor]
) -> None:
    raises = [f.text for f in reading.errors if " raises: " in f.text]
    prediction = {
        "raises": raises,
        "errors": [f.text for f in reading.errors],
        "notes": [f.text for f in reading.findings if f.level == "note"],
        "dropped": sorted(package.tensors.keys() - set(reading.used)),
    }
    (directory / "reading.json").write_text(json.dumps(prediction, indent=2))
    held = {f"weights.{name}": tensor.contiguous().clone() for name, tensor in reading.weights.items()}
    if not raises:
        held["logits"] = logits_of(reading)
    save_file(held, directory / "reading.safetensors")


def predicted_logits(reading: Reading, ours: Mapping[str, Tensor]) -> Tensor:
    table = reading.weights["embed_tokens.weight"] if reading.settings["embed"] == "file" else ours["embed_tokens"]
    hidden = net_of(reading, LENGTH)(table[ours["ids"][1:]][None], ours["features"][None])[0]
    return reading.settings["logit_scale"] * hidden @ ours["lm_head"].T


def main(output: Path) -> None:
    for name, case in CASES.items():
        (output / name).mkdir(parents=True)
        write(case, output / name)
    for name, defect in DEFECTS.items():
        break_and_predict(defect, output / defect.case, output / "broken" / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
