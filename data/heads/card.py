"""The cards of heads that draft and of draft models, and which card is whose."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from draftsmith.data.heads.acceptance_card import AcceptanceCard
from draftsmith.data.heads.markdown import shell
from draftsmith.data.heads.sections import ModelCard
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.base import HeadCard
from draftsmith.modules.interop import formats_of, hf_assisted

DRAFT_MODEL = HeadCard(
    "Draft model",
    "A draft model for transformers' assisted generation, with the settings that were measured to suit it.",
    ("assisted-generation",),
    f"{hf_assisted.NAME}:k=5",
)


def model_card(
    kind: str,
    manifest: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None = None,
    export: Mapping[str, Any] | None = None,
) -> str:
    """The card of a head of this kind. The others are those of `ModelCard`."""
    card = DrafterCard if kind in learned() else AcceptanceCard
    return card(kind, manifest, measured, export).text()


def draft_model_card(manifest: Mapping[str, Any], export: Mapping[str, Any]) -> str:
    """The card of a draft model that was exported."""
    return DraftModelCard("", manifest, None, export).text()


class DrafterCard(ModelCard):
    """The card of a learned drafter: what it is, it says itself (`DraftHead.card`)."""

    @cached_property
    def about(self) -> HeadCard:
        return head_class(self.kind).card(self.head)

    @property
    def models_words(self) -> str:
        return f"--target {shlex.quote(self.target or 'TARGET')} --draft DIR"

    def exports(self) -> list[str]:
        target = shlex.quote(self.target or "TARGET")
        names = [format.name for format in formats_of(self.kind) if format.holds(self.head)]
        return [f"draftsmith export --head DIR --format {name} --output DIR-{name} --target {target}" for name in names]

    def own_settings(self) -> list[str]:
        fields = dataclasses.fields(head_class(self.kind).Settings)
        return [field.name for field in fields if not field.metadata.get("volatile")]


class DraftModelCard(ModelCard):
    """The card of a draft model for transformers; the model's own says the rest."""

    about = DRAFT_MODEL
    language = "python"

    @property
    def models_words(self) -> str:
        return f"--target {shlex.quote(self.target or 'TARGET')} --draft DIR"

    def sections(self) -> dict[str, Callable[[], str]]:
        kept = ("Target and tokenizer", "tau by task", "How to use it", "Licence", "Versions")
        return {name: section for name, section in super().sections().items() if name in kept}

    def target_section(self) -> str:
        export = self.export or {}
        lines = [f"- {flag}: {self.known(export.get(flag))}" for flag in ("target", "draft")]
        lines.append(f"- identity of the draft: {self.known(self.models.get('draft'))}")
        lines.append(f"- tokenizer: {self.known(self.models.get('tokenizer'))}")
        return "\n".join(lines)

    def tau_section(self) -> str:
        return f"Not measured yet. This measures it:\n\n{shell(self.bench_command)}"

    def licence_section(self, others: str = "") -> str:
        whose = "It is that of the draft model, which this program does not know"
        return f"{self.licence_stated} {whose}: look it up before you share it."
