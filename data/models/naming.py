"""What users know models and prompts by, for errors of the core, which knows neither ids nor paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from draftsmith.modules.finite import NonFinite


@contextmanager
def naming(prompts: Sequence[str] = (), paths: Mapping[str, str | None] | None = None) -> Iterator[None]:
    """A NonFinite that leaves the block says of which prompt it is, and what the user passed its model as.

    prompts: ids, by their places in the batch. paths: flag -> what was passed; the command line adds its own settings'
    (`launch/errors.py`), so they are needed only where the error does not get there.
    """
    try:
        yield
    except NonFinite as error:
        if prompts:
            error.prompt = error.prompt or prompts[error.row or 0]
        if paths:
            error.path = error.path or paths.get(error.model or "")
        raise
