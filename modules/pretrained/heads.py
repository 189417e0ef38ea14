"""Head directories: `config.json`, `model.safetensors`, `manifest.json`, `README.md`; written whole or not at all.

`measured.json` and a card with its numbers may be added later (modules/pretrained/card.py): neither is hashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from draftsmith.modules import drafters
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.along import Text
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.formats.base import check_tensors
from draftsmith.modules.formats.original import Original
from draftsmith.modules.pretrained.files import copy_file, whole_directory, write_json, write_tensors, write_text
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.pretrained.provenance import compare_identity, file_sha256, git_commit, package_versions
from draftsmith.modules.pretrained.reading import read_object, read_tensors
from draftsmith.modules.targets.base import CausalLM, check_aux_layers
from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, nn

REMEDY = "Copy or train the head again."
# What another system's directory was, and its tensors that are no part of the head (`Original`).
ORIGINAL, ORIGINAL_TENSORS = "original.json", "original.safetensors"
# Files of a model beside config.json and weights that a draft model made from it needs too.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
# What an acceptance head records of its labels: sampling or greedy, kind of the drafter.
LABELS = ("mode", "drafter")


def head_kinds() -> list[str]:
    """Return the kinds of head directories: acceptance heads and all trained drafters but draft models."""
    return sorted({AcceptanceHead.kind, *drafters.learned()} - {MODEL})


def class_of(kind: str) -> Any:
    """Return the class of a kind of heads; its `Config` is the class of their settings."""
    return AcceptanceHead if kind == AcceptanceHead.kind else drafters.head_class(kind)


def named_kind(kind: str) -> str:
    """Return a kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def head_directory(path: str | Path) -> Path:
    """Return the directory of a head: the path itself, or that of a shipped head (`smollm2:eagle3`)."""
    return Path(resolve_model(str(path)))


def weights_file(path: str | Path) -> Path:
    """Return the file of a head's weights."""
    return head_directory(path) / "model.safetensors"


def weights_hash(path: str | Path) -> str:
    """Return the hash of a head's weights."""
    return file_sha256(weights_file(path))


def kind_at(path: str | Path) -> str | None:
    """Return the kind of the head in a directory; None for anything else, such as a language model."""
    directory = head_directory(path)
    if not _is_head(directory):
        if _is_head(directory / "best") and not (directory / "config.json").exists():
            found = f"{directory}, the directory of a training"
            raise InputError("head", found, "the head in it", f"Pass {directory / 'best'}.")
        return None
    config = read_object(directory / "config.json", {})
    kind = config.get("kind")
    # A draft model that was trained has neither.
    if kind in head_kinds() or "head" in config:
        check_known(directory, kind)
        return str(kind)
    return None


def check_known(directory: Path, kind: object) -> None:
    """Raise InputError for a kind of head that is not registered."""
    if kind not in head_kinds():
        remedy = f"{directory} is a plug-in's head: name its folder in DRAFTSMITH_DRAFTERS. Or train it again."
        raise InputError("kind", kind, " or ".join(head_kinds()), remedy)


def _is_head(directory: Path) -> bool:
    return (directory / "manifest.json").exists() and (directory / "config.json").exists()


def head_fields(head: nn.Module) -> dict[str, Any]:
    """Return a head's settings as JSON values: `head` in its config.json."""
    config: Any = head.config
    return dataclasses.asdict(config)


