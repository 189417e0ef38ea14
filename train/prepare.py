"""Models and data of a training, from its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.served_proof import ANSWERED_ROWS, Recorded, prove_served, prove_teacher
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import ArtifactDataset, open_dataset
from draftsmith.data.store.feature_codec import token_bytes
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.parts import Data, parts_of
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer, checkpoint_of, shape_of
from draftsmith.modules.pretrained.heads import starting_head, starting_settings
from draftsmith.modules.pretrained.identity import captured
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.pretrained.stitch import mtp_state
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainAcceptanceConfig, TrainDrafterConfig
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.strategies import local_device, world_size

if TYPE_CHECKING:
    from draftsmith.train.data import HeadDataModule, Samples
    from draftsmith.train.features import FeatureSource
    from draftsmith.train.module import LitHead

TrainedConfig = TrainAcceptanceConfig | TrainDrafterConfig

# Steps whose states a server is asked for ahead of time.
STEPS_AHEAD = 2
# Larger artifacts are not hashed: at about 1 GB/s this takes half a minute.
HASHED_BYTES = 32 * 2**30


def prepare(
    config: TrainedConfig, clients: ExitStack | None = None, opened: Checkpoint | None = None
) -> tuple[LitHead, HeadDataModule]:
    """Load models and data; return the module and data module of a training, the arguments of `fit`.

    clients: receives what has to be closed when the training has ended. opened: the target of a drafter, if it is open.

    Raises:
        InputError: the data was made with another target, is damaged or empty, or the disk cannot hold the cache.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train import acceptance
    from draftsmith.train.data import HeadDataModule, train_and_val
    from draftsmith.train.module import LitDrafter, with_loss

    if isinstance(config, TrainAcceptanceConfig):
        return acceptance.prepare(config)
    # Its errors come before anything is loaded.
    with_loss(config)

    # The target, and the config of the head.
    checkpoint = opened or Checkpoint(config.target, config.trust_remote_code)
    drafter, device = config.drafter, local_device(config)
    target: CausalLM
    if needs_layers(config):
        target = load_lm(checkpoint, config.dtype, device, config.loader, config.trust_remote_code)
    else:
        target = load_outer(checkpoint, config.dtype, device)
    shape = checkpoint.shape
    head_shape = head_config(config, shape)
    layers = drafter.loss_layers(head_shape, target.info.num_layers)

    for reason in () if drafter.own_layer else shape.reasons:
        say_on_rank_zero(f"the head has {reason}")

    # Data: a head to fine-tune may have a shorter context than its target.
    train = open_data(config.data, config, target, layers)
    val = open_data(config.val, config, target, layers) if config.val is not None else None
    context = min(target.info.max_position, head_shape.max_position)
    samples = train_and_val(config, train, val, context, drafter.num_lost_rows)

    def token_counts() -> Tensor:
        return samples[0].dataset.token_counts(samples[0].indices, target.info.vocab_size)

    def pair_counts() -> Tensor:
        return samples[0].dataset.pair_counts(samples[0].indices, target.info.vocab_size)

    # The proof of a teacher comes before the head, which may start from the target's logits.
    source = feature_source(config, target, layers, samples, clients or ExitStack())
    head = make_head(config, target, token_counts, pair_counts)
    data = HeadDataModule(*samples, config)
    return LitDrafter(head, target, config, source=source), data


def needs_layers(config: TrainDrafterConfig) -> bool:
    """Return whether the target's layers run in the training: for states, or for the answers that tau is read along."""
    if config.server is not None:
        return False
    data = [Manifest.read(part.path) for part in config.parts]
    val = data if config.val is None else [Manifest.read(config.val)]
    recorded = config.tau_data is None and all(own.sampling and own.sampling == val[0].sampling for own in val)
    return any(own.kind != "features" for own in data + val) or (config.tau_prompts > 0 and not recorded)


