"""Public formats of heads: pure maps between other systems' names and ours, one file a system."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.modules.formats.base import HeadFormat


@functools.cache
def formats() -> dict[tuple[str, str], HeadFormat]:
    """Return every format by its name and the kind of our heads that it holds.

    Imported here: the command line asks for names only. The order is that in which `detect` asks them.
    """
    from draftsmith.modules.formats import block
    from draftsmith.modules.formats.llamacpp import LlamaCppEagle3
    from draftsmith.modules.formats.llamacpp_block import LlamaCppBlock
    from draftsmith.modules.formats.medusa import Medusa
    from draftsmith.modules.formats.safeailab import SafeAILabEagle, SafeAILabEagle3
    from draftsmith.modules.formats.sglang import SGLangEagle, SGLangEagle3
    from draftsmith.modules.formats.specdec_pp import SpecDecPP
    from draftsmith.modules.formats.speculators import SpeculatorsEagle3
    from draftsmith.modules.formats.vllm import VLLMEagle, VLLMEagle3

    known: tuple[HeadFormat, ...] = (
        SpecDecPP(),
        LlamaCppEagle3(),
        SafeAILabEagle(),
        VLLMEagle(),
        SGLangEagle(),
        SafeAILabEagle3(),
        VLLMEagle3(),
        SGLangEagle3(),
        SpeculatorsEagle3(),
        Medusa(),
        *(form.of(kind) for form in (LlamaCppBlock, *block.FORMATS) for kind in block.KINDS),
    )
    return {(format.name, format.kind): format for format in known}


def format_names(written: bool = False) -> tuple[str, ...]:
    """Return the names on the command line. written: only of formats that can be exported."""
    return tuple(dict.fromkeys(name for (name, _), format in formats().items() if format.writes or not written))


def formats_of(kind: str) -> list[HeadFormat]:
    """Return the formats that export a kind of head; empty if there is none."""
    return [format for format in formats().values() if format.kind == kind and format.writes]
