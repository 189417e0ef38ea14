"""Head directories: `config.json`, `model.safetensors`, `manifest.json`, `README.md`; written whole or not at all.

A benchmark may add `measured.json` and write the card anew (data/heads/measured.py): neither is part of what is hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.data.store.files import whole_directory, write_json, write_tensors, write_text
from draftsmith.data.store.manifest import compare_identity, file_sha256, warn_not_compared
from draftsmith.data.store.reading import check_shape, read_object
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, nn

SCHEMA_VERSION = 1
# Registry name -> the module below `modules` with the classes that hold a head's settings and its weights.
HEADS = {
    "acceptance": ("acceptance.head", "AcceptanceHeadConfig", "AcceptanceHead"),
    "eagle": ("drafters.eagle.head", "EagleConfig", "EagleHead"),
}

# Of their settings, what is read before they are built.
SIZES = {"acceptance": {"hidden_size": int}, "eagle": {"llama": {"hidden_size": int, "vocab_size": int}}}
# What an acceptance head says of its labels: mix or rollout, sampling or greedy, of a draft model or of an EAGLE head.
LABELS = ("labels", "mode", "drafter")


def head_classes(kind: str) -> tuple[Any, Any]:
    """The classes that hold a head's settings and its weights, by its registry name."""
    path, config_class, head_class = HEADS[kind]
    module = importlib.import_module(f"draftsmith.modules.{path}")
    return getattr(module, config_class), getattr(module, head_class)


def kind_of(head: nn.Module) -> str:
    """The registry name of a head."""
    return next(kind for kind, (_, _, name) in HEADS.items() if name == type(head).__name__)


def head_fields(head: nn.Module) -> dict[str, Any]:
    """The settings of a head as JSON values: `head` of its config.json."""
    config: Any = head.config
    return dataclasses.asdict(config)


def save_head(directory: str | Path, head: nn.Module, manifest: Mapping[str, Any], card: str) -> Path:
    """Write a head directory under a temporary name and rename it; an older one of that name is replaced.

    manifest: what it was made from: `target` (identity), `sampling`, what LABELS names, inputs, seed, versions,
        measured numbers. The files' sha256 are added here.
    """
    directory = Path(directory)
    config = {
        "kind": kind_of(head),
        "schema_version": SCHEMA_VERSION,
        "head": head_fields(head),
        "target": manifest.get("target"),
        "sampling": manifest.get("sampling"),
        **{name: manifest[name] for name in LABELS if name in manifest},
    }
    # Tied blocks share storage, which safetensors refuses: each tensor is stored once, under its first name.
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.named_parameters()}
    with whole_directory(directory) as partial:
        write_json(partial / "config.json", config, indent=2)
        write_tensors(partial / "model.safetensors", state)
        write_text(partial / "README.md", card)
        sha256 = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(partial.iterdir())}
        write_json(partial / "manifest.json", {"kind": "head", **manifest, "sha256": sha256}, indent=2)
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
    again = "Copy or train the head again."
    manifest = read_object(directory / "manifest.json", {"sha256?": {"*": str}}, again)
    for name, sha256 in manifest.get("sha256", {}).items():
        file = directory / name
        if name != "README.md" and (not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256):
            raise InputError(
                str(file), "missing or changed content", f"sha256 {sha256[:12]}", "Copy or train the head again."
            )
    known = {"target?": (dict, None), "sampling?": (dict, None)}
    config = read_object(directory / "config.json", {"kind": object, "head": dict, **known}, again)
    if config["kind"] not in list(HEADS):  # a list: what is read may not be hashable
        raise InputError("kind", config["kind"], " or ".join(HEADS), f"{directory} is no head of this version.")
    check_shape(directory / "config.json", config["head"], SIZES[config["kind"]], again, "head")
    return config


def kind_in(directory: str | Path) -> str | None:
    """The kind of the head in a directory, as its config.json says; None where there is no head.

    Raises:
        InputError: a head of a kind that this version does not know.
    """
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "head" not in config or not isinstance(config.get("kind"), str):
        return None
    return head_config(directory)["kind"] if config["kind"] not in HEADS else config["kind"]


def eagle_identity(directory: str | Path, owner: CausalLM) -> dict[str, str]:
    """What an acceptance head records of an EAGLE head that drafts for `owner`, whose own identity it keeps: the hidden
    states that it reads come from both."""
    weights = (Path(directory) / "model.safetensors").read_bytes()
    return {**owner.info.identity, "eagle": hashlib.sha256(weights).hexdigest()[:16]}


def another_mode(directory: str | Path, params: SamplingParams) -> str | None:
    """A warning where an acceptance head is to judge drafts of another mode than its labels were made in, with the
    command that makes labels of this one; None where it is the same, or none is recorded.

    A head of several temperatures is one for all between them.
    """
    config = head_config(directory)
    made = config.get("sampling")
    if not made:
        return None
    temperature = made.get("temperature")
    several = temperature if isinstance(temperature, list) else [temperature]
    if params.greedy and several == [0]:
        return None
    within = None not in several and min(several) <= params.temperature <= max(several)
    pairs = [] if within else [("temperature", temperature, params.temperature)]
    pairs += [(name, made.get(name), getattr(params, name)) for name in ("top_k", "top_p")]
    differing = [f"{name} {theirs} there, {own} here" for name, theirs, own in pairs if theirs != own]
    if not differing:
        return None
    mode = "greedy" if params.greedy else f"sampling --temperature {params.temperature:g}"
    kept = {"top-k": params.top_k, "top-p": params.top_p} if not params.greedy else {}
    mode += "".join(f" --{name} {value:g}" for name, value in kept.items() if value != made.get(name.replace("-", "_")))
    drafter = "--eagle EAGLE" if config.get("drafter") == "eagle" else "--draft DRAFT"
    return (
        f"{directory} was trained on labels of another mode ({'; '.join(differing)}): it may stop at the wrong places. "
        f"Labels of this mode: draftsmith data acceptance --labels {config.get('labels', 'rollout')} --mode {mode} "
        f"--responses RESPONSES --target TARGET {drafter} --output DIR"
    )


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
    config = _config_of_kind(directory, kind)
    if target is not None:
        check_sizes("head", directory, config["head"], target.info.hidden_size, target.info.vocab_size)
        _check_identity(directory, config, target.info.identity if identity is None else identity)
    head = _read_head(directory, config).eval().requires_grad_(False)
    return head if target is None else head.to(target.device, target.dtype if config["kind"] == "eagle" else None)


