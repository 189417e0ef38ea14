"""Options of the commands of this folder, in one file that loads no model (as data/settings.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftsmith.data.settings import Loader, ServedTarget
from draftsmith.eval.settings import AnyFormat, WrittenFormat
from draftsmith.modules.formats import GGUF, ORIGINAL
from draftsmith.modules.types import InputError, check_range


@dataclass(frozen=True, kw_only=True)
class ExportConfig(ServedTarget):
    """Write a head as another system loads it, check what was written, and print the command that serves it.

    Attributes:
        format: original, for a head that was imported, or trained on from another system's (`train --init`): the files
            as they came. eagle (SafeAILab/EAGLE) takes EAGLE-1 and EAGLE-3 heads, vllm and sglang DFlash and DSpark
            heads too, speculators all but EAGLE-1; llamacpp an EAGLE-3 head of version 3 or 3-norm, a DFlash or DSpark
            head, as one GGUF file; mtp writes a copy of the target's checkpoint with an MTP module,
            and links to the files that stay as they are.
        output: The directory to write; new or empty.
        head: The head's directory, such as runs/eagle-head/best.
        target: The target model. Default: the one named in the head's manifest.
        target_gguf: The target's GGUF file, whose tokenizer a file for llama.cpp carries. Default: --target if it is
            one, else it is made of the target's tokenizer.
        num_drafted: Drafted tokens a round in the printed command; 0 takes the fastest chain of `eval bench --card`,
            else the head's tau in training, at most 5, else 3; a block drafter's whole block.
        weights: Type of the exported weights; auto keeps the head's. fp8 and int8 are for vllm and sglang: the layers'
            matrices in 8 bits, all else in 16, with the acceptance before and after. q8_0 is llama.cpp's.
        license: License of the head, for the card.
    """

    format: Literal["original", WrittenFormat] = ORIGINAL
    output: Path
    head: Path
    target: str | None = None
    target_gguf: Path | None = None
    num_drafted: int = 0
    weights: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "q8_0"] = "auto"
    license: str = ""

    def __post_init__(self) -> None:
        from draftsmith.modules.decoding.tree import MAX_NODES

        check_range("num_drafted", self.num_drafted, 0, MAX_NODES)
        if self.format == GGUF and self.weights in ("fp8", "int8"):
            raise InputError("weights", self.weights, "a type of GGUF, of which q8_0 has 8 bits", "Pass q8_0.")
        if self.format != GGUF and (self.weights == "q8_0" or self.target_gguf is not None):
            found, remedy = f"--format {self.format}", "Pass it, or leave out --weights q8_0 and --target-gguf."
            raise InputError("format", found, f"{GGUF}, which writes GGUF", remedy)


@dataclass(frozen=True)
class ImportConfig:
    """Write a head of another system as one of ours, which decodes, is measured and is trained on. Or write a head,
    also one of ours, as the head of a changed target, such as a fine-tune: --target NEW. No weight is trained.

    Attributes:
        directory: The head: a local directory or a hub id, with config.json and model.safetensors or pytorch_model.bin.
        output: The head directory to write; new or empty.
        target: The model that a drafting head drafts for. It is recorded, and the head is refused on other models. If
            the head was trained for another one, of the same sizes and tokens, it is bound to this one; what was
            measured with the other does not hold.
        head: The drafter that an acceptance head was trained for, a draft model or head; recorded in the same way.
        format: Whose head it is: eagle (SafeAILab), vllm, sglang, speculators, llamacpp, deepspec, specforge, modelopt
            (DSpark) or specdec_pp; auto detects it.
        w_rej: Loss weight of rejected tokens that an acceptance head was trained with (SpecDec_pp's
            --weight_mismatch), which no file has; it corrects the calibrated output.
        loader: How the target or draft is read; lean for Llama-family weights, hf for any transformers model.
        trust_remote_code: Run code that comes with the target or draft; never with the head.
        server: Address of a vLLM server that runs the target, of which then only the embeddings are read here.
    """

    directory: str
    output: Path
    target: str | None = None
    head: str | None = None
    format: AnyFormat = "auto"
    w_rej: float = 1.0
    loader: Loader = "auto"
    trust_remote_code: bool = False
    server: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.w_rej < float("inf"):
            raise InputError("w_rej", self.w_rej, "a number above 0", "Pass 1 where rejected tokens weighed no more.")
