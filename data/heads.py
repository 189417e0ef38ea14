"""Head directories: `config.json`, `model.safetensors`, `manifest.json`, `README.md`; written whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

SCHEMA_VERSION = 1
# Registry name = file name in modules/heads; the classes that hold its settings and its weights.
HEADS = {"acceptance": ("AcceptanceHeadConfig", "AcceptanceHead"), "eagle": ("EagleConfig", "EagleHead")}


def head_classes(kind: str) -> tuple[Any, Any]:
    """The classes that hold a head's settings and its weights, by its registry name."""
    module = importlib.import_module(f"draftsmith.modules.heads.{kind}")
    config_class, head_class = HEADS[kind]
    return getattr(module, config_class), getattr(module, head_class)


def kind_of(head: nn.Module) -> str:
    """The registry name of a head."""
    return type(head).__module__.rsplit(".", 1)[-1]


def save_head(directory: str | Path, head: nn.Module, manifest: Mapping[str, Any], card: str) -> Path:
    """Write a head directory under a temporary name and rename it; an older one of that name is replaced.

    manifest: what it was made from: `target` (identity), `sampling`, inputs, seed, versions, measured numbers. The
    files' sha256 are added here.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    partial = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = {
        "kind": kind_of(head),
        "schema_version": SCHEMA_VERSION,
        "head": dataclasses.asdict(head.config),  # type: ignore[call-overload]
        "target": manifest.get("target"),
        "sampling": manifest.get("sampling"),
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Tied blocks share storage, which safetensors refuses: each tensor is stored once, under its first name.
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.named_parameters()}
    save_file(state, partial / "model.safetensors")
    (partial / "README.md").write_text(card)
    sha256 = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(partial.iterdir())}
    (partial / "manifest.json").write_text(json.dumps({"kind": "head", **manifest, "sha256": sha256}, indent=2) + "\n")
    if directory.exists():
        old = directory.with_name(directory.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
    return directory


def head_config(directory: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a complete head directory.

    Raises:
        InputError: not a head directory, an unfinished one, or one whose files changed after it was written.
    """
    directory = Path(directory)
    if not (directory / "manifest.json").exists() or not (directory / "config.json").exists():
        raise InputError(
            "head", directory, "a head directory (config.json, manifest.json)", "Train one, or check the path."
        )
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except ValueError as error:
        raise InputError(
            str(directory / "manifest.json"), f"damaged ({error})", "JSON", "Copy or train the head again."
        ) from error
    for name, sha256 in manifest.get("sha256", {}).items():
        file = directory / name
        if name != "README.md" and (not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256):
            raise InputError(
                str(file), "missing or changed content", f"sha256 {sha256[:12]}", "Copy or train the head again."
            )
    config = json.loads((directory / "config.json").read_text())
    if config.get("kind") not in HEADS:
        raise InputError("kind", config.get("kind"), " or ".join(HEADS), f"{directory} is no head of this version.")
    return config


def eagle_identity(directory: str | Path, owner: CausalLM) -> dict[str, str]:
    """What an acceptance head records of an EAGLE head that drafts for `owner`, whose own identity it keeps: the hidden
    states that it reads come from both."""
    weights = (Path(directory) / "model.safetensors").read_bytes()
    return {**owner.info.identity, "eagle": hashlib.sha256(weights).hexdigest()[:16]}


