"""Head directories: `config.json`, `model.safetensors`, `manifest.json`, `README.md`; written whole or not at all.

A benchmark may add `measured.json` and write the card anew (data/heads/measured.py): neither is part of what is hashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from draftsmith.data.store.files import whole_directory, write_json, write_tensors, write_text
from draftsmith.data.store.manifest import compare_identity, file_sha256, warn_not_compared
from draftsmith.data.store.reading import read_object, read_tensors
from draftsmith.modules import drafters
from draftsmith.modules.acceptance.head import RETIRED, AcceptanceHead
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.formats.base import misfits
from draftsmith.modules.targets.base import CausalLM, check_capture
from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, nn

SCHEMA_VERSION = 1
AGAIN = "Copy or train the head again."
# What an acceptance head says of its labels: mix or rollout, sampling or greedy, of a draft model or a drafter's kind.
LABELS = ("labels", "mode", "drafter")


def head_kinds() -> list[str]:
    """Kinds of heads: acceptance heads, and what modules/drafters holds."""
    return sorted([AcceptanceHead.kind, *drafters.learned()])


def class_of(kind: str) -> Any:
    """The class of heads of a kind; its `Config` is that of their settings."""
    return AcceptanceHead if kind == AcceptanceHead.kind else drafters.head_class(kind)


def kind_at(path: str | Path) -> str | None:
    """The kind of the head in a directory; None for anything else, as a language model is.

    Raises:
        InputError: the directory of a training, whose head is in best/.
    """
    directory = Path(path)
    if not _is_head(directory):
        if _is_head(directory / "best") and not (directory / "config.json").exists():
            found = f"{directory}, the directory of a training"
            raise InputError("head", found, "the head in it", f"Pass {directory / 'best'}.")
        return None
    kind = read_object(directory / "config.json", {}).get("kind")
    return kind if kind in head_kinds() else None


def _is_head(directory: Path) -> bool:
    return (directory / "manifest.json").exists() and (directory / "config.json").exists()


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
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in stored_tensors(head).items()}
    with whole_directory(directory) as partial:
        write_json(partial / "config.json", config, indent=2)
        write_tensors(partial / "model.safetensors", state)
        write_text(partial / "README.md", card)
        sha256 = {file.name: file_sha256(file) for file in sorted(partial.iterdir())}
        write_json(partial / "manifest.json", {"kind": "head", **manifest, "sha256": sha256}, indent=2)
    return directory


def stored_tensors(head: nn.Module) -> dict[str, Tensor]:
    """What a head's file holds: parameters and persistent buffers. Tied blocks share storage, which safetensors
    refuses: each tensor is there once, under its first name."""
    parameters = {name for name, _ in head.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in head.state_dict().items() if name not in parameters}
    return dict(head.named_parameters()) | buffers


def head_config(directory: str | Path, kind: str | None = None) -> dict[str, Any]:
    """The parsed `config.json` of a complete head directory. kind: the one that is expected.

    Raises:
        InputError: not a head directory, an unfinished one, one whose files changed after it was written, or a head of
            another kind.
    """
    directory = Path(directory)
    if not _is_head(directory):
        kind_at(directory)  # the head may be in best/
        expected = "a head directory (config.json, manifest.json)"
        raise InputError("head", directory, expected, "Train one, or check the path.")
    manifest = read_object(directory / "manifest.json", {"sha256?": {"*": str}}, AGAIN)
    for name, sha256 in manifest.get("sha256", {}).items():
        file = directory / name
        if name != "README.md" and (not file.exists() or file_sha256(file) != sha256):
            raise InputError(str(file), "missing or changed content", f"sha256 {sha256[:12]}", AGAIN)
    known = {"target?": (dict, None), "sampling?": (dict, None), "schema_version?": int}
    config = read_object(directory / "config.json", {"kind": object, "head": dict, **known}, AGAIN)
    version = config.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        found, remedy = f"schema version {version}", "Use the version of draftsmith that wrote it, or train it again."
        raise InputError(str(directory / "config.json"), found, f"version {SCHEMA_VERSION}", remedy)
    if config["kind"] not in head_kinds():
        raise InputError("kind", config["kind"], " or ".join(head_kinds()), f"{directory} is no head of this version.")
    if kind not in (None, config["kind"]):
        found, expected = f"{directory}, {named_kind(config['kind'])} head", f"{named_kind(str(kind))} head"
        raise InputError("head", found, expected, "Pass it with its own flag.")
    if config["kind"] == AcceptanceHead.kind:
        config["head"] = without_retired(directory, config["head"])
    return config


def without_retired(directory: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """An acceptance head's settings without those that nothing reads any more.

    Raises:
        InputError: the head does not work without one.
    """
    for name, harmless in RETIRED.items():
        if head.get(name, harmless) != harmless:
            found = f"{directory}, trained with {name} {head[name]} by an earlier version"
            raise InputError("head", found, f"{name} {harmless}: the rest is retired", "Train the head again.")
    return {name: value for name, value in head.items() if name not in RETIRED}


def config_from_json(config_class: type, values: Mapping[str, Any]) -> Any:
    """A config dataclass of JSON values, nested ones too; JSON's lists are tuples.

    Raises:
        TypeError, KeyError: a name that is absent or unknown, or a value of another type.
    """
    hints, built = get_type_hints(config_class), {}
    for name, value in values.items():
        kind = hints[name]
        wanted = dict if dataclasses.is_dataclass(kind) else (int, float) if kind is float else kind
        if wanted in (dict, (int, float), int, str, bool) and not isinstance(value, wanted):
            raise TypeError(f"{name}: {value!r}")
        built[name] = config_from_json(kind, value) if wanted is dict else _frozen(value)
    return config_class(**built)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def drafter_identity(directory: str | Path, owner: CausalLM) -> dict[str, str]:
    """What an acceptance head records of a head that drafts for `owner`, whose own identity it keeps: the hidden states
    that it reads come from both."""
    weights = file_sha256(Path(directory) / "model.safetensors")
    return {**owner.info.identity, head_config(directory)["kind"]: weights[:16]}


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
    config = head_config(directory, kind)
    if target is not None:
        settings = _settings(directory, config)
        check_sizes("head", directory, settings, target.info.hidden_size, target.info.vocab_size)
        _check_identity(directory, config, target.info.identity if identity is None else identity)
    head = _read_head(directory, config).eval().requires_grad_(False)
    computes_with = isinstance(head, DraftHead)
    if target is not None and isinstance(head, DraftHead):
        check_capture(head.capture, target.info.num_layers)
    return head if target is None else head.to(target.device, target.dtype if computes_with else None)


def load_draft_head(directory: str | Path, target: CausalLM) -> DraftHead:
    """A trained drafter of any kind, as `load_head` has it.

    Raises:
        InputError: no head, one that does not draft, or one for another target.
    """
    drafter_kind(directory)
    head = load_head(directory, target)
    assert isinstance(head, DraftHead)
    return head


def drafter_kind(directory: str | Path) -> str:
    """The kind of a trained drafter. Raises: as `load_draft_head`."""
    kind = head_config(directory)["kind"]
    if kind not in drafters.learned():
        raise InputError("head", f"{directory}, {named_kind(kind)} head", "a drafter", "Pass it with its own flag.")
    return kind


def named_kind(kind: str) -> str:
    """A kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _settings(directory: str | Path, config: dict[str, Any]) -> Any:
    """The head's own config dataclass, which checks itself."""
    try:
        return config_from_json(class_of(config["kind"]).Config, config["head"])
    except InputError as error:
        raise error.within(str(Path(directory) / "config.json"), AGAIN) from error
    except (TypeError, KeyError) as error:  # a name that is absent, unknown, or of another type
        found = f"settings that are none of {named_kind(config['kind'])} head ({error})"
        raise InputError("config.json", found, "what training wrote", AGAIN) from error