def open_data(data: Data, config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int]) -> ArtifactDataset:
    """Open features of these layers (`DraftHead.loss_layers`), or texts for the target to read.

    Features are hashed to see that they are intact; of more than HASHED_BYTES only the files' sizes are compared.

    Raises:
        InputError: another artifact, one of another target, or features of other layers than the drafter reads.
    """
    manifests, checkpoint = [Manifest.read(part.path) for part in parts_of(data)], checkpoint_of(target)
    if not any(manifest.kind == "features" for manifest in manifests):
        for manifest in manifests:
            open_artifact(manifest.directory, ("responses", "prompts", "features"), check="size")
        return text_dataset(data, checkpoint)

    identity, made_with = captured(target.info.identity, layers), dict[str, Any]()
    for manifest in manifests:
        if manifest.kind != "features":
            found, remedy = f"{manifest.directory}, {manifest.kind} beside features", "Make features of them, too."
            raise InputError("data", found, "artifacts of one kind", remedy)
        if config.server is not None:
            found = f"{config.server}, and features in {manifest.directory}"
            remedy = "Leave it out: these are stored."
            raise InputError("server", found, "responses to compute them of", remedy)
        stored, wanted = (own.get("layers", "final-norm") for own in (manifest.identity.get("target", {}), identity))
        if stored != wanted:
            expected = f"those of {wanted}, which this head learns from"
            remedy = f"Make them with data features --drafter {config.kind}."
            raise InputError("data", f"features of layers {stored}", expected, remedy)
        if manifest.readout is None and taught_by_final_state(layers, target):
            remedy = f"Make them again: {manifest.command}"
            raise InputError("data", "features whose teacher was not proved", "the field `teacher` in it", remedy)
        target.readout = manifest.readout or target.readout
        made_with |= {"target": identity, **checkpoint.template_identity(manifest.identity)}
    size = sum(entry.bytes for manifest in manifests for entry in manifest.files)
    check = "sha256" if size < HASHED_BYTES else "size"
    return open_dataset(data, "features", made_with, check, target.info.vocab_size)


def taught_by_final_state(layers: Sequence[int], target: CausalLM) -> bool:
    """Return whether these states (`DraftHead.loss_layers`) end with the one that gives the target's distributions."""
    return not layers or layers[-1] == final_state(target.info.num_layers)


def feature_source(
    config: TrainDrafterConfig, target: CausalLM, layers: Sequence[int], samples: Sequence[Samples], clients: ExitStack
) -> FeatureSource:
    """Return the reader of features of responses; served ones come with the samples.

    clients: receives the server's client, to close it.

    Raises:
        InputError: no server, another target, a wrong teacher or other layers there, or a directory that is not here.
    """
    from draftsmith.train.features import FeatureSource, FeatureStream

    stream, teacher = None, None
    if config.server is not None:
        states = tuple(layers) or (final_state(target.info.num_layers),)
        size = token_bytes(target.info.hidden_size * len(states), config.feature_dtype)
        server = clients.enter_context(ServedStates(config.server, config.output))
        items = [samples[0].item(i, 0) for i in range(min(ANSWERED_ROWS, len(samples[0])))]
        rows, masks = ([item[name].tolist() for item in items] for name in ("input_ids", "loss_mask"))
        assert isinstance(target, OuterLM)
        if rank() == 0:
            recorded = Recorded(rows, masks, samples[0].dataset.manifest.sampling)
            log_note(str(prove_served(server, target, recorded, states, config.feature_dtype)))
        else:
            prove_teacher(server, target, rows)
        teacher = server.teacher
        step_tokens = config.tokens_per_batch or config.batch_size * float(samples[0].lengths.mean())
        window = STEPS_AHEAD * size * step_tokens / world_size(config)
        stream = FeatureStream(server, window, size)
    for part in samples:
        part.stream = stream
    source = FeatureSource(target, tuple(layers), stream, teacher)
    # Without the target's layers there is nothing to compare with: stored states were proved when they were written.
    if stream is None and not isinstance(target, OuterLM) and taught_by_final_state(layers, target):
        longest = int(samples[0].lengths[:16].argmax())
        source.prove(samples[0].item(longest, 0))
    return source


