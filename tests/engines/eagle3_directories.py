"""EAGLE-3 heads as exports, sound and broken, and what our own head says with them, as `directories.py` has EAGLE-1.

    python eagle3_directories.py OUT

writes OUT/eagle3/CASE/target, OUT/eagle3/CASE/FORMAT for each format, and OUT/eagle3/CASE/ours.safetensors:

ids [T + 1], states [T, n H]
    Row t has ids[t + 1] and the target's states of ids[t].
logits.J [T, draft vocabulary], d2t
    Of the J-th token of a draft from every row, each behind its own states; beyond the text it is fed token 0.
embed_tokens, lm_head [V, H], state.NAME
    Of the target, and the head's parameters.

and for every defect of `eagle3_defects.py` OUT/eagle3-broken/DEFECT/FORMAT, as `directories.py` does. There `logits`
[T + 1, V] are those of the first token from every row, and of the second from the last one, of states of the layers
that the system reads.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from defects import Defect
from directories import LENGTH, SPREAD, save_prediction
from eagle3_defects import DEFECTS
from tiny_models import tiny_llama_dir

from draftsmith.data.export.directory import read_package
from draftsmith.data.export.export import ExportConfig, write_package
from draftsmith.data.export.export import run as export
from draftsmith.data.export.states import facts_of
from draftsmith.data.heads.directory import save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.drafters.eagle3.head import Eagle3Head
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, layer_like
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, Reading
from draftsmith.modules.formats.compare import Drafting3, net3_of

ALL = ("eagle", "vllm", "sglang", "speculators")
PASSES = 3


@dataclass(frozen=True)
class Case:
    """settings: fields of `Eagle3Config`, of a target of eight layers, whose default is 2, 4 and 5. rope_theta: of the
    head; the target has 10000."""

    formats: tuple[str, ...] = ALL
    settings: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None


CASES = {
    "whole": Case(),
    "reduced": Case(settings={"draft_vocab_size": 100}),
    "layers": Case(ALL[1:], {"draft_vocab_size": 100, "capture": (1, 3, 6)}),
    "two": Case(ALL[1:], {"draft_vocab_size": 100, "capture": (3, 6), "fc_norm": True}),
    "late": Case(ALL[1:], {"draft_vocab_size": 100, "fc_norm": True, "norm_output": True}),
    "residual": Case(("vllm", "speculators"), {"norm_before_residual": True}),
    "theta": Case(rope_theta=100.0),
}


@torch.inference_mode()
def write(case: Case, directory: Path) -> None:
    target = tiny_llama_dir(directory / "target", layers=8)
    lm = load_lm(str(target), engine="lean")
    plain = Eagle3Config(layer_like(lm.config, case.rope_theta), (2, 4, 5), lm.info.vocab_size)
    torch.manual_seed(1)
    head = Eagle3Head(dataclasses.replace(plain, **case.settings)).requires_grad_(False)
    for weight in head.parameters():
        weight.add_(2 * SPREAD * torch.randn_like(weight))
    if head.config.reduced:
        head.use_draft_vocabulary(torch.randperm(lm.info.vocab_size)[: head.config.draft_vocab_size].sort().values)
    saved = save_head(directory / "head", head, {"target": lm.info.identity}, "")
    for kind in case.formats:
        config = ExportConfig(format=kind, head=saved, target=str(target), output=directory / kind)
        assert export(config) == 0, "export says why"
    ids = torch.randint(lm.info.vocab_size, (1, LENGTH + 1))
    states = lm.features(ids, capture=head.capture)[:, :-1].contiguous()
    passes = head.unroll(lm.embed(F.pad(ids[:, 1:], (0, PASSES - 1))), states, PASSES)
    logits = {f"logits.{j}": head.lm_head(head.logits_input(hidden))[0].clone() for j, hidden in enumerate(passes)}
    tables = {
        "embed_tokens": lm.model.embed_tokens.weight.detach().contiguous(),
        "lm_head": lm.model.lm_head.weight.detach().clone(),
    }
    state = {f"state.{name}": tensor.detach().contiguous() for name, tensor in head.named_parameters()}
    text = {"ids": ids[0], "states": states[0], "d2t": head.d2t.clone()}
    save_file({**text, **logits, **tables, **state}, directory / "ours.safetensors")


@torch.inference_mode()
def break_and_predict(defect: Defect, case: Path, directory: Path) -> None:
    """The case's exports with the defect, and what our readers say of them."""
    lm = load_lm(str(case / "target"), engine="lean")
    facts, ours = facts_of(str(case / "target"), lm), load_file(case / "ours.safetensors")

    def predicted_logits(reading: Reading) -> Tensor:
        table = reading.weights.get("embed_tokens.weight", ours["embed_tokens"])
        states = lm.features(ours["ids"][None], capture=tuple(sorted(reading.settings["capture"])))[0, :-1]
        net = net3_of(reading, LENGTH + 1)
        embeds = table[F.pad(ours["ids"][1:], (0, 1))][None]
        first, second = net.follow(embeds, net.read(states)[None], 2)
        return Drafting3(table, net, ours["lm_head"]).of_states(torch.cat([first[0], second[0, -1:]]))

    for kind in CASES[case.name].formats:
        exported = read_package(str(case / kind))
        package = Package(*defect.apply(exported.config, exported.tensors, ours))
        (directory / kind / "directory").mkdir(parents=True)
        write_package(directory / kind / "directory", package)
        save_prediction(directory / kind, package, formats()[kind, "eagle3"].read(package, facts), predicted_logits)


def main(output: Path) -> None:
    for name, case in CASES.items():
        (output / "eagle3" / name).mkdir(parents=True)
        write(case, output / "eagle3" / name)
    for name, defect in DEFECTS.items():
        break_and_predict(defect, output / "eagle3" / defect.case, output / "eagle3-broken" / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
