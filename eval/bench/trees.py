"""Draft trees by name, as methods are told them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import yaml

from draftsmith.modules.decoding.tree import MAX_NODES, StaticTree
from draftsmith.modules.types import InputError, at_most


def read_tree(name: str) -> StaticTree:
    """A tree of configs/trees by name, or a YAML file that lists paths of ranks.

    Raises:
        InputError: no such tree, or one that is not a tree.
    """
    shipped = files("draftsmith.configs") / "trees" / f"{name}.yaml"
    source = shipped if shipped.is_file() else Path(name)
    if not source.is_file():
        names = ", ".join(
            sorted(p.name.removesuffix(".yaml") for p in (files("draftsmith.configs") / "trees").iterdir())
        )
        raise InputError("eagle-tree, tree", repr(name), f"a YAML file, or one of: {names}", "Correct the path.")
    try:
        tree = StaticTree.from_paths([[int(rank) for rank in path] for path in yaml.safe_load(source.read_text())])
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            "eagle-tree, tree", f"{name}: {error}", "a list of paths such as [0, 1]", "Correct it."
        ) from error
    at_most("eagle-tree, nodes", len(tree.parents), MAX_NODES)
    return tree
