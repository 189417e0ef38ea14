"""What drafts the answers of `data responses`, if anything does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.heads.frozen_drafter import load_drafter
from draftsmith.data.models.loading import check_same_tokenizer
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.chains import chain_methods
from draftsmith.modules.drafters.methods import Method, Models, parse_method
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class AnswerDrafter:
    """A method and the one model or head that it may use. identity: of that model, for the manifest."""

    target: CausalLM
    method: Method
    draft: CausalLM | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        target: CausalLM,
        target_path: str,
        path: str | None,
        label: str | None,
        load: Callable[[str], CausalLM],
    ) -> AnswerDrafter:
        """path: what drafts, as the user passed it. label: the method, as the user wrote it. load: reads a model.

        Raises:
            InputError: a draft that does not fit the target, or a method that needs another.
        """
        if path is None:
            return cls(target, fitting("ar" if label is None else label, ""))
        frozen = load_drafter(path, lambda: target, load)
        method = fitting(chain_methods().get(frozen.name, frozen.name) if label is None else label, frozen.name)
        identity = {"drafted_by": frozen.identity}
        if frozen.head is not None:
            return cls(target, method, heads={frozen.name: frozen.head}, identity=identity)
        check_same_tokenizer(target_path, path)
        theirs, ours = frozen.lm.info.vocab_size, target.info.vocab_size
        if theirs != ours:
            found = f"{path} of vocabulary {theirs}"
            raise InputError("draft", found, f"{ours}, the target's", "Use a draft of the same family.")
        return cls(target, method, frozen.lm, identity=identity)

    def build(self, capacity: int, ends: tuple[int, ...], rows: int) -> Drafter | None:
        """A fresh drafter for so many rows. capacity: most tokens of each, drafts included. ends: tokens that end an
        answer."""
        models = Models(self.target, self.draft, heads=self.heads, capacity=capacity, ends=ends)
        return self.method.build(models, rows)


def fitting(label: str, given: str) -> Method:
    """The method of this label, where it needs nothing but what is given: `draft`, a head's kind, or nothing.

    Raises:
        InputError: it needs more; its answers are not the target's; it goes by measured times, so that nobody could
            make the answers again; it does not draft for rows side by side.
    """
    method = parse_method(label)
    lacking = [need for need in method.needs if need != given]
    if lacking:
        what = f"--draft, which is {given}" if given else "no --draft"
        remedy = "Pass --draft, or choose another method."
        raise InputError("method", f"{label}, which needs {lacking[0]}, with {what}", "what it needs", remedy)
    if given and not method.needs:
        raise InputError("draft", f"{given} with --method {label}", "a method that uses it", "Leave one of them out.")
    if not method.lossless:
        found, remedy = f"{label}, which changes the answers", "Choose another method, or leave the setting out."
        raise InputError("method", found, "a lossless method: answers are to be the target's", remedy)
    if method.timed:
        remedy = "Give a number, as in online:c=0.1, or choose a method that has one."
        raise InputError("method", f"{label}, which goes by times of this machine", "numbers in its place", remedy)
    if method.trees or not method.batchable:
        remedy = "Choose a chain, a dynamic tree or pld."
        raise InputError("method", label, "a method that drafts for rows without a file of its own", remedy)
    return method
