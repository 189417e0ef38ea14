"""Trainers whose heads are read and not written: servers read their files, or an export of ours.

DeepSpec (modeling/dspark), SpecForge 0.2.0, ModelOpt 0.47 (export/plugins/hf_spec_export.py), TorchSpec.
"""

from __future__ import annotations

from collections.abc import Iterator

from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.formats.base import Package, Raw, TargetFacts
from draftsmith.modules.formats.block import CONTEXT, FLAT, OUTPUTS, BlockFormat
from draftsmith.modules.formats.eagle3 import Eagle3Format
from draftsmith.modules.formats.llama import architecture, layer_ids
from draftsmith.modules.formats.llama_format import Refusal


class DeepSpecEagle3(Eagle3Format):
    name, system, writes = "deepspec", "DeepSpec", False
    marks = ("Qwen3Eagle3Model",)
    layer_names = ("layers.0",)
    listed_states = True

    def layers(self, raw: Raw, target: TargetFacts | None) -> tuple[int, ...] | None:
        ids = layer_ids(raw, field=OUTPUTS)
        return None if ids is None else tuple(number + 1 for number in ids)


class DeepSpecBlock(BlockFormat):
    """DFlash heads of DeepSpec are anchor-first too, and have the name of DSpark; its layers rotate whole heads."""

    name, system, writes = "deepspec", "DeepSpec", False
    anchored = ("dflash", "dspark")
    reads_part = False
    listed_states = True

    def wrote(self, package: Package) -> bool:
        return architecture(package.config) == "Qwen3DSparkModel" and "num_anchors" in self.top_level(package.config)

    def refused(self, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
        if config.layout != "anchor-first":
            yield "layout", config.layout, "anchor-first", "Train the head with other options."


class SpecForgeBlock(BlockFormat):
    name, system, writes = "specforge", "SpecForge", False
    marks = ("DSparkDraftModel",)
    anchored = ("dspark", *marks)
    reads_part = False
    loads = ("layout", "markov_rank")

    def top_level(self, config: Raw) -> Raw:
        return {"confidence_head_with_markov": False, **super().top_level(config)}


class ModelOptBlock(BlockFormat):
    """No server reads its names, nor TorchSpec's."""

    name, system, writes = "modelopt", "ModelOpt", False
    marks = ("shift_label",)
    listed_states = norms_last = True
    own_names = FLAT


class TorchSpecBlock(BlockFormat):
    name, system, writes = "torchspec", "TorchSpec", False
    own_names = CONTEXT


TRAINERS = (DeepSpecBlock, SpecForgeBlock, ModelOptBlock, TorchSpecBlock)
