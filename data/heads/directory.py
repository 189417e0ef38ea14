"""Head directories: `config.json`, `model.safetensors`, `manifest.json`, `README.md`; written whole or not at all.

A benchmark may add `measured.json` and write the card anew (data/heads/measured.py): neither is part of what is hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from draftsmith.data.store.files import whole_directory, write_json, write_tensors, write_text
from draftsmith.data.store.manifest import compare_identity, file_sha256, warn_not_compared
from draftsmith.data.store.reading import check_shape, read_object, read_tensors
from draftsmith.modules import drafters
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, nn

SCHEMA_VERSION = 1
# What an acceptance head says of its labels: mix or rollout, sampling or greedy, of a draft model or a drafter's kind.
LABELS = ("labels", "mode", "drafter")


def head_kinds() -> list[str]:
    """Kinds of heads: acceptance heads, and what modules/drafters holds."""
    return sorted([AcceptanceHead.kind, *drafters.learned()])


def class_of(kind: str) -> Any:
    """The class of heads of a kind; its `Config` is that of their settings."""
    return AcceptanceHead if kind == AcceptanceHead.kind else drafters.head_class(kind)


def kind_at(path: str | Path) -> str | None:
    """The kind of the head in a directory; None for anything else, as a language model is."""
    directory = Path(path)
    if not (directory / "manifest.json").exists() or not (directory / "config.json").exists():
        return None
    kind = read_object(directory / "config.json", {}).get("kind")
    return kind if kind in head_kinds() else None


def head_fields(head: nn.Module) -> dict[str, Any]:
    """The settings of a head as JSON values: `head` of its config.json."""
    config: Any = head.config
    return dataclasses.asdict(config)


def save_head(directory: str | Path, head: Any, manifest: Mapping[str, Any], card: str) -> Path:
    """Write a head directory under a temporary name and rename it; an older one of that name is replaced.

    manifest: what it was made from: `target` (identity), `sampling`, what LABELS names, inputs, seed, versions,
        measured numbers. The files' sha256 are added here.
    """
    directory = Path(directory)
    config = {
        "kind": head.kind,
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
    if config["kind"] not in head_kinds():
        raise InputError("kind", config["kind"], " or ".join(head_kinds()), f"{directory} is no head of this version.")
    check_shape(directory / "config.json", config["head"], shape_of(class_of(config["kind"]).Config), again, "head")
    return config


def shape_of(config_class: type) -> dict[str, Any]:
    """What JSON of a config dataclass has to hold before it is built: its required numbers, and those of what is nested
    in it."""
    hints, found = get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and dataclasses.is_dataclass(hints[field.name]):
            found[field.name] = shape_of(hints[field.name])
        elif required and hints[field.name] in (int, float, str, bool):
            found[field.name] = hints[field.name]
    return found


def config_from_json(config_class: type, values: Mapping[str, Any]) -> Any:
    """A config dataclass of JSON values, nested ones too; JSON's lists are tuples.

    Raises:
        TypeError, KeyError: a name that is absent or unknown.
    """
    hints = get_type_hints(config_class)
    nested = {name: hints[name] for name in values if dataclasses.is_dataclass(hints[name])}
    built = {name: config_from_json(kind, values[name]) for name, kind in nested.items()}
    return config_class(**{name: built.get(name, _frozen(value)) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def drafter_identity(directory: str | Path, owner: CausalLM) -> dict[str, str]:
    """What an acceptance head records of a head that drafts for `owner`, whose own identity it keeps: the hidden states
    that it reads come from both."""
    weights = (Path(directory) / "model.safetensors").read_bytes()
    return {**owner.info.identity, head_config(directory)["kind"]: hashlib.sha256(weights).hexdigest()[:16]}


def another_mode(directory: str | Path, params: SamplingParams) -> str | None:
    """A warning where an acceptance head is to predict for drafts of another mode than its labels were made in, with
    the command that makes labels of this one; None where it is the same, or none is recorded.

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
    drafter = "--draft HEAD" if config.get("drafter", "draft") != "draft" else "--draft DRAFT"
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

    target: the model whose hidden states it reads: the target for a drafter, the DRAFT for an acceptance head, and for
        one that reads a drafter's the model which that drafts for. Its width must fit, and its identity be the recorded
        one.
    kind: the kind that is expected.
    identity: of what the head reads, where that is not the model alone (`drafter_identity`).
    """
    config = _config_of_kind(directory, kind)
    if target is not None:
        check_sizes("head", directory, _settings(config), target.info.hidden_size, target.info.vocab_size)
        _check_identity(directory, config, target.info.identity if identity is None else identity)
    head = _read_head(directory, config).eval().requires_grad_(False)
    computes_with = isinstance(head, DraftHead)
    return head if target is None else head.to(target.device, target.dtype if computes_with else None)


def load_draft_head(directory: str | Path, target: CausalLM) -> DraftHead:
    """A trained drafter of any kind, as `load_head` has it.

    Raises:
        InputError: no head, one that does not draft, or one for another target.
    """
    kind = head_config(directory)["kind"]
    if kind not in drafters.learned():
        raise InputError("head", f"{directory}, {named_kind(kind)} head", "a drafter", "Pass it with its own flag.")
    head = load_head(directory, target)
    assert isinstance(head, DraftHead)
    return head


def _config_of_kind(directory: str | Path, kind: str | None) -> dict[str, Any]:
    config = head_config(directory)
    if kind is not None and config["kind"] != kind:
        found, expected = f"{directory}, {named_kind(config['kind'])} head", f"{named_kind(kind)} head"
        raise InputError("head", found, expected, "Pass it with its own flag.")
    return config


def named_kind(kind: str) -> str:
    """A kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _settings(config: dict[str, Any]) -> Any:
    """The head's own config dataclass."""
    try:
        return config_from_json(class_of(config["kind"]).Config, config["head"])
    except (TypeError, KeyError) as error:  # a name that is absent, unknown, or of another type
        found = f"settings that are none of {named_kind(config['kind'])} head ({error})"
        raise InputError("config.json", found, "what training wrote", "Copy or train the head again.") from error


