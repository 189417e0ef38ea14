"""`draftsmith train eagle`: a head that drafts from the target's own features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from draftsmith.data.answering.batched import set_threads
from draftsmith.data.heads.directory import starting_head, starting_settings, starting_weights
from draftsmith.data.models.loading import load_lm, read_config, text_identity
from draftsmith.data.store.datasets import FeatureDataset, ResponsesDataset, collate_features, pack_features
from draftsmith.data.store.feature_codec import FeatureDtype, rounded
from draftsmith.data.store.manifest import Manifest, open_artefact, volatile
from draftsmith.data.store.shards import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import spans
from draftsmith.modules.drafters.eagle.head import LOOKAHEAD, EagleConfig, EagleHead, Rope
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import SUPPORTED, LlamaLM, llama_config
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.feature_cache import CachedFeatures, FeatureCache, check_room
from draftsmith.train.strategies import local_device, model_dtype

if TYPE_CHECKING:
    from draftsmith.train.data_module import Samples

# Starts of a new head; any other `init` is the directory of a head.
FRESH = ("random", "target-last-layer")
# Samples from which the features' scale is measured.
STD_SAMPLES = 32
# Hashing goes at about 1 GB/s: half a minute at most.
HASHED_BYTES = 32 * 2**30


@dataclass(frozen=True, kw_only=True)
class TrainEagleConfig(TrainConfig):
    """Train an EAGLE head. `data` is what `data responses` wrote, or `data prompts --supervised`: the target reads it
    in the training process. Or it is what `data features` wrote, which is only read. The defaults are the paper's, for
    7B targets; small targets want a higher lr and more weight on tokens (configs/train/eagle-small.yaml).

    Attributes:
        target: The target model, frozen: the one the data was made with. It gives embedding and lm_head, and features.
        features: Where features of responses come from: the target in every epoch (online), or in the first one, which
            writes them for the others (cache).
        feature_cache: Directory of the cache; several runs with one target may share it. Default: output/feature-cache.
        feature_dtype: What the cache stores: bf16, or fp8 with a scale for each token, half the bytes.
        target_parallel: A target larger than a device: device_map spreads its layers over the GPUs of this one process;
            tensor splits each layer over the processes of this machine, under torchrun. Both run it by transformers.
        num_layers: Decoder layers of the head. Default: 1, or those of the head it starts from.
        rope: Rotary positions of the head: the target's, or plain, without the target's scaling: SafeAILab's code knows
            none but linear and dynamic. vLLM and SGLang hold both.
        init: random; target-last-layer, where the head's last layer starts as the target's last one; or the directory
            of a head to fine-tune, ours or an imported one, whose shape it keeps. Only its width and vocabulary have to
            be this target's: a head of the model before its own fine-tuning, merging or quantising is a good start. At
            random learns faster than target-last-layer on the embedded target: top-1 of 0.22 after 42 steps to 0.02.
        feature_weight: Loss weight of the smooth-L1 distance between features.
        token_weight: Loss weight of the soft cross-entropy against the target's distribution.
        noise: Features are read with uniform noise up to this share of their standard deviation.
        unroll: Draft steps to train on: each batch is also read as the second, third, ... step of a draft, on the
            head's own features (HASS; EAGLE-3's training-time test). 1 is EAGLE-1; more costs as many passes and keeps
            later tokens of a chain good.
        unroll_after: Share of the steps after which this begins.
        unroll_decay: Loss weight of a draft step, relative to the one before.
        agreement_steps: Draft steps whose agreement with the target is measured at validations, each where the steps
            before it were right; 0 measures none.
        tau_every: Steps between measurements of tau by real decoding; 0 measures with every validation. It is measured
            at validations, so it counts in multiples of val_every.
        tau_prompts: Prompts to decode for it; 0 switches it off.
        tau_data: What `data prompts` made of prompts like those that will be served. Default: held-out samples, each up
            to one of its answers, which says little where these are shorter than what will be served.
        tau_k: Drafted tokens a round for it.
        tau_max_new_tokens: Longest answer for it.
        tau_ignore_eos: Go on behind end tokens, so that every answer is that long: of answers of a few tokens tau says
            how well their beginning is drafted.
    """

    target: str
    features: Literal["online", "cache"] = "online"
    feature_cache: Path | None = volatile(None)
    feature_dtype: FeatureDtype = "bf16"
    target_parallel: Literal["none", "device_map", "tensor"] = volatile("none")
    epochs: int = 10
    lr: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    num_layers: int | None = None
    rope: Rope = "target"
    init: str = "random"
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    unroll: int = 1
    unroll_after: float = 0.0
    unroll_decay: float = 1.0
    agreement_steps: int = volatile(3)
    tau_every: int = volatile(0)
    tau_prompts: int = volatile(16)
    tau_data: Path | None = volatile(None)
    tau_k: int = volatile(5)
    tau_max_new_tokens: int = volatile(64)
    tau_ignore_eos: bool = volatile(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_weight < 0 or self.token_weight < 0 or self.feature_weight + self.token_weight == 0:
            found = f"{self.feature_weight}, {self.token_weight}"
            raise InputError("feature_weight, token_weight", found, "not negative, not both 0", "Change them.")
        if self.target_parallel != "none" and self.devices > 1:
            remedy = "Launch with torchrun --nproc-per-node N for tensor; one process has all GPUs for device_map."
            raise InputError("devices", self.devices, f"1 with --target-parallel {self.target_parallel}", remedy)
        if not 0 <= self.unroll_after < 1:
            raise InputError("unroll_after", self.unroll_after, "a share in [0, 1)", "Change it.")
        if not 0 < self.unroll_decay <= 1:
            raise InputError("unroll_decay", self.unroll_decay, "a weight in (0, 1]", "Change it.")
        if not self.noise >= 0:
            raise InputError("noise", self.noise, "0 or more", "Change it.")
        if self.num_layers is not None and self.num_layers < 1:
            raise InputError("num_layers", self.num_layers, "1 or more", "Change it.")
        for name, least in {
            "agreement_steps": 0,
            "tau_every": 0,
            "tau_prompts": 0,
            "tau_k": 1,
            "tau_max_new_tokens": 1,
            "unroll": 1,
        }.items():
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"{least} or more", "Change it.")


@sole_writer(shared=True)
def run(config: TrainEagleConfig) -> Path:
    """Train the head; returns its directory, output/best.

    Raises:
        InputError: the data was made with another target, is damaged or empty, the output is taken, or the disk can
            not hold the cache.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.planning.plan import announce

    set_threads(config.num_threads)
    done = finished(config)
    if done is not None:
        return done
    announce(config)
    return fit(*prepare(config))