def stored_tensors(head: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers that a head's file holds.

    Tied blocks share storage, which safetensors refuses: each tensor is stored once, under its first name.
    """
    parameters = {name for name, _ in head.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in head.state_dict().items() if name not in parameters}
    return dict(head.named_parameters()) | buffers


def made_with() -> dict[str, Any]:
    """Return versions and commit, as manifests have them."""
    return {"packages": package_versions(), "git_commit": git_commit()}


def save_head(
    directory: str | Path, head: Any, manifest: Mapping[str, Any], card: str, original: Original | None = None
) -> Path:
    """Write a head directory under a temporary name and rename it; an older one of that name is replaced.

    manifest: what it was made from: `target` (identity), `sampling`, the fields LABELS, inputs, seed, versions and
        metrics. The files' sha256 are added here. original: of a head that was imported, or trained on from there.
    """
    directory = Path(directory)
    config = {
        "kind": head.kind,
        "head": head_fields(head),
        "target": manifest.get("target"),
        "sampling": manifest.get("sampling"),
        **{name: manifest[name] for name in LABELS if name in manifest},
    }
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in stored_tensors(head).items()}
    with whole_directory(directory) as partial:
        saved_as_model = isinstance(head, DraftHead) and head.saved_as_model
        if saved_as_model:
            config, state = transformers_model(head, state)
            for file in {file for pattern in COMPANIONS for file in Path(head.config.source).glob(pattern)}:
                copy_file(file, partial / file.name)
        write_json(partial / "config.json", config, indent=2)
        write_tensors(partial / "model.safetensors", state, {"format": "pt"} if saved_as_model else None)
        write_text(partial / "README.md", card)
        if original is not None:
            fields = {field.name: getattr(original, field.name) for field in dataclasses.fields(original)}
            write_tensors(partial / ORIGINAL_TENSORS, fields.pop("kept"))
            write_json(partial / ORIGINAL, fields)
        # The manifest is written last: a directory without it is unfinished.
        # The card has no hash: it may be edited, and is written anew by `eval bench --card`.
        sha256 = {file.name: file_sha256(file) for file in sorted(partial.iterdir()) if file.name != "README.md"}
        write_json(partial / "manifest.json", {"kind": "head", **manifest, "sha256": sha256}, indent=2)
    return directory


def transformers_model(head: Any, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of a draft model as transformers has them; the weights' type stays float32.

    `dtype` in config.json stays that of the model it was made from: the type to run in.
    """
    config = read_object(Path(head.config.source) / "config.json", {})
    # Its entries count the layers of the model it was made from; transformers makes it anew.
    config.pop("layer_types", None)
    llama = head.config.llama
    config |= {"num_hidden_layers": llama.num_layers, "tie_word_embeddings": llama.tie_embeddings}
    config["vocab_size"] = llama.vocab_size
    names = {"model.lm_head.weight": "lm_head.weight"}
    return config, {names.get(name, name): tensor for name, tensor in state.items()}


def check_intact(directory: Path) -> None:
    """Raise InputError for a file of a head that is gone, or changed since it was saved."""
    manifest = read_object(directory / "manifest.json", {"sha256?": {"*": str}}, REMEDY)
    for name, sha256 in manifest.get("sha256", {}).items():
        file = directory / name
        if not file.exists() or file_sha256(file) != sha256:
            raise InputError(str(file), "missing or changed content", f"sha256 {sha256[:12]}", REMEDY)


def head_config(directory: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Read and check `config.json` of a head. kind: the expected one."""
    directory = head_directory(directory)
    if not _is_head(directory):
        # Raises a better error if the head is in best/.
        kind_at(directory)
        expected = "a head directory (config.json, manifest.json)"
        raise InputError("head", directory, expected, "Train one, or check the path.")
    check_intact(directory)
    shape = {"kind": object, "head": dict, "target?": (dict, None), "sampling?": (dict, None)}
    if kind_at(directory) is None and "architectures" in read_object(directory / "config.json", {}):
        remedy = "Measure it: draftsmith eval bench --methods spec:k=4."
        raise InputError("head", f"{directory}, a draft model", "a head", remedy)
    config = read_object(directory / "config.json", shape, REMEDY)
    check_known(directory, config["kind"])
    if kind not in (None, config["kind"]):
        found, expected = f"{directory}, {named_kind(config['kind'])} head", f"{named_kind(str(kind))} head"
        raise InputError("head", found, expected, "Pass it with its own flag.")
    return config


def config_from_json(config_class: type, values: Mapping[str, Any]) -> Any:
    """Build a config dataclass from JSON values, nested ones too; lists become tuples.

    Raises:
        TypeError, KeyError: a name is missing or unknown, or a value has another type.
    """
    hints, fields = get_type_hints(config_class), {}
    # JSON knows no tuples and no nested classes: the type hints tell which fields are which.
    for name, value in values.items():
        kind = hints[name]
        wanted = dict if dataclasses.is_dataclass(kind) else (int, float) if kind is float else kind
        if wanted in (dict, (int, float), int, str, bool) and not isinstance(value, wanted):
            raise TypeError(f"{name}: {value!r}")
        fields[name] = config_from_json(kind, value) if kind is not dict and wanted is dict else _as_tuple(value)
    return config_class(**fields)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def head_settings(directory: str | Path, config: dict[str, Any]) -> Any:
    """Return the config dataclass of a head by its config.json, as of `head_config`."""
    try:
        return config_from_json(class_of(config["kind"]).Config, config["head"])
    except InputError as error:
        raise error.within(str(Path(directory) / "config.json"), REMEDY) from error
    except (TypeError, KeyError) as error:
        # A name is missing or unknown, or a value has another type.
        found = f"settings that are none of {named_kind(config['kind'])} head ({error})"
        raise InputError("config.json", found, "what training wrote", REMEDY) from error


def build_head(kind: str, config: Any, state: Mapping[str, Tensor]) -> Any:
    """Build a head from its settings and weights, in the dtype of the weights. state: named as in `stored_tensors`.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape or kind of number.
    """
    # On the meta device nothing is allocated before the tensors fit: settings may ask for any size.
    with torch.device("meta"):
        check_tensors(class_of(kind)(config), state)
    head = class_of(kind)(config)
    # Not strict: a tied block's other names are not in `state`.
    head.load_state_dict(state, strict=False, assign=True)
    head.trained = True
    return head


def load_head(
    directory: str | Path,
    target: CausalLM | None = None,
    kind: str | None = None,
    identity: Mapping[str, str] | None = None,
    as_stored: bool = False,
    config: dict[str, Any] | None = None,
) -> nn.Module:
    """Load a frozen head, ready to decode, on the target's device.

    target: the model whose hidden states it reads: the target for a drafter; for an acceptance head the DRAFT model, or
        the target that its drafting head drafts for. Width and identity must match.
    kind: the expected kind.
    identity: of what the head reads, if that is not the model alone (`drafter_identity`).
    as_stored: leave it on the CPU in the type of its file.
    config: of `head_config`, where that has read and checked the directory already.
    """
    # Once: a link may change.
    directory = head_directory(directory).resolve()
    config = config or head_config(directory, kind)
    # Compare sizes and identity before the weights are read.
    settings = head_settings(directory, config)
    if target is not None:
        check_sizes("head", directory, settings, target.info.hidden_size, target.info.vocab_size)
        identity, recorded = identity or target.info.identity, config.get("target") or {}
        if recorded and (differing := compare_identity({"model": identity}, {"model": recorded})):
            # Suggest --init: a changed target is the usual reason for a mismatch.
            names = ", ".join(key.removeprefix("model.") for key, _, _ in differing)
            found = f"{directory} trained for another model ({names} differ)"
            start = f"draftsmith train {config['kind']} --init {directory}, on data made with it"
            remedy = f"Pass that one, or train this head on for the other: {start}."
            raise InputError("head", found, "the model it was trained for", remedy)
    state = read_tensors(weights_file(directory), REMEDY)
    head = build_head(config["kind"], settings, state).eval().requires_grad_(False)
    if target is None:
        return head
    if isinstance(head, DraftHead):
        check_aux_layers(head.aux_layers, target.info.num_layers)
    if as_stored:
        return head
    # An acceptance head stays in float32, in which its calibration was fitted.
    return head.to(target.device, target.dtype if isinstance(head, DraftHead) else None)


def load_draft_head(directory: str | Path, target: CausalLM) -> DraftHead:
    """Load a trained drafter of any kind as `load_head` does.

    Raises:
        InputError: no head, one that does not draft, or one for another target.
    """
    directory = head_directory(directory).resolve()
    kind = head_config(directory)["kind"]
    if kind not in drafters.learned():
        raise InputError("head", f"{directory}, {named_kind(kind)} head", "a drafter", "Pass it with its own flag.")
    head = load_head(directory, target)
    assert isinstance(head, DraftHead)
    return head


OWN_SIZES = "Pass a model of its sizes, such as the one it was trained for."


def check_sizes(field: str, name: str | Path, settings: Any, width: int, vocab_size: int | None) -> None:
    """Raise InputError if a head does not fit a model's width or vocabulary (None: not compared).

    field, name: the option that named the head, and its name in the message.
    """
    if settings.hidden_size != width:
        found = f"{name} of width {settings.hidden_size}"
        raise InputError(field, found, f"width {width}", OWN_SIZES)
    # An acceptance head has no vocabulary.
    head_vocab = getattr(settings, "vocab_size", None)
    if None not in (head_vocab, vocab_size) and head_vocab != vocab_size:
        raise InputError(field, f"{name} of vocabulary {head_vocab}", f"{vocab_size}", OWN_SIZES)


def another_mode(directory: str | Path, params: SamplingParams) -> str | None:
    """Return a warning if an acceptance head's labels were made with other sampling, with the command for new labels.

    None if the mode is the same, or not recorded.
    """
    config = head_config(directory)
    if not (sampling := config.get("sampling")):
        return None
    cuts = [sampling.get(name) for name in ("top_k", "top_p")]
    # Greedy decoding has no top-k and top-p.
    same_cuts = params.greedy or cuts == [params.top_k, params.top_p]
    if same_cuts and sampling["temperature"] == params.temperature:
        return None
    options = f"--temperature {params.temperature:g} --top-k {params.top_k} --top-p {params.top_p:g}"
    return (
        f"{directory} was trained on labels of another mode ({sampling}): it may stop at the wrong places. "
        f"Make labels of this mode: draftsmith data acceptance {options}"
    )


def starting_settings(directory: str | Path, kind: str, width: int | None = None, vocab_size: int | None = None) -> Any:
    """Return the config dataclass of a head to train further (--init), without its weights.

    width, vocab_size: of the model it is to read, if known. They must match; the model's identity need not, because
    --init adapts a head to a changed model.
    """
    if not head_directory(directory).is_dir():
        raise InputError("init", directory, "one of the names in --help, or a head directory", "Check the path.")
    settings = head_settings(directory, head_config(directory, kind))
    if width is not None:
        check_sizes("init", directory, settings, width, vocab_size)
    return settings


def starting_head(directory: str | Path, kind: str, width: int, vocab_size: int | None = None) -> nn.Module:
    """Load a head to train further: float32, on the CPU, trainable, with its `tied_to_target` if that is recorded.

    Raises as `starting_settings`.
    """
    directory = head_directory(directory).resolve()
    settings = starting_settings(directory, kind, width, vocab_size)
    state = read_tensors(weights_file(directory), REMEDY)
    head: nn.Module = build_head(kind, settings, state).float().train().requires_grad_(True)
    if isinstance(head, DraftHead):
        manifest = read_object(head_directory(directory) / "manifest.json", {"tied_to_target?": [str]}, REMEDY)
        head.tied_to_target = tuple(manifest.get("tied_to_target", ()))
    return head


def original_of(directory: str | Path) -> Original | None:
    """Return the directory of another system that a head comes from; None if there was none, or it was not kept."""
    file = head_directory(directory) / ORIGINAL
    if not file.exists():
        return None
    shape = {"format": str, "config": dict, "tensors": dict, "copies": dict, "problems": [str], "target": object}
    kept = read_tensors(file.with_name(ORIGINAL_TENSORS), REMEDY)
    return Original(**read_object(file, shape, REMEDY), kept=kept)


def drafter_identity(directory: str | Path, owner: CausalLM) -> dict[str, str]:
    """Return the identity of a drafting head and its target, which an acceptance head that reads both records."""
    # The hidden states that such an acceptance head reads come from both models.
    return {**owner.info.identity, head_config(directory)["kind"]: weights_hash(directory)[:16]}


@dataclass(frozen=True)
class FrozenDrafter:
    """A draft model, or a trained drafter with its target, frozen while labels are made or a head is trained on them.

    lm: the model that reads texts. identity: of everything that drafts. head: the trained drafter.
    """

    lm: CausalLM
    identity: dict[str, str]
    head: DraftHead | None = None

    @property
    def name(self) -> str:
        """`draft` for a language model, else the kind of the head."""
        return "draft" if self.head is None else self.head.kind

    @property
    def max_position(self) -> int:
        """Longest text that it reads."""
        longest = self.lm.info.max_position
        return longest if self.head is None else min(longest, self.head.config.max_position)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states the head reads."""
        return () if self.head is None else self.head.aux_layers

    def branches(self, depth: int) -> BranchDrafter:
        """Build a drafter from many positions of a text, at most `depth` tokens each."""
        net = DraftModelNet(self.lm) if self.head is None else self.head.net(self.lm)
        return BranchDrafter(net, depth)

    def read(self, ids: Sequence[int]) -> Text:
        """Read a text for the head, with the target's states along all of it; a language model reads it by itself."""
        return Text(ids, (), {}) if self.head is None else Text.read(self.lm, ids, (), self.aux_layers)


def load_drafter(draft: str | Path, target: Callable[[], CausalLM], load: Callable[[str], CausalLM]) -> FrozenDrafter:
    """Load a drafter. draft: path of a head, or of a language model, which `load` reads. target: returns the target."""
    if kind_at(draft) is None:
        lm = load(str(draft))
        return FrozenDrafter(lm, lm.info.identity)
    lm, draft = target(), head_directory(draft).resolve()
    return FrozenDrafter(lm, drafter_identity(draft, lm), load_draft_head(draft, lm))
