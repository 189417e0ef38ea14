"""Models and data of a training, from its options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.vllm_states import ServedStates, check_numbering
from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import ArtefactDataset, collate_features, open_dataset, pack_features
from draftsmith.data.store.feature_codec import FeatureDtype, decoded, rounded, token_bytes
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.pretrained.checkpoint import checkpoint_tensors
from draftsmith.modules.pretrained.files import check_disk
from draftsmith.modules.pretrained.heads import starting_head, starting_settings, starting_weights
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.identity import captured
from draftsmith.modules.pretrained.models import llama_shape, load_lm, load_outer, saved_identity, target_shape
from draftsmith.modules.pretrained.ranks import place
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError
from draftsmith.train import acceptance
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.feature_cache import FeatureCache, row_name
from draftsmith.train.metrics import is_first_process
from draftsmith.train.own_loss import loss_digest
from draftsmith.train.strategies import local_device, model_dtype, world_size

if TYPE_CHECKING:
    from draftsmith.train.data_module import Samples
    from draftsmith.train.feature_stream import FeatureStream
    from draftsmith.train.fit import PreparedTraining

TrainedConfig = TrainAcceptanceConfig | TrainDrafterConfig

# Samples from which the features' standard deviation is measured.
STD_SAMPLES = 32
# Most rows from which the size of a feature cache is estimated: some seconds.
COUNTED_ROWS = 20_000
# Larger artefacts are not hashed: at about 1 GB/s this takes half a minute.
HASHED_BYTES = 32 * 2**30


def prepare(config: TrainedConfig, clients: ExitStack | None = None) -> PreparedTraining:
    """Load the models and data of a training that has not begun.

    clients: receives what has to be closed when the training has ended.

    Raises:
        InputError: the data was made with another target, is damaged or empty, or the disk cannot hold the cache.
    """
    if isinstance(config, TrainAcceptanceConfig):
        return acceptance.prepare(config)
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.data_module import HeadDataModule, train_and_val
    from draftsmith.train.fit import PreparedTraining, Provenance
    from draftsmith.train.lit_drafter import FeatureSource, LitDrafter
    from draftsmith.train.tau import TauProbe, general_prompts, probe_prompts

    own_loss = loss_digest(config)

    # The target, and the config of the head.
    drafter, dtype, device = config.drafter, model_dtype(config), local_device(config)
    config = without_layers(config)
    target: CausalLM
    if reads_no_text(config):
        target = load_outer(config.target, dtype, device)
    else:
        how = (dtype, device, config.engine, config.trust_remote_code)
        target = load_lm(config.target, *how, device_map=config.device_map)
    head_shape = head_config(config, llama_shape(target, target.info.path or config.target))
    layers = drafter.learns_from(head_shape, target.info.num_layers)

    # Data: a head to fine-tune may have a shorter context than its target.
    train = open_data(config.data, config, target, layers)
    val = open_data(config.val, config, target, layers) if config.val is not None else None
    context = min(target.info.max_position, head_shape.max_position)
    train_samples, val_samples = train_and_val(config, train, val, context, drafter.lookahead)

    def token_counts() -> Tensor:
        return train_samples.dataset.token_counts(train_samples.indices, target.info.vocab_size)

    head = make_head(config, target, token_counts)
    cache = open_cache(config, target, layers, (train_samples, val_samples))
    stream = open_stream(config, target, layers, (train_samples, val_samples), clients or ExitStack())
    data = HeadDataModule(
        train_samples,
        val_samples,
        pack_features if config.tokens_per_batch else collate_features,
        functools.partial(drafter.loss_count, settings=config),
        config,
        functools.partial(drafter.logit_rows, settings=config),
    )
    # Reading samples for it takes seconds, and noise is EAGLE-1's alone.
    noisy = getattr(config, "noise", 0.0) > 0
    std = (
        feature_std(train_samples, target, layers, config.feature_dtype if cache is not None else None)
        if noisy
        else 1.0
    )

    # The module, and what measures it.
    source = FeatureSource(target, layers, cache, stream)
    module = LitDrafter(head, target, config, total_steps=data.total_steps, feature_std=std, source=source)
    if stream is not None:
        stream.signal_received = lambda: module.signal_received
    prompts = probe_prompts(config, val_samples, context)
    every = config.tau_every or config.val_every or data.order.steps_per_epoch
    probe = TauProbe(module, target, prompts, config, every, general_prompts(config, context)) if prompts else None
    inputs = {name: part.manifest.digest for name, part in (("data", train), ("val", val)) if part is not None}
    inputs |= own_loss
    if config.init != "random":
        is_model = config.drafter.is_model
        inputs |= {"init": saved_identity(config.init)["weights"]} if is_model else starting_weights(config.init)
    identity = target.info.identity
    provenance = Provenance(
        config.kind, inputs, identity, train.manifest.identity, train.manifest.sampling, of_target=head.of_target
    )
    return PreparedTraining(module, data, config, provenance, probe)


def open_data(directory: Path, config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int]) -> ArtefactDataset:
    """Open features of these layers (`DraftHead.learns_from`), or texts for the target to read.

    Features are hashed to see that they are intact; of more than HASHED_BYTES only the files' sizes are compared.

    Raises:
        InputError: another artefact, one of another target, or features of other layers than the drafter reads.
    """
    manifest = Manifest.read(directory)
    if manifest.kind == "features":
        if config.features != "online":
            found = f"{config.features}, and features in {directory}"
            remedy = "Pass --features online: these are stored."
            raise InputError("features", found, "responses to compute them of", remedy)
        size = sum(entry.bytes for entry in manifest.files)
        identity = captured(target.info.identity, layers)
        stored = manifest.identity.get("target", {}).get("layers", "final-norm")
        wanted = identity.get("layers", "final-norm")
        if stored != wanted:
            expected = f"those of {wanted}, which this head learns from"
            remedy = f"Make them with data features --drafter {config.kind}."
            raise InputError("data", f"features of layers {stored}", expected, remedy)
        check = "sha256" if size < HASHED_BYTES else "size"
        return open_dataset(directory, "features", {"target": identity}, check, target.info.vocab_size)
    open_artefact(directory, ("responses", "prompts", "features"), check="size")
    return text_dataset(directory, config.target, target.info.identity)


def reads_no_text(config: TrainDrafterConfig) -> bool:
    """Check whether a training needs the target's embeddings only: its features come from elsewhere, and tau is not
    measured."""
    stored = all(Manifest.read(path).kind == "features" for path in (config.data, config.val) if path is not None)
    return (stored or config.features == "vllm") and not config.tau_prompts and not config.device_map


def without_layers(config: TrainDrafterConfig) -> TrainDrafterConfig:
    """Switch off what needs the whole target, if its features come from a server."""
    if config.features != "vllm" or not config.tau_prompts:
        return config
    log_note("tau is not measured while training: the target is at the server (eval bench measures it)")
    return dataclasses.replace(config, tau_prompts=0)


def open_stream(
    config: TrainDrafterConfig,
    target: CausalLM,
    layers: Sequence[int],
    samples: Sequence[Samples],
    clients: ExitStack,
) -> FeatureStream | None:
    """Connect to the server of `--features vllm`, if it is asked for, and let the samples read from it.

    Raises:
        InputError: no server, another target or other layers there, or a directory that is not here.
    """
    if config.features != "vllm":
        return None
    from draftsmith.train.feature_stream import FeatureStream

    source = clients.enter_context(ServedStates(config.feature_server, config.output, config.feature_cache))
    captured_states = tuple(layers) or (target.info.num_layers,)
    if place().rank == 0:
        rows = [samples[0].text(i).tolist() for i in range(min(4, len(samples[0])))]
        log_note(check_numbering(source, config.target, captured_states, rows, config.feature_dtype))
    size = token_bytes(target.info.hidden_size * len(captured_states), config.feature_dtype)
    step_tokens = config.tokens_per_batch or config.batch_size * float(samples[0].lengths.mean())
    window = config.feature_window * 1e9 or 2 * size * step_tokens / world_size(config)
    stream = FeatureStream(source, window, size)
    for part in samples:
        part.stream, part.cached = stream, stream.item
    return stream


def open_cache(
    config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int], samples: Sequence[Samples]
) -> FeatureCache | None:
    """Open the cache of `--features cache`, if it is asked for, and let the samples read from it.

    One process logs the space it will take.

    Raises:
        InputError: the disk has too little.
    """
    if config.features != "cache":
        return None
    directory = config.feature_cache or config.output / "feature-cache"
    cache = FeatureCache(directory, captured(target.info.identity, layers), config.feature_dtype, str(target.dtype))
    if is_first_process():
        # A row that occurs twice is stored once. Of many rows some are read: the other ranks wait meanwhile.
        apart = -(-sum(map(len, samples)) // COUNTED_ROWS)
        chosen = [(part, i) for part in samples for i in range(0, len(part), apart)]
        lengths = {row_name(ids): len(ids) for ids in (part.text(i) for part, i in chosen)}
        missing = sum(length for name, length in lengths.items() if name not in cache.shard_of)
        share = sum(int(part.lengths[i]) for part, i in chosen) / sum(int(part.lengths.sum()) for part in samples)
        missing = round(missing / share)
        width = target.info.hidden_size * max(1, len(layers))
        needed = missing * token_bytes(width, config.feature_dtype)
        log_note(f"feature cache: {cache.num_rows:,} rows in {directory}; {needed:,} bytes to go")
        check_disk(directory, needed, "feature_cache", "Pass --feature-cache on another disk, or --feature-dtype fp8.")
    for part in samples:
        part.cached = cache.item
    return cache


def make_head(config: TrainDrafterConfig, target: CausalLM, counts: Callable[[], Tensor] | None = None) -> DraftHead:
    """Make a head to train, new or from `init`.

    Its weights depend on the seed (and the target and the data) alone; torch's global generator stays as it was.

    counts: returns how often each token occurs in the training answers, [V], for heads that ask.

    Raises:
        InputError: the target is of a family whose layers the head cannot have, or `init` is no head, does not fit the
            target or contradicts the options.
    """
    drafter = config.drafter
    head_shape = head_config(config, llama_shape(target, target.info.path or config.target))
    weights = FrozenWeights(target, counts)
    if config.init != "random" and drafter.is_model:
        weights.path = str(model_directory(config.init))
    if config.init != "random" and not drafter.is_model:
        head = starting_head(config.init, config.kind, target.info.hidden_size, target.info.vocab_size)
        assert isinstance(head, DraftHead)
        head.retarget(weights)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            head = drafter(head_shape)
        head.start(weights)
    head.freeze(config)
    return head


def head_config(config: TrainDrafterConfig, target: LlamaConfig) -> Any:
    """Return the config of the head to train: after the target, or that of the head it starts from.

    Raises:
        InputError: `init` is no head, or one that the options contradict.
    """
    if config.init == "random":
        return config.drafter.new_config(config, target)
    if config.drafter.is_model:
        shape = target_shape(config.init)
        check_same_tokenizer(config.target, config.init, "init")
        options: Any = config
        kept = options.keep_layers or tuple(range(shape.num_layers))
        shape = dataclasses.replace(shape, vocab_size=target.vocab_size)
        return config.drafter.new_config(dataclasses.replace(options, keep_layers=kept), shape)
    found = starting_settings(config.init, config.kind, target.hidden_size, target.vocab_size)
    config.drafter.check_init(config, found, target)
    return found


def with_shape(config: TrainDrafterConfig) -> TrainDrafterConfig:
    """Fill in the options that shape the head, so that the manifest has the values of a head to fine-tune too."""
    return dataclasses.replace(config, **config.drafter.shape(head_config(config, target_shape(config.target))))


class FrozenWeights:
    """Weights of a loaded target that a head may start from (`base.TargetWeights`)."""

    def __init__(self, target: CausalLM, counts: Callable[[], Tensor] | None):
        """counts: see `make_head`."""
        self._target, self._counts, self.path = target, counts, target.info.path

    def tensors(self, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
        """Read tensors from the files: a loaded model may be rounded, packed, or split over ranks."""
        return checkpoint_tensors(model_directory(self.path), prefixes)

    def lm_head(self) -> Tensor:
        """Return the output embedding, which every rank has whole."""
        return self._target.lm_head_weight().cpu()

    def token_counts(self) -> Tensor:
        assert self._counts is not None
        return self._counts()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._target.info.eos_ids


def feature_std(
    samples: Samples, target: CausalLM, capture: tuple[int, ...] = (), stored: FeatureDtype | None = None
) -> float:
    """Return the standard deviation of the features' elements over the first samples, the unit of noise.

    stored: type in which a cache keeps them. What it already holds is not read, so that nothing depends on it.
    """
    from draftsmith.train.data_module import SampleKey

    count, first, second = 0, 0.0, 0.0
    keys = [(SampleKey(0, i),) for i in range(min(STD_SAMPLES, len(samples)))]
    for (key,) in keys if samples.stream is None else samples.stream.ahead(samples, keys):
        i = key.index
        item: Mapping[str, Tensor] = samples.item(i, 0)
        features = None if stored or "features" not in item else decoded(item["features"], item.get("scale"))
        if features is None:
            features = target.features(item["input_ids"][None].to(target.device), capture=capture)[0]  # [T, L*H]
            place = first_broken(features)
            if place is not None:
                raise NonFinite("hidden states", "target", place).of([samples.name(i)])
            features = rounded(features, stored) if stored else features
        features = features.double()
        count, first = count + features.numel(), first + float(features.sum())
        second += float(features.square().sum())
    return max(second / count - (first / count) ** 2, 0.0) ** 0.5