def build_head(kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A head of these settings and weights, in the type of the weights.

    state: by the names of `named_parameters`; of a tied block, once.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    head = class_of(kind)(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()}
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - state.keys())]
    wrong += [f"{name} is unknown" for name in sorted(state.keys() - expected.keys())]
    wrong += [
        f"{name} is {list(state[name].shape)} in place of {list(shape)}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if wrong:
        found = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise InputError("weights", found, "the tensors that config.json asks for", "Check config.json and the file.")
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
    """The head on the CPU, in the type of its file."""
    state = read_tensors(Path(directory) / "model.safetensors", "Copy or train the head again.")
    return build_head(config["kind"], _settings(config), state)


def check_sizes(field: str, named: str | Path, head: Any, width: int, vocab_size: int | None) -> None:
    """Does a head of these settings fit a model of this width and vocabulary? vocab_size: None where the model's is of
    no concern.

    field, named: what the user passed the head as, and what the message calls it.

    Raises:
        InputError: it has another width or vocabulary.
    """
    if head.hidden_size != width:
        found = f"{named} of width {head.hidden_size}"
        raise InputError(field, found, f"width {width}", "Pass the model it was trained for.")
    own_vocab = getattr(head, "vocab_size", None)  # an acceptance head has none
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
        learned = drafters.learned()
        reads = "--target TARGET" if config["kind"] in learned or learned.keys() & recorded.keys() else "--draft DRAFT"
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
    settings = _settings(_config_of_kind(directory, kind))
    if width is not None:
        check_sizes("init", directory, settings, width, vocab_size)
    return settings


def starting_head(directory: str | Path, kind: str, width: int, vocab_size: int | None = None) -> nn.Module:
    """A head to train on from: float32, on the CPU, every weight trainable. The rest: `starting_settings`."""
    starting_settings(directory, kind, width, vocab_size)
    return _read_head(directory, head_config(directory)).float().train().requires_grad_(True)


def starting_weights(directory: str | Path) -> dict[str, str]:
    """What a training that starts from a head records among its inputs: the head's content."""
    return {"init": file_sha256(Path(directory) / "model.safetensors")}