def make_head(
    config: TrainDrafterConfig,
    target: CausalLM,
    counts: Callable[[], Tensor] | None = None,
    pair_counts: Callable[[], Tensor] | None = None,
) -> DraftHead:
    """Make a head to train, new or from `init`.

    Its weights depend on the seed (and the target and the data) alone; torch's global generator stays as it was.

    counts, pair_counts: return how often each token occurs in the training answers, [V], and behind each other token,
        [V, V] sparse, for heads that ask.

    Raises:
        InputError: the target is of a family whose layers the head cannot have, or `init` is no head, does not fit the
            target or contradicts the options.
    """
    drafter = config.drafter
    head_shape = head_config(config, shape_of(target))
    weights = FrozenWeights(target, counts, pair_counts)
    if config.init != "random" and drafter.saved_as_model:
        weights.checkpoint = Checkpoint(config.init)
    if config.starting_head is not None:
        head = starting_head(config.init, config.kind, target.info.hidden_size, target.info.vocab_size)
        assert isinstance(head, DraftHead)
        head.config = head_shape
        head.update_from_target(weights)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            head = drafter(head_shape)
            head.start(weights)
        head.trained |= config.init != "random"
    head.freeze(config)
    return head


def head_config(config: TrainDrafterConfig, target: LlamaConfig) -> Any:
    """Return the config of the head to train: after the target, or that of the head it starts from.

    Raises:
        InputError: `init` is no head, or one that the options contradict.
    """
    if config.init == "random":
        return config.drafter.new_config(config, target)
    if config.drafter.saved_as_model:
        draft = Checkpoint(config.init)
        check_same_tokenizer(Checkpoint(config.target), draft, "init")
        shape = draft.shape
        options: Any = config
        kept = options.keep_layers or tuple(range(shape.num_layers))
        shape = dataclasses.replace(shape, vocab_size=target.vocab_size)
        return config.drafter.new_config(dataclasses.replace(options, keep_layers=kept), shape)
    found = starting_settings(config.init, config.kind, target.hidden_size, target.vocab_size)
    window = getattr(config, "window", None)
    if window is not None:
        # No weight depends on it.
        found = found.with_window(window or None)
    config.drafter.check_init(config, found, target)
    return found


def with_shape(config: TrainDrafterConfig, target: LlamaConfig) -> TrainDrafterConfig:
    """Fill in the options that shape the head, so that the manifest has the values of a head to fine-tune too."""
    return dataclasses.replace(config, **config.drafter.shape(head_config(config, target)))


class FrozenWeights:
    """Weights of a loaded target that a head may start from (`base.TargetWeights`)."""

    def __init__(
        self,
        target: CausalLM,
        counts: Callable[[], Tensor] | None,
        pair_counts: Callable[[], Tensor] | None,
    ):
        """counts, pair_counts: see `make_head`."""
        self._target, self._counts, self.checkpoint = target, counts, target.info.files
        self.pair_counts = pair_counts

    @property
    def path(self) -> str:
        """Directory of the model."""
        return "" if self.checkpoint is None else str(self.checkpoint.directory)

    def tensors(self, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
        """Read tensors from the files: a loaded model may be rounded, packed, or split over ranks."""
        assert isinstance(self.checkpoint, Checkpoint)
        return self.checkpoint.read_tensors(prefixes)

    def mtp(self) -> dict[str, Tensor]:
        assert isinstance(self.checkpoint, Checkpoint)
        state = mtp_state(self.checkpoint)
        shipped = "the target's own MTP module" if state else "random weights: the target ships no MTP module"
        say_on_rank_zero(f"the head starts from {shipped}")
        return state

    def lm_head(self) -> Tensor:
        """Return the output embedding, which every rank has whole."""
        return self._target.lm_head_weight().cpu()

    @property
    def logit_scale(self) -> float:
        return self._target.readout.scale

    def token_counts(self) -> Tensor:
        assert self._counts is not None
        return self._counts()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._target.info.eos_ids