def load_head(
    directory: str | Path,
    target: CausalLM | None = None,
    kind: str | None = None,
    identity: Mapping[str, str] | None = None,
) -> nn.Module:
    """A frozen head, ready to decode, on the target's device.

    target: the model whose hidden states it reads: the target for an EAGLE head, the DRAFT for an acceptance head, and
        for one that reads an EAGLE head's the model which that head drafts for. Its width must fit, and its identity be
        the recorded one.
    kind: the registry name that is expected.
    identity: of what the head reads, where that is not the model alone (`eagle_identity`).
    """
    from safetensors.torch import load_file

    config = head_config(directory)
    if kind is not None and config["kind"] != kind:
        raise InputError(
            "head", f"{directory}, an {config['kind']} head", f"an {kind} head", "Pass it with its own flag."
        )
    config_class, _ = head_classes(config["kind"])
    fields = dict(config["head"])
    if "llama" in fields:
        rope = RopeScaling(**fields["llama"].pop("rope_scaling"))
        fields["llama"] = LlamaConfig(**fields["llama"], rope_scaling=rope)
    if "calibration" in fields:
        fields["calibration"] = tuple(fields["calibration"])
    if target is not None:
        _check_fits(directory, config, target, target.info.identity if identity is None else identity)
    head = build_head(config["kind"], config_class(**fields), load_file(Path(directory) / "model.safetensors"))
    head = head.eval().requires_grad_(False)
    return head if target is None else head.to(target.device, target.dtype if config["kind"] == "eagle" else None)


def build_head(kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A head of these settings and weights, in the weights' own type.

    state: by the names of `named_parameters`; of a tied block, once.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    _, head_class = head_classes(kind)
    head = head_class(config)
    expected = {name: tensor.shape for name, tensor in head.named_parameters()}
    wrong = sorted(set(expected) ^ set(state))
    wrong += sorted(name for name in set(expected) & set(state) if state[name].shape != expected[name])
    if wrong:
        found = f"{len(wrong)} tensors missing, unknown or of another shape ({', '.join(wrong[:4])})"
        raise InputError("model.safetensors", found, "the tensors that config.json asks for", "Copy or train it again.")
    # Not strict: a tied block's other names are not in `state`.
    head.load_state_dict(state, strict=False, assign=True)
    return head


def check_sizes(head: Mapping[str, Any], info: ModelInfo, named: str | Path) -> None:
    """Does a head (its settings as in `config.json`) fit the model that it reads? named: what the message calls it.

    Raises:
        InputError: it has another width or vocabulary.
    """
    width = head.get("hidden_size") or head["llama"]["hidden_size"]
    if width != info.hidden_size:
        found, remedy = f"{named} of width {width}", "Pass the model it was trained for."
        raise InputError("head", found, f"width {info.hidden_size}", remedy)
    vocab = head.get("llama", {}).get("vocab_size")
    if vocab is not None and vocab != info.vocab_size:
        raise InputError("head", f"{named} of vocabulary {vocab}", f"{info.vocab_size}", "Pass its own target.")


def _check_fits(directory: str | Path, config: dict[str, Any], target: CausalLM, identity: Mapping[str, str]) -> None:
    check_sizes(config["head"], target.info, directory)
    recorded = config.get("target")
    if recorded:
        different = [key for key, value in recorded.items() if identity.get(key) != value]
        different += [key for key in identity if key == "eagle" and key not in recorded]
        if different:
            raise InputError(
                "head",
                f"{directory} trained for another model ({', '.join(different)} differ)",
                "the model it was trained for",
                "Train a head for this model.",
            )


def starting_head(directory: str | Path, kind: str, width: int, vocab_size: int | None = None) -> nn.Module:
    """A head to train further: float32, trainable, on the CPU. The model that it reads from now on may be another one
    than it was trained for; it must have the same width, and for a head that knows its vocabulary the same size of it.

    Raises:
        InputError: not a head directory, a damaged one, a head of another kind, width or vocabulary.
    """
    head = load_head(directory, kind=kind)
    sizes = getattr(head.config, "llama", head.config)
    wanted = {"hidden_size": width} | ({"vocab_size": vocab_size} if vocab_size is not None else {})
    for name, size in wanted.items():
        if getattr(sizes, name) != size:
            found = f"{directory} with {name} {getattr(sizes, name)}"
            raise InputError(
                "init", found, f"{name} {size}, the model's", "Start from a head for a model of this shape."
            )
    return head.float().train().requires_grad_(True)
