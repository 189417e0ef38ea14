"""Public formats of heads: pure maps between other systems' names and ours."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.modules.formats.base import HeadFormat, TargetFacts


GGUF = "llamacpp"  # the format whose heads are one GGUF file
ORIGINAL: Final = "original"  # that of the directory which a head was imported from
MTP = "mtp"  # the format whose heads are part of their target's checkpoint


@functools.cache
def formats() -> dict[tuple[str, str], HeadFormat]:
    """Return every format by its name and the kind of our heads that it holds."""
    # Imported here: the command line asks for names only.
    from draftsmith.modules.formats.mtp import MtpFormat
    from draftsmith.modules.formats.specdec_pp import SpecDecPP
    from draftsmith.modules.formats.systems import FORMATS

    known: tuple[HeadFormat, ...] = (SpecDecPP(), *FORMATS, MtpFormat())
    return {(format.name, format.kind): format for format in known}


def formats_of(kind: str) -> list[HeadFormat]:
    """Return the formats that export a kind of head; empty if there is none."""
    return [format for format in formats().values() if format.kind == kind and format.writes]


def check_served(format: HeadFormat, target: TargetFacts) -> None:
    """Raise InputError if a format's system cannot draft with such a head for a target."""
    if reason := format.unserved(target):
        others = [other.name for other in formats_of(format.kind) if not other.unserved(target)]
        remedy = f"Choose --format {' or '.join(others)}." if others else "Train an EAGLE-3 head."
        raise InputError("target", f"{target.served_family}: {format.system} {reason}", "one that it takes", remedy)
