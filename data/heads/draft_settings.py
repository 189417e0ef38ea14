"""`--draft DIR`: what drafts, a language model or a trained head; the directory says which."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from draftsmith.data.heads.directory import kind_at
from draftsmith.data.store.manifest import volatile
from draftsmith.modules.types import InputError

MODEL = "draft"  # what a draft model is called where heads have their kinds
ROLES = ("target", "mid", "acceptance")  # models that are named by what they are for


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Settings of a command that uses drafters.

    Attributes:
        draft: what drafts: a draft model, or the directory of a trained head, which says what it is; repeated for
            several.
    """

    draft: tuple[str, ...] | str | None = volatile(())

    def __post_init__(self) -> None:
        given: Any = self.draft
        plain = (given,) if isinstance(given, str) else tuple(given or ())
        object.__setattr__(self, "draft", plain)

    @property
    def drafters(self) -> dict[str, str]:
        """`draft`, of a language model, or the kind of a head -> what the user passed.

        Raises:
            InputError: two of a kind, or a head that does not draft.
        """
        found: dict[str, str] = {}
        for directory in self.draft or ():
            kind = kind_at(directory) or MODEL
            if kind == "acceptance":
                remedy = "Pass it with --acceptance."
                raise InputError("draft", f"{directory}, an acceptance head", "a model or head that drafts", remedy)
            if kind in found:
                what = "draft models" if kind == MODEL else f"{kind} heads"
                both = f"{found[kind]} and {directory}, two {what}"
                raise InputError("draft", both, "one of a kind", "Leave one of them out.")
            found[kind] = directory
        return found

    @property
    def paths(self) -> dict[str, str]:
        """`drafters`, and the other models of the command by their roles; what was not passed is left out."""
        own = {spec.name for spec in dataclasses.fields(self)} & set(ROLES)
        given = {role: getattr(self, role) for role in ROLES if role in own}
        return {role: str(path) for role, path in given.items() if path} | self.drafters