def build_head(kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A head of these settings and weights, in the type of the weights.

    state: by the names of `stored_tensors`.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape or kind of number.
    """
    with torch.device("meta"):  # settings may ask for more than there is memory: nothing is allocated before they fit
        wrong = misfits(stored_tensors(class_of(kind)(config)), state)
    if wrong:
        found = ", ".join(f"{name} {text}" for name, text in list(wrong.items())[:8])
        found += f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise InputError("weights", found, "the tensors that config.json asks for", "Check config.json and the file.")
    head = class_of(kind)(config)
    # Not strict: a tied block's other names are not in `state`.
    head.load_state_dict(state, strict=False, assign=True)
    return head


def head_settings(directory: str | Path, kind: str) -> Any:
    """The config dataclass of a head, without its weights.

    Raises:
        InputError: no head, or one of another kind.
    """
    return _settings(directory, head_config(directory, kind))


def _read_head(directory: str | Path, config: dict[str, Any]) -> nn.Module:
    """The head on the CPU, in the type of its file."""
    state = read_tensors(Path(directory) / "model.safetensors", AGAIN)
    return build_head(config["kind"], _settings(directory, config), state)


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
    settings = head_settings(directory, kind)
    if width is not None:
        check_sizes("init", directory, settings, width, vocab_size)
    return settings


def starting_head(directory: str | Path, kind: str, width: int, vocab_size: int | None = None) -> nn.Module:
    """A head to train on from: float32, on the CPU, every weight trainable, and which of them are its target's
    (`DraftHead.of_target`). The rest: `starting_settings`."""
    starting_settings(directory, kind, width, vocab_size)
    head = _read_head(directory, head_config(directory)).float().train().requires_grad_(True)
    if isinstance(head, DraftHead):
        head.of_target = of_target(directory)
    return head


def of_target(directory: str | Path) -> tuple[str, ...]:
    """`DraftHead.of_target` of a saved head; nothing where it is not recorded, as of imported ones."""
    made = read_object(Path(directory) / "manifest.json", {"of_target?": [str]}, AGAIN)
    return tuple(made.get("of_target", ()))


def starting_weights(directory: str | Path) -> dict[str, str]:
    """What a training that starts from a head records among its inputs: the head's content."""
    return {"init": file_sha256(Path(directory) / "model.safetensors")}
