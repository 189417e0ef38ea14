"""Find the weights around a checkpoint's layers, whatever its family calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Ends of names, the usual one first: of Llama and most, Mistral's own files, GPT-NeoX, GPT-2, BLOOM, Nemotron-H.
EMBEDDINGS = (
    "embed_tokens",
    "tok_embeddings",
    "embed_in",
    "wte",
    "word_embeddings",
    "embeddings",
    "embedding",
    "embed",
)
OUTPUTS = ("lm_head", "output", "embed_out", "output_layer", "head", "unembed")
NORMS = (
    "norm", "final_layernorm", "norm_f", "ln_f", "final_layer_norm", "final_norm", "embedding_norm", "ln_out",
    "layer_norm",
)  # fmt: skip
# Parts of a checkpoint that are not its decoder, and its layers.
OTHERS = re.compile(r"(visual|vision|image|audio|speech|multi_modal|mtp|eagle)(_.*|$)|(layers|h|blocks?)$")


def outer_names(shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> dict[str, str]:
    """Find the tensors around the layers by the ends of their names and their shapes.

    shapes: of all tensors in the files, by name. Returns names by field of `OuterWeights`, of those that there are: a
    model that is tied has no `output`.
    """
    around = {name: shape for name, shape in shapes.items() if not any(map(OTHERS.match, name.split(".")[:-1]))}

    def find(ends: Iterable[str], kind: str, rank: int) -> str | None:
        fitting = [name for name, shape in around.items() if len(shape) == rank and shape[-1] == hidden_size]
        for end in ends:
            own = [name for name in fitting if name.split(".")[-2:] == [end, kind]]
            if own:
                return min(own, key=len)
        return None

    found = {
        "embeddings": find(EMBEDDINGS, "weight", 2),
        "output": find(OUTPUTS, "weight", 2),
        "norm": find(NORMS, "weight", 1),
    }
    norm_bias = (found["norm"] or "").removesuffix("weight") + "bias"
    found["norm_bias"] = norm_bias if norm_bias in around else None
    # A tied output embedding may have a bias of its own.
    biases = (name for end in OUTPUTS for name in around if name.split(".")[-2:] == [end, "bias"])
    found["bias"] = next(biases, None)
    return {field: name for field, name in found.items() if name is not None}
