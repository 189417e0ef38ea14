"""Starting a Weights & Biases run, alike for trainings and reports: online with a key, else offline if asked for.

The client itself is passed in: who may import it is decided elsewhere (tests/architecture_test.py).
"""

from __future__ import annotations

import netrc
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.store.files import copy_file
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.data.store.reading import read_object

WANDB_START_TIMEOUT_S = 20
# Quiet, and nothing but what the run itself gives: no console text, machine load, git state or code, no host name,
# paths and arguments of the process, no list of installed packages.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "init_timeout": WANDB_START_TIMEOUT_S,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "",
    "disable_git": True,
    "save_code": False,
}
Choice = Literal["auto", "online", "offline", "off"]


def has_wandb_key() -> bool:
    """A key in the environment or in the netrc file that `wandb login` writes. Looks; does not read the key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return path.exists() and host in netrc.netrc(str(path)).hosts
    except (netrc.NetrcParseError, OSError):
        return False


def configured() -> bool:
    """Whether somebody has set the client up here: a key, or a mode in its own environment variable."""
    return has_wandb_key() or bool(os.environ.get("WANDB_MODE"))


def switched_off(choice: Choice) -> bool:
    """Whether tracking is off by the setting, or by the client's own environment variable."""
    return choice == "off" or os.environ.get("WANDB_MODE") == "disabled"


def start_wandb(wandb: Any, choice: Choice, options: dict[str, Any], say: Callable[[str], None]) -> Any:
    """A run, online with a key, else offline; online that does not start falls back to offline.

    wandb: the client's module. options: of its `init`. say: where a reader is told why it is offline.
    """
    settings = wandb.Settings(**SETTINGS)
    offline = choice == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if not offline and not has_wandb_key():
        offline = True
        say("Weights & Biases: no API key, so this run is logged offline (`wandb login` to change that)")
    if not offline:
        try:
            return wandb.init(**options, mode="online", settings=settings)
        except Exception as error:  # the client raises a family of its own for network, key and server troubles
            say(f"Weights & Biases: did not start online ({type(error).__name__}), so this run is logged offline")
            wandb.teardown()  # else the next init waits for the failed one
    return wandb.init(**options | {"resume": None}, mode="offline", settings=settings)


def finish_wandb(run: Any, say: Callable[[str], None], exit_code: int = 0) -> None:
    """End the run; of an offline one, say how it is uploaded."""
    files = Path(run.dir).resolve()
    run.finish(exit_code=exit_code)
    if run.offline:
        say(f"Weights & Biases: logged offline. Upload it with: {shlex.join(['wandb', 'sync', str(files.parent)])}")


def head_artifact(wandb: Any, name: str, directory: Path, card: Path) -> Any:
    """A head directory as an artifact of type model, with its card as the description.

    name: what its versions have in common. card: file that receives a copy of the card. The other files are referred
    to where they lie, not copied: an offline run reads them when it is uploaded; but a benchmark may have written the
    card anew by then (`eval bench --card`), and a file that has changed is not taken.
    """
    manifest = read_object(directory / "manifest.json", {})
    metadata = {key: manifest.get(key) for key in ("step", "metrics", "inputs", "models", "git_commit")}
    text = (directory / "README.md").read_text("utf-8")
    artifact = wandb.Artifact(plain_name(name), type="model", description=text, metadata=metadata)
    copy_file(directory / "README.md", card)
    for path in sorted(directory.resolve().iterdir()):
        source = card if path.name == "README.md" else path
        artifact.add_file(str(source), name=path.name, policy="immutable", skip_cache=True)
    return artifact


def data_artifact(wandb: Any, directory: Path) -> Any:
    """An artefact of ours as one of type dataset: its manifest, which has the hash of every file. The data stay where
    they are. The name has the digest, so that the same data are the same artifact for every run that reads them."""
    manifest = Manifest.read(directory)
    metadata = {"digest": manifest.digest, "counts": manifest.counts, "command": manifest.command}
    artifact = wandb.Artifact(f"{manifest.kind}-{manifest.digest[:12]}", type="dataset", metadata=metadata)
    artifact.add_file(str(directory.resolve() / MANIFEST), name=MANIFEST, policy="immutable", skip_cache=True)
    return artifact


def use_artifact(run: Any, artifact: Any) -> None:
    """Say that the run was made from the artifact. The client's own `use_artifact` asks its server for the version, and
    offline there is none: what it writes for the server is written here, and `wandb sync` sends it."""
    if run.offline:
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact)


def plain_name(name: str) -> str:
    """As the names of artifacts may be."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
