"""`draftsmith train NAME`: any learned drafter of modules/drafters, by its settings, its loss and its shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.features import text_dataset
from draftsmith.data.heads.diagnosis import bad_numbers, diagnose
from draftsmith.data.heads.directory import starting_head, starting_settings, starting_weights
from draftsmith.data.models.identity import captured
from draftsmith.data.models.loading import llama_shape, load_lm
from draftsmith.data.store.datasets import ArtefactDataset, collate_features, open_dataset, pack_features
from draftsmith.data.store.feature_codec import FeatureDtype, decoded, rounded
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.store.reading import read_object
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.feature_cache import FeatureCache, check_cache_room
from draftsmith.train.strategies import local_device, model_dtype

if TYPE_CHECKING:
    from draftsmith.train.data_module import Samples
    from draftsmith.train.lit_drafter import LitDrafter

# Samples from which the features' scale is measured.
STD_SAMPLES = 32
# Hashing goes at about 1 GB/s: half a minute at most.
HASHED_BYTES = 32 * 2**30
# Validation samples that a diagnosis reads: seconds, beside what the training took.
DIAGNOSED = 64


def prepare(config: TrainDrafterConfig, learner: type[LitDrafter] | None = None) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun.

    learner: a `LitDrafter` with a loss of its own.

    Raises:
        InputError: the data was made with another target, is damaged or empty, or the disk cannot hold the cache.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.data_module import HeadDataModule, train_and_val
    from draftsmith.train.drafter_objective import FeatureSource
    from draftsmith.train.fit import Provenance, digests
    from draftsmith.train.lit_drafter import LitDrafter
    from draftsmith.train.metrics import is_first_process
    from draftsmith.train.tau import TauProbe, probe_prompts

    drafter, dtype, device = config.drafter, model_dtype(config), local_device(config)
    target = load_lm(
        config.target, dtype, device, config.engine, config.trust_remote_code, parallel=config.target_parallel
    )
    shape = shape_for(config, target)
    layers = drafter.learns_from(shape, target.info.num_layers)
    train = open_data(config.data, config, target, layers)
    val = open_data(config.val, config, target, layers) if config.val is not None else None
    # A head to fine-tune may reach less far than its target.
    context = min(target.info.max_position, shape.max_position)
    train_samples, val_samples = train_and_val(config, train, val, context, drafter.lookahead)
    head = make_head(config, target, lambda: _token_counts(train_samples, target))
    cache = open_cache(config, target, layers, (train_samples, val_samples), say_room=is_first_process())
    collate = pack_features if config.tokens_per_batch else collate_features
    count = functools.partial(drafter.loss_count, settings=config)
    chosen = functools.partial(drafter.num_chosen, settings=config)
    data = HeadDataModule(train_samples, val_samples, collate, count, config, chosen)
    std = 1.0
    if drafter.needs_features:
        std = feature_std(train_samples, target, layers, config.feature_dtype if cache is not None else None)
    shared = config.target_parallel == "tensor"
    source = FeatureSource(target, layers, cache, shared)
    learner = learner or LitDrafter
    module = learner(head, target, config, total_steps=data.total_steps, feature_std=std, source=source)
    prompts = probe_prompts(config, val_samples, context)
    every = config.tau_every or config.val_every or data.order.steps_per_epoch
    probe = TauProbe(module, target, prompts, config, every) if prompts else None
    inputs = digests(train, val) | ({} if config.init in drafter.starts else starting_weights(config.init))
    if learner is not LitDrafter:
        inputs["loss"] = f"{learner.__module__}.{learner.__qualname__}"
    identity = target.info.identity
    provenance = Provenance(config.kind, inputs, identity, train.manifest.identity, of_target=head.of_target)
    return module, data, config, provenance, probe


def explain(best: Path, config: TrainDrafterConfig, target: CausalLM, val: Samples) -> None:
    """Print why, where the numbers of the trained head are bad. val: the samples that they were measured on."""
    bad = bad_numbers(read_object(best / "manifest.json", {"metrics": dict})["metrics"])
    if bad and config.target_parallel == "tensor":  # which all processes would have to read together
        bad += f". See why: draftsmith diagnose {best} --data {config.data} --target {config.target}"
    elif bad:
        items = [val.item(number, 0) for number in range(min(DIAGNOSED, len(val)))]
        rows = [{name: item[name].tolist() for name in ("input_ids", "loss_mask")} for item in items]
        bad += f"\n{diagnose(best, target, config.target, rows, val.dataset.manifest)}"
    if bad:
        log_note(f"warning: {bad}")


def _token_counts(samples: Samples, target: CausalLM) -> Tensor:
    return samples.dataset.token_counts(samples.indices, target.info.vocab_size)


def open_data(directory: Path, config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int]) -> ArtefactDataset:
    """Features of these layers (`DraftHead.learns_from`), or texts for the target to read. Features are hashed to see
    that they are intact; from HASHED_BYTES on only their files' sizes are compared.

    Raises:
        InputError: another artefact, one of another target, or features of other layers than the drafter reads.
    """
    manifest = Manifest.read(directory)
    if manifest.kind == "features":
        if config.features == "cache":
            remedy = "Leave --features at online: these are read, not computed."
            raise InputError("features", f"cache, and features in {directory}", "responses to compute them of", remedy)
        size = sum(entry.bytes for entry in manifest.files)
        identity = captured(target.info.identity, layers)
        theirs, ours = (found.get("layers", "final-norm") for found in (manifest.identity.get("target", {}), identity))
        if theirs != ours:
            expected = f"those of {ours}, which this head learns from"
            remedy = f"Make them with data features --drafter {config.kind}."
            raise InputError("data", f"features of layers {theirs}", expected, remedy)
        check = "sha256" if size < HASHED_BYTES else "size"
        return open_dataset(directory, "features", {"target": identity}, check, target.info.vocab_size)
    open_artefact(directory, ("responses", "prompts", "features"), check="size")
    return text_dataset(directory, config.target, target.info.identity)


def open_cache(
    config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int], samples: Sequence[Samples], say_room: bool
) -> FeatureCache | None:
    """The cache of `--features cache`, from which the samples are read from now on where it has them.

    say_room: say what it will take of the disk, and stop where that is too much; one process does.
    """
    if config.features != "cache":
        return None
    directory = config.feature_cache or config.output / "feature-cache"
    cache = FeatureCache(directory, captured(target.info.identity, layers), config.feature_dtype, str(target.dtype))
    if say_room:
        check_cache_room(cache, samples, target.info.hidden_size * max(1, len(layers)), directory)
    for part in samples:
        part.cached = cache.item
    return cache


def make_head(config: TrainDrafterConfig, target: CausalLM, counts: Callable[[], Tensor] | None = None) -> DraftHead:
    """A head to train. Its weights depend on the seed (and the target and the data) alone and leave torch's global
    generator as it was.

    config: settings of its training. counts: gives how often each token is learned from, [V]; None where a head cannot
        ask.

    Raises:
        InputError: the target is of a family whose layers the head cannot take its shape from, or the head to
            fine-tune is none, does not fit the target or contradicts the settings.
    """
    drafter = config.drafter
    shape = shape_for(config, target)
    weights = FrozenWeights(target, config.init, config.target_parallel == "tensor", counts)
    if config.init not in drafter.starts:
        head = starting_head(config.init, config.kind, target.info.hidden_size, target.info.vocab_size)
        assert isinstance(head, DraftHead)
        head.go_on(weights)
        head.freeze(config)
        return head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = drafter(shape)
    head.start(config.init, weights)
    head.freeze(config)
    return head


def shape_for(config: TrainDrafterConfig, target: CausalLM) -> Any:
    """`head_shape` for a target that is loaded."""
    return head_shape(config, llama_shape(target, target.info.path or config.target))


def head_shape(config: TrainDrafterConfig, target: LlamaConfig) -> Any:
    """The shape of the head that is trained: after the target, or that of the head it starts from.

    Raises:
        InputError: `init` is no head, or one that the settings contradict.
    """
    if config.init in config.drafter.starts:
        return config.drafter.shape(config, target)
    shape = starting_settings(config.init, config.kind, target.hidden_size, target.vocab_size)
    config.drafter.check_start(config, shape)
    return shape


class FrozenWeights:
    """What a head may start from (`base.TargetWeights`).

    Raises:
        InputError: weights are asked for of which no process has all.
    """

    def __init__(self, target: CausalLM, start: str, in_parts: bool, counts: Callable[[], Tensor] | None):
        """start: what `init` names. in_parts: the target's layers are split over processes. counts: as of
        `make_head`."""
        self._target, self._start, self._in_parts, self._counts = target, start, in_parts, counts

    def last_layer(self) -> dict[str, Tensor]:
        if self._in_parts:
            raise InputError("init", f"{self._start} of a target in parts", "whole layers", "Pass --init random.")
        target: Any = self._target
        layers = target.model.layers if isinstance(target, LlamaLM) else target.model.base_model.layers
        return {name: weight.cpu() for name, weight in layers[-1].state_dict().items()}

    def lm_head(self) -> Tensor:
        target: Any = self._target
        layer = target.model.lm_head if isinstance(target, LlamaLM) else target.model.get_output_embeddings()
        return layer.weight.detach().cpu()  # whole on every rank, of a target in parts too

    def token_counts(self) -> Tensor:
        assert self._counts is not None
        return self._counts()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._target.info.eos_ids


def feature_std(
    samples: Samples, target: CausalLM, capture: tuple[int, ...] = (), stored: FeatureDtype | None = None
) -> float:
    """Standard deviation of the features' elements over the first samples: the noise's unit.

    stored: of texts, what a cache makes of them; what it holds already is not read here, so that nothing depends on it.
    """
    count, first, second = 0, 0.0, 0.0
    for i in range(min(STD_SAMPLES, len(samples))):
        item: Mapping[str, Tensor] = samples.item(i, 0)
        features = None if stored or "features" not in item else decoded(item["features"], item.get("scale"))
        if features is None:
            features = target.features(item["input_ids"][None].to(target.device), capture=capture)[0]
            place = first_broken(features)
            if place is not None:
                raise NonFinite("hidden states", "target", place).of([samples.name(i)])
            features = rounded(features, stored) if stored else features
        features = features.double()
        count, first = count + features.numel(), first + float(features.sum())
        second += float(features.square().sum())
    return max(second / count - (first / count) ** 2, 0.0) ** 0.5
