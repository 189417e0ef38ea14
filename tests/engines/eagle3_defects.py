"""What goes wrong in an EAGLE-3 directory, as `defects.py` has it of EAGLE-1. `case`: of `eagle3_directories.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from defects import Defect, Edit, added, lost, rand, renamed, table
from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"


def layer(edit: str, name: str) -> Edit:
    """`lost` or `added` of the layer's tensor, whatever the layer is called there."""

    def apply(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
        (lost if edit == "lost" else added)(prefix + name)(tensors, tables)

    return apply


def change(name: str, by: Callable[[Tensor], Tensor]) -> Edit:
    """That tensor by a function of its value, where the export has it."""

    def apply(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        if name in tensors:
            tensors[name] = by(tensors[name]).contiguous()

    return apply


def swap_halves(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
    """The state before the embedding in q, k and v."""
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


def absolute(table: Tensor) -> Tensor:
    return table + torch.arange(len(table))


def both_places(*numbers: int) -> dict[str, object]:
    """Layer ids wherever a system may look for them."""
    return {IDS: list(numbers), "eagle_config": {IDS: list(numbers), "use_aux_hidden_state": True}}


# As well formed as the head that was exported: only a record of that one tells, or how well it drafts.
UNSEEN = {
    "states-in-another-order",
    "halves",
    "rope-of-the-target",
    "ids-left-out",
    "norm_output",
    "norm_output-unsaid",
}
DEFECTS: dict[str, Defect] = {
    "none": Defect(case="reduced"),
    "none-whole": Defect(case="whole"),
    # The target's layers.
    "ids-by-the-other-count": Defect(both_places(1, 3, 4), case="reduced"),
    "ids-said-to-be-later": Defect(both_places(3, 5, 6), case="reduced"),
    "ids-at-the-top-only": Defect({IDS: [1, 3, 6], "eagle_config": ...}, case="layers"),
    "ids-left-out": Defect({IDS: ..., "eagle_config": ...}, case="layers"),
    "ids-in-another-order": Defect(both_places(5, 2, 4), case="reduced"),
    "states-in-another-order": Defect(
        tensors=change("fc.weight", lambda w: torch.cat(w.chunk(3, dim=1)[::-1], dim=1)), case="reduced"
    ),
    # The draft vocabulary.
    "ids-in-d2t": Defect(tensors=change("d2t", absolute), case="reduced"),
    "no-d2t": Defect(tensors=lost("d2t"), case="reduced"),
    "no-t2d": Defect(tensors=lost("t2d"), case="reduced"),
    "t2d-of-another-head": Defect(tensors=change("t2d", lambda marks: marks.roll(1)), case="reduced"),
    "d2t-of-another-head": Defect(tensors=change("d2t", lambda table: table.roll(1)), case="reduced"),
    "d2t-of-a-whole-vocabulary": Defect(
        tensors=table("d2t", lambda tables: torch.zeros(len(tables["lm_head"]), dtype=torch.int64)), case="whole"
    ),
    "no-draft_vocab_size": Defect({"draft_vocab_size": ...}, case="reduced"),
    "no-draft_vocab_size-whole": Defect({"draft_vocab_size": ...}, case="whole"),
    "other-draft_vocab_size": Defect({"draft_vocab_size": 90}, case="reduced"),
    "null-draft_vocab_size": Defect({"draft_vocab_size": None}, case="whole"),
    # Tensors that are not there, or have no place.
    "no-lm_head": Defect(tensors=lost("lm_head.weight"), case="reduced"),
    "no-lm_head-whole": Defect(tensors=lost("lm_head.weight"), case="whole"),
    "no-fc": Defect(tensors=lost("fc.weight"), case="reduced"),
    "no-norm": Defect(tensors=lost("norm.weight"), case="reduced"),
    "no-hidden_norm": Defect(tensors=layer("lost", "hidden_norm.weight"), case="reduced"),
    "no-q": Defect(tensors=layer("lost", "self_attn.q_proj.weight"), case="reduced"),
    "q-bias": Defect(tensors=layer("added", "self_attn.q_proj.bias"), case="reduced"),
    "input-norm": Defect(tensors=added("input_norm.weight", 3), case="reduced"),
    "prefix": Defect(tensors=renamed("", "model."), case="reduced"),
    "midlayer": Defect(tensors=renamed("layers.0", "midlayer"), case="reduced"),
    "layers.0": Defect(tensors=renamed("midlayer", "layers.0"), case="reduced"),
    "fc-of-two-states": Defect(
        tensors=table("fc.weight", lambda tables: rand(*[tables["lm_head"].shape[1] * n for n in (1, 2)])),
        case="reduced",
    ),
    "embedding": Defect(
        tensors=table("embed_tokens.weight", lambda tables: rand(*tables["lm_head"].shape)), case="reduced"
    ),
    "embedding-of-the-target": Defect(
        tensors=table("embed_tokens.weight", lambda tables: tables["embed_tokens"]), case="reduced"
    ),
    "halves": Defect(tensors=swap_halves, case="reduced"),
    # Switches.
    "norm_before_residual": Defect({"norm_before_residual": True}, case="reduced"),
    "norm_before_residual-unsaid": Defect({"norm_before_residual": ...}, case="residual"),
    "norm_output": Defect({"norm_output": True}, case="reduced"),
    "norm_output-unsaid": Defect({"norm_output": ...}, case="late"),
    "fc_norm": Defect({"fc_norm": True}, case="reduced"),
    "fc_norm-unsaid": Defect({"fc_norm": ...}, case="late"),
    "fc_norm-as-use_aux_norm": Defect({"fc_norm": ..., "use_aux_norm": True}, case="late"),
    "class-of-automodel": Defect({"architectures": ["LlamaEagle3DraftModel"]}, case="reduced"),
    "class-of-a-target": Defect({"architectures": ["LlamaForCausalLM"]}, case="reduced"),
    # Positions.
    "rope-of-the-target": Defect({"rope_theta": 10000.0, "rope_parameters": ..., "rope_scaling": ...}, case="theta"),
}
