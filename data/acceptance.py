"""Stage `data acceptance`: label tokens that a drafter proposes along the target's text with their acceptance.

A draft model's labels are SpecDec++'s (Huang et al. 2024, section 3.3), one drafted token at every position of an
answer: the draft reads prompt and response X (teacher forcing) and proposes Y_j ~ q(. | x, X_<j), which the target
accepts with P_j = min(1, p(Y_j) / q(Y_j)). A trained head has no states along a text that the target alone wrote: its
labels are of whole drafts, as the decoder makes them (data/labels.py). Labels hold only for the sampling settings that
they were made with, which the manifest records.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from draftsmith.data.engines.own import set_threads
from draftsmith.data.labels import MIXED_FIELDS, ROLLOUT_FIELDS, MixedTextLabels, Rollouts
from draftsmith.data.stages import AcceptanceConfig
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer
from draftsmith.modules.pretrained.heads import FrozenDrafter, kind_at, load_drafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

# Positions whose distributions are in memory at once, two rows of the vocabulary's size for each.
CHUNK = 512


@sole_writer(shared=True)
def run(config: AcceptanceConfig) -> Path:
    """Write the artifact `acceptance` or `rollouts` and return its directory."""
    set_threads(config.num_threads)

    drafts, (config, target_files) = kind_at(config.head) is not None, config.open(config.target)

    def load(model: str | Checkpoint) -> CausalLM:
        # Drafts are read in the way of decoding, for which weights are packed.
        return load_lm(model, **config.loading, packed=drafts)

    if not drafts:
        check_same_tokenizer(target_files, Checkpoint(config.head))
    target = load(target_files)
    drafter = load_drafter(config.head, lambda: target, load)
    recorded = Manifest.read(config.data).identity
    identity = {**target_files.text_identity(recorded), "target": target.info.identity}
    manifest = open_artifact(config.data, "responses", identity)
    rows = Rows(manifest, limit=config.limit, vocab_size=target.info.vocab_size)

    # Label with the settings of the responses, unless others are given.
    sampling = config.sampling(manifest.sampling or {})
    labels = labels_of(config, sampling, target, drafter)
    plan = StagePlan(
        kind="rollouts" if drafts else "acceptance",
        stage="data acceptance",
        config=config,
        num_rows=len(rows),
        fields=ROLLOUT_FIELDS if drafts else MIXED_FIELDS,
        inputs={"responses": manifest.digest},
        identity={**manifest.identity, "target": target.info.identity, "draft": drafter.identity},
        sampling=dataclasses.asdict(sampling),
        seed=config.seed,
    )
    run_stage(plan, lambda shard, advance: labels.label_shard(rows, shard, advance))
    return config.output


def labels_of(
    config: AcceptanceConfig, params: SamplingParams, target: CausalLM, drafter: FrozenDrafter
) -> MixedTextLabels | Rollouts:
    """Build the labeller.

    Raises:
        InputError: target and drafter do not fit each other, or the settings do not fit them.
    """
    if drafter.head is None:
        # Labels compare p and q, which must be distributions over the same tokens.
        drafter.lm.fit_vocabulary(target.info.vocab_size)
        return MixedTextLabels(target, drafter.lm, params, config.batch_size, CHUNK, config.seed)
    # A draft must fit into both contexts.
    context = min(target.info.max_position, drafter.max_position)
    if config.depth >= context:
        raise InputError("depth", config.depth, f"less than the context, {context}", "Draft fewer tokens.")
    return Rollouts(target, drafter, config.depth, config.stride, params, CHUNK, config.seed, context)
