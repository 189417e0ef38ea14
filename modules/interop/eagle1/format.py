"""What SafeAILab/EAGLE, vLLM and SGLang do alike with the directory of an EAGLE-1 head; their files have the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from draftsmith.modules.interop.base import (
    Finding,
    ForeignHead,
    HeadFormat,
    Measure,
    Package,
    Parsed,
    Reading,
    TargetFacts,
    Trial,
)
from draftsmith.modules.interop.eagle1.compare import DRAFT_STEPS, ReadingComparison, settings_differ
from draftsmith.modules.interop.eagle1.detect import producer
from draftsmith.modules.interop.eagle1.directory import Producer, parse_head
from draftsmith.modules.interop.eagle1.reader import Biases, Reader, Sizes, sizes, slots
from draftsmith.modules.interop.eagle1.rope import Rope, transformers_rope


class EagleFormat(HeadFormat):
    """A directory of `config.json` and one weights file, read by the rules of one system.

    zero_bias: it puts zeros into the biases of q, k, v and o before it loads. uninitialised: what else a parameter
    holds that no tensor fills. truncates: the draft's logits end at the config's vocab_size.
    """

    kind = "eagle"
    probe_room = DRAFT_STEPS
    zero_bias: ClassVar[bool] = False
    uninitialised: ClassVar[str] = "random numbers"
    truncates: ClassVar[bool] = True

    def recognises(self, found: ForeignHead) -> bool:
        return found.fuses_two and producer(found) == self.name

    @abstractmethod
    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """Which linear layers it creates with a bias, by `config.json`."""

    @abstractmethod
    def check_config(self, reader: Reader) -> None:
        """Findings about the config's fields."""

    @abstractmethod
    def load(self, reader: Reader, name: str) -> None:
        """What it does with a tensor of the file."""

    def finish(self, reader: Reader) -> None:
        """What is left to say once all is read."""

    def sizes(self, raw: Mapping[str, Any]) -> Sizes:
        """The sizes it goes by."""
        return sizes(raw)

    def rope(self, raw: Mapping[str, Any]) -> Rope:
        """The rotary settings it goes by."""
        return transformers_rope(raw)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        raw = package.config
        reader, size = Reader(package, target, self.system), self.sizes(raw)
        reader.take(size, slots(size, self.biases(raw), self.zero_bias), self.rope(raw))
        self.check_config(reader)
        for name in package.tensors:
            self.load(reader, name)
        reader.missing(self.uninitialised, self.zero_bias)
        reader.surroundings(self.truncates)
        self.finish(reader)
        return reader.reading()

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        raw = package.config
        return parse_head(package, target, Producer(self.system, self.biases(raw), sizes(raw), self.zero_bias))

    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        return ReadingComparison(reading, package, trial).measures(head)

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The type to run in: the target's, whatever type the weights are stored in. SGLang would otherwise run a head
        in another type than its target."""
        named = target.get("dtype") or target.get("torch_dtype")
        return {"torch_dtype": named, "dtype": named} if named else {}

    def recorded(self, state: Mapping[str, Tensor], package: Package) -> Mapping[str, Tensor]:
        return state

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        return settings_differ(config, reading)
