"""What users know models and prompts by, for errors that the core can only say the kind of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from draftsmith.modules.finite import NonFinite


@contextmanager
def naming(paths: Mapping[str, str | None] | None = None, prompts: Sequence[str] = ()) -> Iterator[None]:
    """A NonFinite that leaves the block says what the user passed its model as, and of which prompt it is.

    paths: flag -> what the user passed. prompts: the prompts' ids, by their places in the batch.
    """
    try:
        yield
    except NonFinite as error:
        if paths:
            error.path = error.path or str(paths.get(error.model or "") or "") or None
        if prompts:
            error.prompt = error.prompt or prompts[error.row or 0]
        raise
