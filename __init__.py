"""Draftsmith: trains the learned parts of speculative decoding and measures what they are worth.

Importing the package loads nothing heavy; `draftsmith.__version__` is looked up when it is first asked for.
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("draftsmith")