def prepare(config: TrainEagleConfig) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun.

    Raises:
        InputError: as `run`.
    """
    from draftsmith.train.data_module import HeadDataModule
    from draftsmith.train.feature_source import FeatureSource
    from draftsmith.train.fit import Provenance, digests, split
    from draftsmith.train.lit_eagle import LitEagle, TauProbe, num_loss_tokens
    from draftsmith.train.metrics import is_first_process

    target = load_lm(
        config.target,
        model_dtype(config),
        local_device(config),
        config.engine,
        config.trust_remote_code,
        parallel=config.target_parallel,
    )
    train = open_data(config.data, config, target)
    val = open_data(config.val, config, target) if config.val is not None else None
    head = make_head(config, target)
    # A head to fine-tune may reach less far than its target.
    context = min(target.info.max_position, head.config.llama.max_position)
    train_samples, val_samples = split(config, train, val, context, LOOKAHEAD)
    cache = open_cache(config, target, (train_samples, val_samples), say_room=is_first_process())
    collate = pack_features if config.tokens_per_batch else collate_features
    data = HeadDataModule(train_samples, val_samples, collate, num_loss_tokens, config)
    module = LitEagle(
        head,
        target,
        config,
        data.total_steps,
        feature_weight=config.feature_weight,
        token_weight=config.token_weight,
        noise=config.noise,
        feature_std=feature_std(train_samples, target, config.feature_dtype if cache is not None else None),
        unroll=config.unroll,
        unroll_after=config.unroll_after,
        unroll_decay=config.unroll_decay,
        agreement_steps=config.agreement_steps,
        source=FeatureSource(target, cache, shared=config.target_parallel == "tensor"),
    )
    prompts = tau_prompts(config, val_samples, context)
    probe = None
    if prompts:
        probe = TauProbe(module, prompts, config.tau_k, config.tau_max_new_tokens, config.tau_ignore_eos)
    inputs = digests(train, val) | ({} if config.init in FRESH else starting_weights(config.init))
    provenance = Provenance("eagle", inputs, target.info.identity, train.manifest.identity)
    probe_every = config.tau_every or config.val_every or data.order.steps_per_epoch
    return module, data, config, provenance, probe, probe_every


def open_data(directory: Path, config: TrainEagleConfig, target: CausalLM) -> FeatureDataset | ResponsesDataset:
    """Features, or texts for the target to read. Features are hashed to see that they are intact; from HASHED_BYTES on
    only their files' sizes are compared.

    Raises:
        InputError: another artefact, or one of another target.
    """
    identity = {"target": target.info.identity}
    manifest = Manifest.read(directory)
    if manifest.kind == "features":
        if config.features == "cache":
            remedy = "Leave --features at online: these are read, not computed."
            raise InputError("features", f"cache, and features in {directory}", "responses to compute them of", remedy)
        size = sum(entry.bytes for entry in manifest.files)
        return FeatureDataset(directory, identity, check="sha256" if size < HASHED_BYTES else "size")
    open_artefact(directory, ("responses", "prompts", "features"), check="size")
    return ResponsesDataset(directory, config.target, target.info.identity)


def open_cache(
    config: TrainEagleConfig, target: CausalLM, samples: Sequence[Samples], say_room: bool
) -> FeatureCache | None:
    """The cache of `--features cache`, from which the samples are read from now on where it has them.

    say_room: say what it will take of the disk, and stop where that is too much; one process does.
    """
    if config.features != "cache":
        return None
    directory = config.feature_cache or config.output / "feature-cache"
    cache = FeatureCache(directory, target.info.identity, config.feature_dtype, str(target.dtype))
    if say_room:
        check_room(cache, samples, target.info.hidden_size, directory)
    for part in samples:
        part.dataset = CachedFeatures(part.dataset, cache)
    return cache


def make_head(config: TrainEagleConfig, target: CausalLM) -> EagleHead:
    """Initial weights depend on the seed (and the target) alone and leave torch's global generator as it was.

    Raises:
        InputError: the target is of a family whose layers the head can not take its shape from, or the head to
            fine-tune is none, does not fit the target or contradicts the settings.
    """
    shape = target.config if isinstance(target, LlamaLM) else target_shape(config.target)
    settings = eagle_settings(config, shape)
    if config.init not in FRESH:
        head = starting_head(config.init, "eagle", target.info.hidden_size, target.info.vocab_size)
        assert isinstance(head, EagleHead)
        return head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = EagleHead(settings)
    if config.init == "target-last-layer":
        head.init_from_target(last_layer(config, target))
    return head


def eagle_settings(config: TrainEagleConfig, target: LlamaConfig) -> EagleConfig:
    """The shape of the head that is trained: after the target, or that of the head it starts from.

    Raises:
        InputError: `init` is no head, or one that `num_layers` or `rope` contradicts.
    """
    if config.init in FRESH:
        return EagleConfig.for_target(target, config.num_layers or 1, rope=config.rope)
    settings = starting_settings(config.init, "eagle", target.hidden_size, target.vocab_size)
    assert isinstance(settings, EagleConfig)
    layers, scaling = settings.llama.num_layers, settings.llama.rope_scaling.kind
    if config.num_layers not in (None, layers):
        expected = f"{layers}, as the head of --init has"
        raise InputError(
            "num_layers", config.num_layers, expected, "Leave --num-layers out, or start from another head."
        )
    if config.rope == "plain" and scaling != "default":
        expected = f"target: the head of --init has rope scaling {scaling}"
        raise InputError("rope", "plain", expected, "Leave --rope out, or start from another head.")
    return settings


def last_layer(config: TrainEagleConfig, target: CausalLM) -> dict[str, Tensor]:
    """Weights of the target's last layer, on the CPU.

    Raises:
        InputError: no process has all of it.
    """
    if config.target_parallel == "tensor":
        remedy = "Pass --init random."
        raise InputError("init", "target-last-layer of a target in parts", "whole layers", remedy)
    if isinstance(target, LlamaLM):
        layer = target.model.layers[-1]
    else:
        from draftsmith.modules.targets.hf import HFLM

        assert isinstance(target, HFLM)
        layer = target.model.base_model.layers[-1]
    return {name: weight.cpu() for name, weight in layer.state_dict().items()}


def target_shape(path: str) -> LlamaConfig:
    """Sizes of a Llama-family target that runs by transformers.

    Raises:
        InputError: another family, or a switch that the head's layers do not have.
    """
    raw = read_config(path)
    try:
        return llama_config(raw)
    except InputError as error:
        found = f"{path} ({error.field}: {raw.get(error.field)})"
        expected = f"a target whose layers are those of {', '.join(SUPPORTED)}: the head is one of them"
        raise InputError("target", found, expected, "Train a head for another target.") from error


def feature_std(samples: Samples, target: CausalLM, stored: FeatureDtype | None = None) -> float:
    """Standard deviation of the features' elements over the first samples: the noise's unit.

    stored: of texts, what a cache makes of them; what it holds already is not read here, so that nothing depends on it.
    """
    count, first, second = 0, 0.0, 0.0
    for i in range(min(STD_SAMPLES, len(samples))):
        item = samples.item(i, 0)
        features = None if stored else item.get("features")
        if features is None:
            features = target.features(item["input_ids"][None].to(target.device))[0]
            place = first_broken(features)
            if place is not None:
                raise NonFinite("hidden states", "target", place).of([samples.name(i)])
            features = rounded(features, stored) if stored else features
        features = features.double()
        count, first = count + features.numel(), first + float(features.sum())
        second += float(features.square().sum())
    return max(second / count - (first / count) ** 2, 0.0) ** 0.5


def tau_prompts(config: TrainEagleConfig, val: Samples, context: int) -> list[list[int]]:
    """Prompts to measure tau on, of those that leave room for their answers where there are such.

    Raises:
        InputError: `tau_data` is no prompts, or of another tokenizer.
    """
    if not config.tau_prompts:
        return []
    if config.tau_data is None:
        found = held_out_prompts(val)
    else:
        manifest = open_artefact(config.tau_data, "prompts", text_identity(config.target))
        found = (row["prompt_ids"] for row in Rows(config.tau_data, manifest, ["prompt_ids"]).iterate())
    chosen, longest = [], context - config.tau_max_new_tokens
    tight: list[list[int]] = []
    for prompt in found:
        if len(prompt) <= longest:
            chosen.append(prompt)
        elif len(prompt) < context and len(tight) < config.tau_prompts:
            tight.append(prompt)
        if len(chosen) == config.tau_prompts:
            break
    return chosen or tight


def held_out_prompts(samples: Samples) -> Iterator[list[int]]:
    """What comes before an answer of each validation sample: before the first one of the first sample, the second one
    of the second, and so on, so that they are as long as conversations get. Then the samples' other answers."""
    begins: dict[int, list[int]] = {}
    for more in itertools.count():
        for i in range(len(samples)) if more == 0 else list(begins):
            item: dict[str, Any] = samples.item(i, 0)
            starts = begins.setdefault(i, [start for start, _ in spans(item["loss_mask"].numpy()) if start > 0])
            if more < len(starts):
                yield item["input_ids"][: starts[(i + more) % len(starts)]].tolist()
        begins = {i: starts for i, starts in begins.items() if more + 1 < len(starts)}
        if not begins:
            return
