"""Compare predictors of acceptance on the same rounds: `python benchmarks/confidence.py --run RUN`.

RUN is a bench with `--traces` whose methods draft the same chains and predict their acceptance, such as
`dspark-confidence:t=0.0001`, `online:drafter=dspark:min=7:max=7:c=0.1` and
`specdec++:drafter=dspark:min=7:max=7:calibrated=on`. Every draft is as long as the others', and the target verifies the
same tokens: those down to the first rejected one.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import Column, Table, format_interval, print_table
from draftsmith.eval.bench.trace import TRACE
from draftsmith.launch.cli import main_of
from draftsmith.modules.acceptance.metrics import expected_calibration_error, fit_platt, soft_label_auc
from draftsmith.modules.types import InputError

RESAMPLES = 1000


@dataclass(frozen=True)
class ConfidenceConfig:
    """Measures how well methods predict the acceptance of drafted tokens, from the traces of a bench.

    Attributes:
        run: Directory of the bench.
    """

    run: Path


@dataclass(frozen=True)
class Predictions:
    """Predictions of N tokens in the rounds of one method and mode.

    prob: [N] that the token is accepted if those before it are. label: [N], its probability of that; 0 behind the first
    rejected token. verified: [N] bool, the target verified it. place: [N], from 0, in its round. prompt: [N].
    """

    prob: Tensor
    label: Tensor
    verified: Tensor
    place: Tensor
    prompt: Tensor

    def of(self, chosen: Tensor) -> Predictions:
        return Predictions(*(values[chosen] for values in vars(self).values()))

    @property
    def logit(self) -> Tensor:
        prob = self.prob.clamp(1e-6, 1 - 1e-6)
        return prob.log() - (1 - prob).log()

    def along(self, values: Tensor) -> Tensor:
        """Return the products [N] of these values from the round's first token on."""
        product = values.clone()
        for place in range(1, int(self.place.max()) + 1):
            here = (self.place == place).nonzero()[:, 0]
            product[here] *= product[here - 1]
        return product


def read_traces(path: Path) -> dict[tuple[str, float], Predictions]:
    """Read the predictions of each method and temperature. Raises InputError if there are none."""
    if not path.exists():
        raise InputError("run", f"{path.parent} without {TRACE}", "a bench with --traces", "Run it with --traces 99.")
    columns: dict[tuple[str, float], list[list[float]]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        labels = row.get("accept_prob", ())  # down to the first rejected token
        for name, key in (("head", row["method"]), ("q", f"q in {row['method']}")):
            for place, prob in enumerate(row.get(name, ())):
                verified = place < len(labels)
                label = labels[place] if verified else 0.0
                columns[key, row["temperature"]].append([prob, label, verified, place, row["prompt"]])
    if not columns:
        raise InputError("run", f"{path} without predictions", "methods that predict acceptance", "Choose others.")
    found = {}
    for key, rows in columns.items():
        columns_of = torch.tensor(rows, dtype=torch.float64).unbind(1)
        found[key] = Predictions(columns_of[0], columns_of[1], columns_of[2].bool(), columns_of[3], columns_of[4])
    return found


def measured(found: Predictions) -> dict[str, Any]:
    """Return AUC with its interval over prompts, and calibration errors, as it is and after Platt's scaling."""
    verified, even = found.of(found.verified), found.prompt % 2 == 0
    scaled = torch.empty_like(found.prob)
    for own in (even, ~even):
        other = found.of(~own & found.verified)
        scale, bias = fit_platt(other.logit, other.label)
        scaled[own] = torch.sigmoid(scale * found.logit[own] + bias)
    values: dict[str, Any] = {"tokens": len(verified.prob), "auc": float(soft_label_auc(verified.prob, verified.label))}
    for name, prob in (("ece", found.prob), ("ece_scaled", scaled)):
        values[name] = float(expected_calibration_error(prob[found.verified], verified.label))
        values[f"draft_{name}"] = float(expected_calibration_error(found.along(prob), found.along(found.label)))
    rng, prompts = np.random.default_rng(0), verified.prompt.unique().tolist()
    rows = {prompt: (verified.prompt == prompt).nonzero()[:, 0] for prompt in prompts}
    drawn = [torch.cat([rows[prompt] for prompt in rng.choice(prompts, len(prompts))]) for _ in range(RESAMPLES)]
    aucs = [float(soft_label_auc(verified.prob[own], verified.label[own])) for own in drawn]
    return {**values, "auc_ci": format_interval(tuple(np.nanquantile(aucs, (0.025, 0.975)).tolist()))}


def run(config: ConfidenceConfig) -> Sequence[Mapping[str, Any]]:
    """Print a row for each method and temperature."""
    rows = []
    for (method, temperature), found in sorted(read_traces(config.run / TRACE).items(), key=lambda own: own[0][1]):
        rows.append({"method": method, "temperature": temperature, **measured(found)})
    columns = [
        *(Column("method", "method"), Column("temperature", "T", "g"), Column("tokens", "tokens", "d")),
        *(Column("auc", "AUC", ".3f"), Column("auc_ci", "95 %")),
        *(Column("ece", "ECE", ".3f"), Column("ece_scaled", "scaled", ".3f")),
        *(Column("draft_ece", "ECE of drafts", ".3f"), Column("draft_ece_scaled", "scaled", ".3f")),
    ]
    note = "scaled: by Platt's scale and shift, fitted on the other half of the prompts."
    print_table(Table("confidence", "Predictions of acceptance", columns, rows, note))
    return rows


if __name__ == "__main__":
    sys.exit(main_of(ConfidenceConfig, run))
