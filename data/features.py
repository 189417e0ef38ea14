"""Stage `data features`: the target's hidden states along its responses, which heads are trained on.

The feature of position t is what a head reads of the target after x_t: the state after the final norm, or residual
states of some layers side by side (`DraftHead.aux_layers`), unshifted. Features are stored in bf16 or fp8
(`feature_codec`), one safetensors file per shard with one key per row ("0000012"), beside a Parquet index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftsmith.data.console import Advance, log_note
from draftsmith.data.engines.own import check_lengths, pad_right, set_threads
from draftsmith.data.engines.served_proof import ANSWERED_ROWS, Recorded, prove_served
from draftsmith.data.engines.vllm_states import ServedStates, Stored
from draftsmith.data.ranks import place
from draftsmith.data.responses import text_columns
from draftsmith.data.stages import FeaturesConfig, check_drafter
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import ArtifactDataset, feature_key, open_dataset
from draftsmith.data.store.manifest import MANIFEST, Field, Manifest, open_artifact
from draftsmith.data.store.parts import Data, parts_of
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, read_done, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules import drafters
from draftsmith.modules.attention import Documents, group_by_length
from draftsmith.modules.finite import NonFinite, first_broken, name_nonfinite
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import check_disk
from draftsmith.modules.pretrained.identity import captured
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.targets.proof import prove_reading
from draftsmith.modules.types import InputError

FIELDS = (
    Field("id", "string"),
    Field("row", "int64"),
    Field("shard", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("loss_mask", "list<bool>", ("T",)),
    Field("turn", "int32"),
    Field("task", "string"),
)
# A token's id and mask bit in the index, beside its states.
INDEX_BYTES_PER_TOKEN = 5


@sole_writer(shared=True)
def run(config: FeaturesConfig) -> Path:
    """Write the artifact `features` and return its directory."""
    set_threads(config.num_threads)
    (config, target), lm = config.open(config.target), None
    if config.server is None:
        lm = load_lm(target, **config.loading)
    info, manifest = target.info, open_texts(config.data, target)
    rows, aux_layers = Rows(manifest, limit=config.limit, vocab_size=info.vocab_size), tuple[int, ...]()
    # Final states are there in any family; other layers are chosen by its shape.
    if config.drafter is not None or config.layers:
        aux_layers = captured_layers(config.drafter, config.layers, target.shape)
    plan = StagePlan(
        kind="features",
        stage="data features",
        config=config,
        num_rows=len(rows),
        fields=FIELDS + feature_codec.fields(config.feature_dtype),
        inputs={manifest.kind: manifest.digest},
        identity={**manifest.identity, "target": captured(info.identity, aux_layers)},
        sampling=manifest.sampling,
    )
    # Captured layers lie side by side.
    width = info.hidden_size * max(1, len(aux_layers))
    check_room(plan, rows, feature_codec.token_bytes(width, config.feature_dtype))
    with open_states(config, target, lm, plan, rows, aux_layers) as source:
        if source is None:
            done = Manifest.read(config.output)
            about, teacher = done.identity.get("read_by"), done.teacher
        else:
            about, teacher = source.about, source.teacher

        def make_shard(shard: Shard, advance: Advance) -> ShardContent:
            assert source is not None
            texts = rows.read(shard.start, shard.stop)
            check_lengths(texts, shard.start, info.max_position)
            tensors: dict[str, torch.Tensor] = {}
            with name_nonfinite([row["id"] for row in texts]):
                for number, stored in source.read([row["input_ids"] for row in texts]):
                    # Copies: views would keep, and safetensors would refuse, what is behind them.
                    key = feature_key(shard.start + number)
                    tensors |= {key + suffix: tensor.clone() for suffix, tensor in stored.items()}
                    advance(1)
            file, tokens = f"{shard.name}.safetensors", sum(len(row["input_ids"]) for row in texts)
            index = [text_columns(row) | {"row": n, "shard": file} for n, row in enumerate(texts, shard.start)]
            counts = {"tokens": tokens, "loss_tokens": sum(sum(row["loss_mask"]) for row in texts)}
            return ShardContent(index, counts, dict(sorted(tensors.items())))

        identity = {**plan.identity, **({"read_by": about} if about else {})}
        run_stage(replace(plan, identity=identity, teacher=teacher), make_shard)
    return config.output


@contextmanager
def open_states(
    config: FeaturesConfig,
    target: Checkpoint,
    lm: CausalLM | None,
    plan: StagePlan,
    rows: Rows,
    aux_layers: tuple[int, ...],
) -> Iterator[OwnStates | ServedStates | None]:
    """Open what computes the states: our own engine, or vLLM at a server.

    Yields None if nothing is left to read: then no server is needed.
    """
    if lm is not None:
        own = OwnStates(lm, aux_layers, config)
        # A head that is not taught by the final state has nothing to prove.
        if not aux_layers or aux_layers[-1] == final_state(lm.info.num_layers):
            longest = max(rows.read(0, 16), key=lambda row: len(row["input_ids"]))
            with name_nonfinite([longest["id"]]):
                own.prove(longest["input_ids"])
        yield own
        return
    if (config.output / MANIFEST).exists() and all(read_done(config.output, shard) for shard in plan.shards):
        yield None
        return
    layers = aux_layers or (final_state(target.shape.num_layers),)
    assert config.server is not None
    with ServedStates(config.server, config.output) as source:
        examples = rows.read(0, min(ANSWERED_ROWS, len(rows)))
        texts, masks = ([row[name] for row in examples] for name in ("input_ids", "loss_mask"))
        recorded = Recorded(texts, masks, plan.sampling)
        log_note(str(prove_served(source, load_outer(target, target.dtype), recorded, layers, config.feature_dtype)))
        yield source


def captured_layers(drafter: str | None, layers: tuple[int, ...], shape: LlamaConfig) -> tuple[int, ...]:
    """Return the layers that a drafter learns from (`DraftHead.loss_layers`); empty for the final norm's state.

    layers: those that the drafter reads, if not its own choice.
    """
    check_drafter(drafter)
    head = None if drafter is None else drafters.head_class(drafter)
    has_layers = head is not None and "layers" in {field.name for field in dataclasses.fields(head.Settings)}
    if layers and not has_layers:
        remedy = "Leave --layers out, or name another --drafter."
        raise InputError("layers", " ".join(map(str, layers)), "none: it reads the final state", remedy)
    if head is None:
        return ()
    # The head's defaults, with the layers if they are given.
    settings = head.Settings(**({"layers": layers} if layers else {}))
    return head.loss_layers(head.new_config(settings, shape), shape.num_layers)


def open_texts(directory: Path, target: Checkpoint, field: str = "responses") -> Manifest:
    """Open responses of this target, or supervised prompts of its tokenizer.

    field: option that names the directory, for errors.

    Raises:
        InputError: another artifact, or prompts without answers.
    """
    manifest = Manifest.read(directory)
    expected: dict[str, Any] = target.text_identity(manifest.identity)
    if manifest.kind == "responses":
        expected["target"] = target.identity
    manifest = open_artifact(manifest.directory, ("responses", "prompts"), expected)
    if "loss_mask" not in manifest.field_names:
        remedy = "Make responses first (data responses), or data prompts --supervised."
        raise InputError(field, "prompts without answers", "responses, or supervised prompts", remedy)
    return manifest


def text_dataset(data: Data, target: Checkpoint) -> ArtifactDataset:
    """Open responses or supervised prompts as a data set. Errors as of `open_texts`."""
    for part in parts_of(data):
        open_texts(part.path, target, "data")
    return open_dataset(data, ("responses", "prompts"), check="size", vocab_size=target.shape.vocab_size)


def check_room(plan: StagePlan, rows: Rows, token_bytes: int) -> None:
    """Print how much will be written, and raise InputError if the disk has no room for it. token_bytes: of features."""
    # Features are not compressed, so their size is known before the first byte.
    lengths = [len(row["input_ids"]) for row in rows.iterate(0, plan.num_rows)]
    missing = [shard for shard in plan.shards if read_done(plan.directory, shard) is None]
    num_missing = sum(sum(lengths[shard.start : shard.stop]) for shard in missing)
    total, needed = (tokens * (token_bytes + INDEX_BYTES_PER_TOKEN) for tokens in (sum(lengths), num_missing))
    if place().rank == 0:
        size = f"{sum(lengths):,} tokens x {token_bytes:,} bytes and an index: {total:,} bytes ({total / 1e9:,.2f} GB)"
        log_note(f"features: {plan.num_rows:,} rows, {size}, {needed:,} to go")
    check_disk(plan.directory, needed, "output", "Free some space, use --limit or another disk.")


@dataclass
class OwnStates:
    """States that our own engine computes, in batches of similar length.

    A batch is encoded and checked on the model's device, and comes to the host as it is stored.

    teacher: proof of what is stored (`prove`), for the manifest.
    """

    lm: CausalLM
    aux_layers: tuple[int, ...]
    config: FeaturesConfig
    teacher: dict[str, Any] | None = None
    # Other sources say what computes their states.
    about: ClassVar[dict[str, Any]] = {}

    def prove(self, row: Sequence[int]) -> None:
        """Prove a row's states, before they are rounded, against the target's own logits; raises as `prove_reading`."""

        def states(texts: list[torch.Tensor]) -> list[torch.Tensor]:
            lengths, read = [len(text) for text in texts], dict[int, torch.Tensor]()
            for batch in group_by_length(lengths, self.config.tokens_per_batch):
                final = self._compute([texts[i].tolist() for i in batch])[:, -self.lm.info.hidden_size :]  # [N, H]
                read |= zip(batch, final.split([lengths[i] for i in batch]), strict=True)
            for own in (ordered := [read[i] for i in range(len(texts))]):
                if (broken := first_broken(own)) is not None:
                    raise NonFinite("hidden states", "target", broken)
            return ordered

        proof = prove_reading(self.lm, torch.tensor(row), states, "stored features")
        self.teacher = proof.as_json()
        if place().rank == 0:
            log_note(str(proof))

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Stored]]:
        """Yield the numbers of rows [T], each with its encoded states.

        Raises:
            NonFinite: names the row and the position in it.
        """
        lengths = [len(row) for row in rows]
        for batch in group_by_length(lengths, self.config.tokens_per_batch):
            own = [lengths[i] for i in batch]
            features = self._compute([rows[i] for i in batch])
            if first_broken(features) is not None:
                broken = [first_broken(part) for part in features.split(own)]
                row = next(n for n, place in enumerate(broken) if place is not None)
                raise NonFinite("hidden states", "target", broken[row], batch[row])
            stored = feature_codec.encode(features, self.config.feature_dtype)
            parts = {suffix: values.cpu().split(own) for suffix, values in stored.items()}
            for at, number in enumerate(batch):
                yield number, {suffix: split[at] for suffix, split in parts.items()}

    def _compute(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute features [N, L*H] of rows that are read side by side, row behind row."""
        padded = self.lm.features(pad_right(rows, self.lm), aux_layers=self.aux_layers)  # [B, T, L*H]
        return Documents.of([len(row) for row in rows], self.lm.device).unpad(padded)[0]
