"""A target whose hidden states were stored by `data features`, for what is computed along its own texts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.data.store.datasets import feature_key
from draftsmith.data.store.feature_codec import FeatureFiles, decode
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.spool import row_name
from draftsmith.modules.pretrained.identity import captured
from draftsmith.modules.pretrained.models import load_outer
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.types import InputError


class StoredLM(OuterLM):
    """Embeddings of a target, and its states of the rows of a features artifact."""

    def __init__(self, outer: OuterLM, manifest: Manifest):
        """manifest: of the artifact, with the target's identity."""
        super().__init__(outer.weights, outer.info, manifest.readout or outer.readout)
        self.directory = manifest.directory
        layers = manifest.identity["target"]["layers"]
        # () stands for the state behind the final norm.
        self.layers = () if layers == "final-norm" else tuple(int(layer) for layer in layers.split(","))
        self._files = FeatureFiles(self.directory)
        rows = Rows(self.directory, manifest, ["input_ids", "row", "shard"])
        self._place = {row_name(row["input_ids"]): (row["shard"], row["row"]) for row in rows.iterate()}

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the stored states [1, T, F] of a row [1, T], rounded as they were stored.

        Raises:
            InputError: the row, or one of the layers, is not among them.
        """
        assert position_ids is None and len(input_ids) == 1, "one whole row at a time"
        place = self._place.get(row_name(input_ids[0].cpu()))
        if place is None:
            found = f"{self.directory} without a row of {input_ids.shape[1]:,} tokens"
            raise InputError(
                "target_features", found, "the features of the same responses", "Make them: data features."
            )
        shard, row = place
        states = decode(self._files.read(shard, feature_key(row), f"row {row}"))  # [T, L*H]
        states = states.to(self.device, self.dtype).unflatten(-1, (-1, self.info.hidden_size))  # [T, L, H]
        # A single final state was stored without a number.
        stored = self.layers or (self.info.num_layers,)
        wanted = aux_layers or (self.info.num_layers,)
        if missing := sorted(set(wanted) - set(stored)):
            found = f"{self.directory} with states of layers {', '.join(map(str, stored))}"
            expected = f"layer {missing[0]} too"
            raise InputError("target_features", found, expected, "Make them for this drafter: data features --drafter.")
        columns = torch.tensor([stored.index(layer) for layer in wanted], device=self.device)
        return states[:, columns].flatten(1)[None]


def load_stored(path: str, directory: Path, dtype: str, device: str) -> StoredLM:
    """Load a target's embeddings and open its features.

    Raises:
        InputError: features of another target, or none.
    """
    outer = load_outer(path, dtype, device)
    manifest = open_artifact(directory, "features", check="size")
    layers = manifest.identity.get("target", {}).get("layers", "final-norm")
    numbers = () if layers == "final-norm" else tuple(int(layer) for layer in layers.split(","))
    identity = {"target": captured(outer.info.identity, numbers)}
    return StoredLM(outer, open_artifact(manifest.directory, "features", identity, check="size"))