def _config_of_kind(directory: str | Path, kind: str | None) -> dict[str, Any]:
    config = head_config(directory)
    if kind is not None and config["kind"] != kind:
        raise InputError(
            "head", f"{directory}, an {config['kind']} head", f"an {kind} head", "Pass it with its own flag."
        )
    return config


def _settings(config: dict[str, Any]) -> Any:
    """The head's own config dataclass."""
    config_class, _ = head_classes(config["kind"])
    fields = dict(config["head"])
    try:
        if "llama" in fields:
            layer = dict(fields["llama"])
            fields["llama"] = LlamaConfig(**{**layer, "rope_scaling": RopeScaling(**layer["rope_scaling"])})
        # JSON has lists only.
        fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        if "knots" in fields:
            fields["knots"] = tuple(tuple(knot) for knot in fields["knots"])
        return config_class(**fields)
    except (TypeError, KeyError) as error:  # a name that is absent, unknown, or of another type
        found = f"settings that are none of an {config['kind']} head ({error})"
        raise InputError("config.json", found, "what training wrote", "Copy or train the head again.") from error


def build_head(kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A head of these settings and weights, in the type of the weights.

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


def head_settings(directory: str | Path, kind: str) -> Any:
    """The config dataclass of a head, without its weights.

    Raises:
        InputError: no head, or one of another kind.
    """
    return _settings(_config_of_kind(directory, kind))


def _read_head(directory: str | Path, config: dict[str, Any]) -> nn.Module:
    """On the CPU, in the type of its file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / "model.safetensors"
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        remedy = "Copy or train the head again."
        raise InputError(str(file), f"damaged ({error})", "a whole safetensors file", remedy) from error
    return build_head(config["kind"], _settings(config), state)


def check_sizes(field: str, named: str | Path, head: Mapping[str, Any], width: int, vocab_size: int | None) -> None:
    """Does a head (its settings as in `config.json`) fit a model of this width and vocabulary? vocab_size: None where
    the model's is of no concern.

    field, named: what the user passed the head as, and what the message calls it.

    Raises:
        InputError: it has another width or vocabulary.
    """
    own_width = head.get("hidden_size") or head["llama"]["hidden_size"]
    if own_width != width:
        found = f"{named} of width {own_width}"
        raise InputError(field, found, f"width {width}", "Pass the model it was trained for.")
    own_vocab = head.get("llama", {}).get("vocab_size")
    if None not in (own_vocab, vocab_size) and own_vocab != vocab_size:
        raise InputError(field, f"{named} of vocabulary {own_vocab}", f"{vocab_size}", "Pass its own target.")


def _check_identity(directory: str | Path, config: dict[str, Any], identity: Mapping[str, str]) -> None:
    recorded = config.get("target")
    if not recorded:
        return
    # Heads of earlier versions have the tokenizer in their manifest only, of the texts that they were trained on.
    models = read_object(Path(directory) / "manifest.json", {"models?": (dict, None)}).get("models") or {}
    if isinstance(models.get("tokenizer"), str):
        recorded = {"tokenizer": models["tokenizer"], **recorded}
    differing, unrecorded = compare_identity({"model": identity}, {"model": recorded})
    if differing:
        names = ", ".join(key.removeprefix("model.") for key, _, _ in differing)
        reads = "--target TARGET" if config["kind"] == "eagle" or "eagle" in recorded else "--draft DRAFT"
        start = f"draftsmith train {config['kind']} --init {directory} {reads} --data DATA --output DIR"
        raise InputError(
            "head",
            f"{directory} trained for another model ({names} differ)",
            "the model it was trained for",
            f"Pass that one, or train this head on for the other, on data made with it: {start}",
        )
    warn_not_compared(str(directory), [key.removeprefix("model.") for key in unrecorded])


def starting_settings(directory: str | Path, kind: str, width: int | None = None, vocab_size: int | None = None) -> Any:
    """The config dataclass of a head that is to be trained on, without its weights.

    width, vocab_size: of the model it is to read, where they are known; a head without a vocabulary fits any. They have
    to fit. The model's identity has not: to train on for a changed model is what this is for.

    Raises:
        InputError: no head, one of another kind, or one of other sizes.
    """
    if not Path(directory).is_dir():
        raise InputError("init", directory, "one of the names in --help, or a head directory", "Check the path.")
    config = _config_of_kind(directory, kind)
    if width is not None:
        check_sizes("init", directory, config["head"], width, vocab_size)
    return _settings(config)


def starting_head(directory: str | Path, kind: str, width: int, vocab_size: int | None = None) -> nn.Module:
    """A head to train on from: float32, on the CPU, every weight trainable. The rest: `starting_settings`."""
    starting_settings(directory, kind, width, vocab_size)
    return _read_head(directory, head_config(directory)).float().train().requires_grad_(True)


def starting_weights(directory: str | Path) -> dict[str, str]:
    """What a training that starts from a head records among its inputs: the head's content."""
    return {"init": file_sha256(Path(directory) / "model.safetensors")}
