"""`draftsmith train KIND`: a training, and a diagnosis of its head if the head's numbers are bad."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.config import TrainDrafterConfig
    from draftsmith.train.data import HeadDataModule
    from draftsmith.train.module import LitDrafter
    from draftsmith.train.prepare import TrainedConfig

# Validation texts that a diagnosis reads, which takes seconds.
DIAGNOSED = 64
# Of a training whose head is diagnosed; shorter ones only try whether it runs.
LEAST_STEPS = 20


def run(config: TrainedConfig) -> Path | None:
    """Train a head, as `train.command.run`, and explain bad numbers.

    Raises:
        InputError: the packages of the extra `train` are not installed.
    """
    if missing := [name for name in ("lightning", "wandb") if find_spec(name) is None]:
        found = f"no {' and no '.join(missing)}"
        raise InputError("train", found, "the extra `train`", "Run: pip install 'draftsmith[train]'")
    from draftsmith.train.command import run as train

    with tempfile.TemporaryDirectory() as scratch:
        return train(with_own_head(config, Path(scratch)), explain)


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


def explain(best: Path, config: TrainDrafterConfig, module: LitDrafter, data: HeadDataModule) -> None:
    """Warn if the trained head's metrics are bad, with a diagnosis on some validation samples."""
    from draftsmith.data.console import log_note
    from draftsmith.data.store.parts import words_of
    from draftsmith.eval.diagnose.diagnosis import bad_numbers, diagnose
    from draftsmith.modules.pretrained.reading import read_object
    from draftsmith.modules.targets.outer import OuterLM

    warning = bad_numbers(read_object(best / "manifest.json", {"metrics": dict})["metrics"])
    if not warning:
        return
    # Of a target elsewhere there is nothing to read with, a smoke test has nothing to explain, and --minutes are over.
    if isinstance(module.target, OuterLM) or module.total_steps < LEAST_STEPS or config.minutes:
        words = ["diagnose", str(best), *(f"--data={word}" for word in words_of(config.data))]
        warning += f". See why: draftsmith {shlex.join(words)} --target {config.target}"
    else:
        # Whole texts: an answer in a piece of one has lost its context.
        val = data.val
        texts = itertools.islice(val.dataset.whole_texts(val.indices), DIAGNOSED)
        rows = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist()} for ids, mask in texts]
        warning += f"\n{diagnose(best, module.target, rows, val.dataset.manifest)}"
    log_note(f"warning: {warning}")
