"""Start and end Weights & Biases runs, and describe heads and data as artifacts.

The client's module is passed in: only train may import it (import-linter's contract in pyproject.toml).
"""

from __future__ import annotations

import netrc
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules.pretrained.files import copy_file
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError

# Only what the run itself logs: no console text, machine load, git state, code, host name, paths or package list.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "init_timeout": 20,  # seconds
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "",
    "disable_git": True,
    "save_code": False,
}


def has_wandb_key() -> bool:
    """Return whether there is a key in the environment or in the netrc file of `wandb login`; the key is not read."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return path.exists() and host in netrc.netrc(str(path)).hosts
    except (netrc.NetrcParseError, OSError):
        return False


def check_names(wandb: Any, project: str) -> None:
    """Raise InputError if the client refuses a project, or a variable of its own: its errors come late, as tracebacks.

    wandb: the client's module.
    """
    names = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    for name, value in {**names, "project": project}.items():
        try:
            wandb.Settings().update_from_env_vars({name if name in names else "WANDB_PROJECT": value})
        except Exception as error:  # the client has a family of errors, and pydantic's
            found = "a value" if "KEY" in name else repr(value)
            reason = " ".join(str(error).split())
            raise InputError(name, found, f"one that Weights & Biases takes ({reason})", "Change it.") from error


def start_wandb(wandb: Any, offline: bool, options: dict[str, Any], log: Callable[[str], None]) -> Any:
    """Start a run; fall back to offline if online does not start.

    wandb: the client's module. options: of its `init`. log: receives the reason why a run is offline.
    """
    settings = wandb.Settings(**SETTINGS)
    if not offline:
        try:
            return wandb.init(**options, mode="online", settings=settings)
        except Exception as error:  # the client has a family of errors for network, key and server
            log(f"Weights & Biases: did not start online ({type(error).__name__}), so this run is logged offline")
            # Otherwise the next init waits for the failed one.
            wandb.teardown()
    return wandb.init(**options | {"resume": None}, mode="offline", settings=settings)


def finish_wandb(run: Any, log: Callable[[str], None], exit_code: int = 0) -> None:
    """End a run; log the command that uploads an offline one."""
    files = Path(run.dir).resolve()
    run.finish(exit_code=exit_code)
    if run.offline:
        log(f"Weights & Biases: logged offline. Upload it with: {shlex.join(['wandb', 'sync', str(files.parent)])}")


def head_artifact(wandb: Any, name: str, directory: Path, card: Path) -> Any:
    """Describe a head directory as an artifact of type model, with its card as the description.

    name: shared by its versions. card: file that receives a copy of the card.
    """
    manifest = read_object(directory / "manifest.json", {})
    metadata = {key: manifest.get(key) for key in ("step", "metrics", "inputs", "models", "git_commit")}
    text = (directory / "README.md").read_text("utf-8")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    artifact = wandb.Artifact(name, type="model", description=text, metadata=metadata)
    # Files are referenced, not copied: an offline run reads them when it is uploaded, and refuses changed ones. By then
    # `eval bench --card` may have written the card anew, so that the copy is referenced.
    copy_file(directory / "README.md", card)
    for path in sorted(directory.resolve().iterdir()):
        source = card if path.name == "README.md" else path
        artifact.add_file(str(source), name=path.name, policy="immutable", skip_cache=True)
    return artifact


def data_artifact(wandb: Any, directory: Path) -> Any:
    """Describe a data artifact as an artifact of type dataset that holds its manifest, with the hash of every file.

    Its name has the digest, so that runs on the same data share one artifact.
    """
    manifest = Manifest.read(directory)
    metadata = {"digest": manifest.digest, "counts": manifest.counts, "command": manifest.command}
    artifact = wandb.Artifact(f"{manifest.kind}-{manifest.digest[:12]}", type="dataset", metadata=metadata)
    artifact.add_file(str(directory.resolve() / MANIFEST), name=MANIFEST, policy="immutable", skip_cache=True)
    return artifact


def use_artifact(run: Any, artifact: Any) -> None:
    """Record an artifact as an input of a run."""
    if run.offline:
        # The client's `use_artifact` asks the server for the version. Offline, write what `wandb sync` sends.
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact)
