"""What `eagle3_directories.py` wrote, as `exported.py` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from eagle3_defects import DEFECTS
from exported import WORLD, Exported, Prediction, fused, prediction, same
from safetensors.torch import load_file
from torch import Tensor, nn

HEADS = WORLD / "eagle3"
# Token ids [N] and fed states [N, H] of one sequence -> logits [N, V], states for the next step [N, H].
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cases(kind: str) -> list[str]:
    names = sorted(path.parent.name for path in HEADS.glob(f"*/{kind}"))
    assert names, f"{HEADS} has no export in the format {kind}"
    return names


def read(case: str, kind: str) -> Exported:
    ours = load_file(HEADS / case / "ours.safetensors")
    ours |= {f"last.{j}": ours[f"logits.{j}"][-1] for j in range(1, len(passes(ours)))}
    return Exported(HEADS / case / "target", HEADS / case / kind, ours)


def passes(ours: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in ours if name.startswith("logits."))


def broken(defect: str, kind: str) -> tuple[Exported, Prediction]:
    place = WORLD / "eagle3-broken" / defect / kind
    sound = read(DEFECTS[defect].case, kind)
    return Exported(sound.target, place / "directory", sound.ours), prediction(place)


def asked(kind: str) -> list[str]:
    """The defects of which there is a copy in that format."""
    return [name for name, defect in DEFECTS.items() if defect.case in cases(kind)]


def drafted(step: Step, ours: dict[str, Tensor], fed: Tensor) -> dict[str, Tensor]:
    """Over the target's vocabulary: `logits.0` of every row of the text, and `last.J` of the draft behind the last one.
    fed: [T, H] of the states."""
    ids = ours["ids"][1:]
    logits, states = step(ids, fed)
    found = {"logits.0": logits}
    for j in range(1, len(passes(ours))):
        ids, fed = F.pad(ids, (0, 1)), torch.cat([fed, states[-1:]])
        logits, states = step(ids, fed)
        found[f"last.{j}"] = logits[-1]
    return found


def unpadded(draft: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Engines round the rows of lm_head up."""
    return {n: t[: draft.config.draft_vocab_size] if n == "lm_head.weight" else t for n, t in parameters.items()}


def assert_not_built(predicted: Prediction, load: Callable[[], object]) -> bool:
    """Does our reader say that another class is built, or none? Then the weights do not fit."""
    said = any("no EAGLE-3 head" in text or "an ordinary Llama" in text for text in predicted.errors)
    if said:
        with pytest.raises((ValueError, AssertionError)):
            load()
    return said


def of_draft(logits: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """`drafted` over our draft vocabulary; nothing else is drafted."""
    drafts = torch.zeros(next(iter(logits.values())).shape[-1], dtype=torch.bool).index_fill(0, ours["d2t"], True)
    assert all((part[..., ~drafts] == -torch.inf).all() for part in logits.values())
    return {name: part[..., drafts] for name, part in logits.items()}


def engine_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, or a reading's, under the names of vLLM and SGLang."""
    fields = {name: tensor for name, tensor in state.items() if name not in ("d2t", "lm_head.weight")}
    named = fused({name.replace("layer.", "layers.0.", 1): tensor for name, tensor in fields.items()})
    return named | ({"lm_head.weight": state["lm_head.weight"]} if "lm_head.weight" in state else {})


def whole(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Logits [.., draft vocabulary] over the target's vocabulary; what is not drafted has -inf."""
    return logits.new_full((*logits.shape[:-1], vocab), -torch.inf).index_copy_(-1, ids, logits)


def assert_drafts_as_predicted(
    predicted: Prediction, found: dict[str, Tensor], exported: Exported, lost: bool, unseen: bool
) -> None:
    """As `exported.py` has it. found: of `drafted`. Where our reader cannot say what is drafted, its logits are NaN.

    unseen: it is another head, as well formed as ours: nothing in the directory says so.
    """
    logits = two_tokens(found)
    ours = whole(two_tokens(exported.ours), exported.ours["d2t"], logits.shape[-1])
    assert predicted.logits is not None
    if predicted.follows and not predicted.logits.isnan().any():
        assert same(predicted.logits, logits)
    assert same(ours, logits) == (lost or not (predicted.errors or unseen)), predicted.errors
    assert not (unseen and predicted.errors)


def two_tokens(logits: Mapping[str, Tensor]) -> Tensor:
    """The first token's logits from every row, and the second's from the last one."""
    return torch.cat([logits["logits.0"], logits["last.1"][None]])
