"""Public formats of heads: pure maps between other systems' names and ours."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.modules.formats.base import HeadFormat


GGUF = "llamacpp"  # the format whose heads are one GGUF file
MTP = "mtp"  # the format whose heads are part of their target's checkpoint


@functools.cache
def formats() -> dict[tuple[str, str], HeadFormat]:
    """Return every format by its name and the kind of our heads that it holds."""
    # Imported here: the command line asks for names only.
    from draftsmith.modules.formats.block import BlockFormat
    from draftsmith.modules.formats.eagle1 import Eagle1Format
    from draftsmith.modules.formats.eagle3 import Eagle3Format
    from draftsmith.modules.formats.llama import BLOCK_KINDS
    from draftsmith.modules.formats.mtp import MtpFormat
    from draftsmith.modules.formats.specdec_pp import SpecDecPP
    from draftsmith.modules.formats.systems import EAGLE1_ROWS, EAGLE3_ROWS, block_rows

    known: tuple[HeadFormat, ...] = (
        SpecDecPP(),
        *(Eagle1Format(row) for row in EAGLE1_ROWS),
        *(Eagle3Format(row) for row in EAGLE3_ROWS),
        MtpFormat(),
        *(BlockFormat(row) for kind in BLOCK_KINDS for row in block_rows(kind)),
    )
    return {(format.name, format.kind): format for format in known}


def formats_of(kind: str) -> list[HeadFormat]:
    """Return the formats that export a kind of head; empty if there is none."""
    return [format for format in formats().values() if format.kind == kind and format.writes]
