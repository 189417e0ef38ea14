"""Stage `data features`: the target's hidden states along its responses, which drafters learn from.

The feature of position t is what the drafter reads of the target once x_t was read: the state after the final norm, or
residual states of some layers side by side (`DraftHead.capture`); unshifted. Stored in bf16 or fp8 (`feature_codec`),
one safetensors file a shard with one key a row ("0000012"), beside a Parquet index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.data.console import Advance, log_note
from draftsmith.data.engines.own import length_batches, pad_right, set_threads
from draftsmith.data.models.identity import captured
from draftsmith.data.models.loading import llama_shape, load_lm, name_nonfinite, text_identity, vocabulary_size
from draftsmith.data.models.parallel import DONE, broadcast_number, received_numbers
from draftsmith.data.ranks import place
from draftsmith.data.settings import StageLoading, check_not_negative, check_positive
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import ArtefactDataset, feature_key, open_dataset
from draftsmith.data.store.files import check_disk
from draftsmith.data.store.manifest import Field, Manifest, open_artefact, volatile
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, read_done, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules import drafters
from draftsmith.modules.finite import NonFinite, first_broken
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

FIELDS = (
    Field("id", "string"),
    Field("row", "int64"),
    Field("shard", "string"),
    Field("length", "int32"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("loss_mask", "list<bool>", ("T",)),
    Field("turn", "int32"),
    Field("task", "string"),
)
# Beside the states each token has an id and a mask bit in the index.
INDEX_BYTES_PER_TOKEN = 5


@dataclass(frozen=True)
class FeaturesConfig(StageLoading):
    """Which text the target reads.

    Attributes:
        responses: Directory that `data responses` wrote with this target, or `data prompts --supervised`.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        drafter: Kind of the drafter that they are for, as `train` names it, where it reads other states than those
            after the final norm.
        layers: Layers that the drafter reads, where they are other ones than it would choose for this target.
        max_bytes: Most bytes to write; 0 leaves it to the free disk space.
        limit: Only the first so many rows; 0 takes all.
        batch_size: Rows read together.
        rows_per_shard: Rows in each shard; the features of two shards are in memory at once.
        feature_dtype: What is stored: bf16, or fp8 with a scale for each token, half the bytes.
        target_parallel: A target larger than a device: device_map spreads its layers over the GPUs of this one process;
            tensor splits each layer over the processes of this machine, under torchrun. Both run it by transformers.
    """

    responses: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    drafter: str | None = volatile(None)
    layers: tuple[int, ...] = volatile(())
    max_bytes: int = volatile(0)
    limit: int = 0
    batch_size: int = 8
    rows_per_shard: int = 128
    feature_dtype: feature_codec.FeatureDtype = "bf16"
    target_parallel: Literal["none", "device_map", "tensor"] = volatile("none")

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "rows_per_shard")
        check_not_negative(self, "limit", "num_threads", "max_bytes")
        if self.drafter is not None and self.drafter not in drafters.learned():
            known = " or ".join(drafters.learned())
            raise InputError("drafter", self.drafter, known, "Correct it, or leave it out.")


@sole_writer(shared=True)
def run(config: FeaturesConfig) -> Path:
    """Write the artefact `features`; returns its directory."""
    set_threads(config.num_threads)
    lm = load_lm(config.target, **config.loading, parallel=config.target_parallel)
    manifest = open_texts(config.responses, config.target, lm.info.identity)
    rows = Rows(config.responses, manifest, limit=config.limit, vocab_size=lm.info.vocab_size)
    capture = states_for(config, lm)
    shared = config.target_parallel == "tensor"  # all processes are one target, and the first one writes
    plan = StagePlan(
        kind="features",
        stage="data features",
        config=config,
        num_rows=len(rows),
        fields=FIELDS + feature_codec.fields(config.feature_dtype),
        inputs={manifest.kind: manifest.digest},
        identity={**manifest.identity, "target": captured(lm.info.identity, capture)},
        sampling=manifest.sampling,
        alone=shared,
    )
    if shared and place().rank:
        for number in received_numbers(lm.device):
            read_shard(lm, rows, plan.shards[number], config, lambda count: None, capture)
        return config.output
    width = lm.info.hidden_size * max(1, len(capture))
    check_room(plan, rows, feature_codec.token_bytes(width, config.feature_dtype), config.max_bytes)

    def make(shard: Shard, advance: Advance) -> ShardContent:
        if shared:
            broadcast_number(shard.index, lm.device)
        return read_shard(lm, rows, shard, config, advance, capture)

    run_stage(plan, make)
    if shared:
        broadcast_number(DONE, lm.device)
    return config.output


def states_for(config: FeaturesConfig, lm: CausalLM) -> tuple[int, ...]:
    """What the drafter learns from (`DraftHead.learns_from`), of its default shape but for `layers`.

    Raises:
        InputError: layers for a drafter that chooses none, or not those that it can read.
    """
    if config.drafter is None:
        head, known = None, set[str]()
    else:
        head = drafters.head_class(config.drafter)
        known = {field.name for field in dataclasses.fields(head.Settings)}
    if config.layers and "layers" not in known:
        remedy = "Leave --layers out, or name another --drafter."
        raise InputError("layers", " ".join(map(str, config.layers)), "none: it reads the final state", remedy)
    if head is None:
        return ()
    settings = head.Settings(**({"layers": config.layers} if config.layers else {}))
    return head.learns_from(head.shape(settings, llama_shape(lm, config.target)), lm.info.num_layers)


def open_texts(directory: Path, target: str, identity: Mapping[str, str], field: str = "responses") -> Manifest:
    """Responses of this target, or supervised prompts of its tokenizer.

    identity: the target's. field: what the user passed the directory as.

    Raises:
        InputError: another artefact, or prompts without answers.
    """
    expected: dict[str, Any] = text_identity(target)
    if Manifest.read(directory).kind == "responses":
        expected["target"] = dict(identity)
    manifest = open_artefact(directory, ("responses", "prompts"), expected)
    if manifest.kind == "prompts" and "loss_mask" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses), or data prompts --supervised."
        raise InputError(field, "prompts without answers", "responses, or supervised prompts", remedy)
    return manifest


def text_dataset(directory: Path, target: str, identity: Mapping[str, str], field: str = "data") -> ArtefactDataset:
    """Open responses of this target, or supervised prompts of its tokenizer, as a data set. Arguments as of
    `open_texts`."""
    manifest = open_texts(directory, target, identity, field)
    return open_dataset(directory, manifest.kind, vocab_size=vocabulary_size(target))


def check_room(plan: StagePlan, rows: Rows, token_bytes: int, max_bytes: int) -> None:
    """Say how much will be written, and stop before the first byte where that is too much.

    token_bytes: of a token's features.

    Raises:
        InputError: more than `max_bytes`, or more than the disk has free for the shards that are not there yet.
    """
    per_token = token_bytes + INDEX_BYTES_PER_TOKEN
    lengths = [len(row["input_ids"]) for row in rows.iterate(0, plan.num_rows)]
    total = sum(lengths) * per_token
    left = [shard for shard in plan.shards if read_done(plan.directory, shard) is None]
    needed = sum(sum(lengths[shard.start : shard.stop]) for shard in left) * per_token
    if place().rank == 0:
        shape = f"{sum(lengths):,} tokens x {token_bytes:,} bytes and an index"
        log_note(
            f"features: {plan.num_rows:,} rows, {shape}: {total:,} bytes ({total / 1e9:,.2f} GB), {needed:,} to go"
        )
    if max_bytes and total > max_bytes:
        raise InputError("max_bytes", f"{total:,} bytes to write", f"at most {max_bytes:,}", "Raise it or use --limit.")
    check_disk(plan.directory, needed, "output", "Free some space, use --limit or another disk.")


@torch.inference_mode()
def read_shard(
    lm: CausalLM,
    source: Rows,
    shard: Shard,
    config: FeaturesConfig,
    advance: Advance,
    capture: tuple[int, ...] = (),
) -> ShardContent:
    """Features of every row of a shard, in batches of like length."""
    rows = source.read(shard.start, shard.stop)
    for offset, row in enumerate(rows):
        if len(row["input_ids"]) > lm.info.max_position:
            found, expected = f"{len(row['input_ids'])} tokens", f"at most {lm.info.max_position}, the target's context"
            raise InputError(f"row {shard.start + offset}", found, expected, "Make shorter ones, or use --limit.")
    tensors: dict[str, torch.Tensor] = {}
    for batch in length_batches([len(row["input_ids"]) for row in rows], config.batch_size):
        features = lm.features(pad_right([rows[i]["input_ids"] for i in batch], lm), capture=capture)
        for i, padded in zip(batch, features, strict=True):
            own = padded[: len(rows[i]["input_ids"])]
            place = first_broken(own)
            if place is not None:
                with name_nonfinite([rows[i]["id"]]):
                    raise NonFinite("hidden states", "target", place)
            stored = feature_codec.encode(own, config.feature_dtype)
            # A copy: a view would keep, and safetensors would refuse, the padded batch behind it.
            tensors |= {
                feature_key(shard.start + i) + suffix: tensor.cpu().clone() for suffix, tensor in stored.items()
            }
        advance(len(batch))
    made = [index_row(shard.start + i, shard, row) for i, row in enumerate(rows)]
    counts = {"tokens": sum(row["length"] for row in made), "loss_tokens": sum(sum(row["loss_mask"]) for row in made)}
    return ShardContent(made, counts, dict(sorted(tensors.items())))


def index_row(number: int, shard: Shard, row: dict[str, Any]) -> dict[str, Any]:
    """The index entry of a response, or of a supervised prompt, which has its own mask."""
    ids = row["input_ids"]
    return {
        "id": row["id"],
        "row": number,
        "shard": f"{shard.name}.safetensors",
        "length": len(ids),
        "input_ids": ids,
        "loss_mask": row["loss_mask"],
        "turn": row.get("turn", 1),
        "task": row["task"],
    }
