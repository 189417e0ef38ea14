"""`draftsmith train KIND`: a training, also on from another system's head, and a warning if its numbers are bad."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.config import TrainDrafterConfig
    from draftsmith.train.prepare import TrainedConfig


def run(config: TrainedConfig) -> Path | None:
    """Train a head, as `train.command.run`, and say how to explain bad numbers.

    Raises:
        InputError: the packages of the extra `train` are not installed.
    """
    if missing := [name for name in ("lightning", "wandb") if find_spec(name) is None]:
        found = f"no {' and no '.join(missing)}"
        raise InputError("train", found, "the extra `train`", "Run: pip install 'draftsmith[train]'")
    from draftsmith.train.command import run as train
    from draftsmith.train.config import TrainDrafterConfig
    from draftsmith.train.metrics import rank

    with tempfile.TemporaryDirectory() as scratch:
        best = train(with_own_head(config, Path(scratch)))
    if best and isinstance(config, TrainDrafterConfig) and not config.drafter.saved_as_model and rank() == 0:
        explain(best, config)
    return best


def with_own_head(config: TrainedConfig, scratch: Path) -> TrainedConfig:
    """Return the options with --init as one of our heads: another system's is imported into OUTPUT/init.

    scratch: takes it if nothing is trained.

    Raises:
        InputError: `import` refuses it, or the output was begun with another head.
    """
    from draftsmith.data.ranks import place
    from draftsmith.launch.export.import_head import ImportConfig, hashes
    from draftsmith.launch.export.import_head import run as import_head
    from draftsmith.modules.formats import MTP
    from draftsmith.modules.formats.foreign import head_kind
    from draftsmith.modules.pretrained.directory import package_directory, read_package
    from draftsmith.modules.pretrained.heads import kind_at, named_kind
    from draftsmith.modules.pretrained.reading import read_object
    from draftsmith.train.config import TrainDrafterConfig

    if not isinstance(config, TrainDrafterConfig) or config.starting_head is None or kind_at(config.init):
        return config
    directory = (scratch if config.plan else config.output) / "init"
    manifest, rank = directory / "manifest.json", place().rank or place().local_rank
    while rank and not config.plan and not manifest.exists():
        time.sleep(1)
    if not manifest.exists():
        kind = MTP if config.kind == MTP else head_kind(read_package(config.init))
        if kind != config.kind:
            found, remedy = f"{config.init}, {named_kind(kind)} head", f"Train it with: draftsmith train {kind}"
            raise InputError("init", found, named_kind(config.kind), remedy)
        format: Any = MTP if config.kind == MTP else "auto"
        own = ImportConfig(config.init, directory, config.target, format=format, loader=config.loader)
        import_head(dataclasses.replace(own, trust_remote_code=config.trust_remote_code))
    # What was imported stays when the files are moved.
    elif config.kind != MTP and Path(config.init).exists():
        begun = read_object(manifest, {})["imported"]["sha256"]
        if begun != hashes(package_directory(config.init)):
            expected = f"the head that {config.output} was begun with"
            raise InputError("init", config.init, expected, "Choose another output.")
    return dataclasses.replace(config, init=str(directory))


def explain(best: Path, config: TrainDrafterConfig) -> None:
    """Warn if the trained head's metrics are bad."""
    from draftsmith.data.console import log_note
    from draftsmith.data.store.parts import words_of
    from draftsmith.eval.diagnose.diagnosis import bad_numbers
    from draftsmith.modules.pretrained.reading import read_object

    warning = bad_numbers(read_object(best / "manifest.json", {"metrics": dict})["metrics"])
    if warning:
        words = [
            "diagnose",
            str(best),
            *(f"--data={word}" for word in words_of(config.data)),
            "--target",
            config.target,
        ]
        log_note(f"warning: {warning}. See why: draftsmith {shlex.join(words)}")
