"""The format `acceptance`: its config.json says all that a server needs to compute P."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import get_args

import numpy as np
import pytest
import torch

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, feature_value
from draftsmith.modules.decoding.confidence import TokenConfidences, confidences_of
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import ForeignHead, HeadTrial, Package, Served, TargetFacts
from draftsmith.modules.formats.detect import detect
from draftsmith.modules.types import InputError

FORMAT = formats()["acceptance", "acceptance"]
HIDDEN, VOCAB, TOKENS = 6, 11, 12
ALL: tuple[Feature, ...] = get_args(Feature)
BLIND = tuple(name for name in ALL if name not in ("log_q", "logit_q", "repeat"))
REPEAT = torch.arange(TOKENS) % 5 - 2.0
MEANS = torch.arange(TOKENS) % 7 - 2.5
CASES = {
    "published": AcceptanceHeadConfig(HIDDEN, num_blocks=3, tied=True),
    "own blocks": AcceptanceHeadConfig(HIDDEN, num_blocks=2, calibration=(1.3, 0.2)),
    "late with numbers": AcceptanceHeadConfig(HIDDEN, num_blocks=1, features=("entropy",)),
    "narrow": AcceptanceHeadConfig(HIDDEN, num_blocks=1, state="before", features=("depth",), width=2),
    "before": AcceptanceHeadConfig(HIDDEN, num_blocks=1, w_rej=1.0, state="before"),
    "all": AcceptanceHeadConfig(HIDDEN, num_blocks=2, w_rej=2.0, state="before", features=ALL, calibration=(0.7, -0.2)),
    "undrawn, relu": AcceptanceHeadConfig(
        HIDDEN, num_blocks=0, state="undrawn", features=BLIND, width=4, activation="relu", calibration=(1.2, 0.1)
    ),
    "relu": AcceptanceHeadConfig(HIDDEN, num_blocks=0, state="before", features=ALL, width=4, activation="relu"),
}


def a_head(config: AcceptanceHeadConfig) -> AcceptanceHead:
    torch.manual_seed(1)
    head = AcceptanceHead(config)
    for weight in head.parameters():
        weight.data.normal_(std=0.5)
    return head.requires_grad_(False)


def package_of(head: AcceptanceHead) -> Package:
    written = FORMAT.write(head.config, dict(head.named_parameters()))
    return Package(json.loads(json.dumps(dict(written.config))), written.tensors)


def draws():
    """States, embeddings, distributions, tokens, places: what a server has at hand."""
    generator = torch.Generator().manual_seed(2)
    states, embeds = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2))
    distributions = (4 * torch.randn(TOKENS, VOCAB, generator=generator)).softmax(-1)
    distributions[0] = torch.eye(VOCAB)[3]  # top-k 1: q(y) = 1
    tokens = torch.multinomial(distributions, 1, generator=generator)[:, 0]
    return states, embeds, distributions, tokens, torch.arange(TOKENS) % 4 + 1


def by_the_words(config: dict, tensors: dict, states, embeds, distributions, tokens, depth) -> np.ndarray:
    """P in float64, from nothing but config.json, the weights and the words in it."""
    q = distributions.double().numpy()
    own, top = q[np.arange(TOKENS), tokens], q.max(1)
    with np.errstate(divide="ignore"):
        numbers = {
            "log_q": np.maximum(np.log(own), -12),
            "logit_q": np.clip(np.log(own / (1 - own)), -12, 12),
            "logit_max_q": np.clip(np.log(top / (1 - top)), -12, 12),
            "entropy": -np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0).sum(1),
            "depth": np.log(depth.numpy()),
            "temperature": np.full(TOKENS, 0.7),
            "repeat": REPEAT.double().numpy(),  # of the text, which is not part of this
            "repeat_mean": MEANS.double().numpy(),
        }
    matrices = {"state_before": states.numpy(), "state_after": states.numpy(), "embedding": embeds.numpy()}
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    given = [matrices[i["name"]] if i["name"] in matrices else numbers[i["name"]][:, None] for i in config["inputs"]]
    assert [part.shape[1] for part in given] == [i["size"] for i in config["inputs"]]
    rectified = config["activation"] == "relu"
    x = np.concatenate([part for part in given if not (rectified and part.shape[1] == 1)], 1)
    if "join.weight" in weights:
        x = x @ weights["join.weight"].T + weights["join.bias"]
    if rectified:
        x = np.maximum(x, 0)
    for i in range(config["num_blocks"]):
        name = f"blocks.{0 if config['tied'] else i}.linear"
        z = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        x = x + z / (1 + np.exp(-z))
    z = x @ weights["out.weight"][0] + weights["out.bias"][0]
    if "direct.weight" in weights:
        z = z + np.concatenate([part for part in given if part.shape[1] == 1], 1) @ weights["direct.weight"][0]
    z = z + math.log(config["w_rej"] / config["w_acc"])
    z = config["calibration"][0] * z + config["calibration"][1]
    return 1 / (1 + np.exp(-z))


def named_inputs(states, embeds, known: TokenConfidences) -> dict[str, torch.Tensor]:
    numbers = {name: feature_value(name, known)[:, None] for name in ALL}
    return {"state_before": states, "state_after": states, "embedding": embeds, **numbers}


@pytest.mark.parametrize("name", CASES)
def test_config_and_weights_say_all_that_is_computed(name):
    head = a_head(CASES[name])
    package = package_of(head)
    states, embeds, distributions, tokens, depth = draws()
    known = confidences_of(distributions, tokens, depth, torch.full((TOKENS,), 0.7))
    known = dataclasses.replace(known, repeat=REPEAT, repeat_mean=MEANS)
    numbers = head.feature_values(known) if head.config.features else None
    ours = torch.sigmoid(head.calibrated(head(states, embeds if head.config.state == "before" else None, numbers)))
    by_words = by_the_words(dict(package.config), dict(package.tensors), states, embeds, distributions, tokens, depth)
    # Float32 sums of some tens of terms, against float64.
    assert ours.numpy() == pytest.approx(by_words, abs=1e-5)
    prob = FORMAT.forward(head, HeadTrial(TargetFacts({}), inputs=named_inputs(states, embeds, known)))[0][0]
    assert torch.allclose(prob, ours, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_head_comes_back_as_it_was(name):
    head = a_head(CASES[name])
    package = package_of(head)
    imported = FORMAT.read(package, TargetFacts({"hidden_size": HIDDEN}))
    assert imported.config == head.config and imported.problems == ()
    assert imported.state.keys() == dict(head.named_parameters()).keys()
    assert all(torch.equal(imported.state[key], value) for key, value in head.named_parameters())
    assert detect(ForeignHead.of(package)).name == "acceptance"


def test_standardisation_is_written_in_the_weights():
    head = a_head(dataclasses.replace(CASES["relu"], standardize=True))
    for name, buffer in head.named_buffers():
        buffer.uniform_(0.5, 2) if name.endswith("scale") else buffer.normal_()
    package = FORMAT.write(head.config, head.state_dict())
    states, embeds, distributions, tokens, depth = draws()
    known = dataclasses.replace(
        confidences_of(distributions, tokens, depth, torch.full((TOKENS,), 0.7)), repeat=REPEAT, repeat_mean=MEANS
    )
    ours = torch.sigmoid(head.calibrated(head(states, embeds, head.feature_values(known))))
    by_words = by_the_words(dict(package.config), dict(package.tensors), states, embeds, distributions, tokens, depth)
    assert ours.numpy() == pytest.approx(by_words, abs=1e-5)


def changed(package: Package, tensors: dict | None = None, **config) -> Package:
    return dataclasses.replace(package, config={**package.config, **config}, tensors=tensors or package.tensors)


def test_a_directory_that_does_not_fit_is_refused():
    package = package_of(a_head(CASES["all"]))
    tensors, inputs = dict(package.tensors), package.config["inputs"]
    lacking = {name: value for name, value in tensors.items() if name != "direct.weight"}
    broken = {
        "direct.weight is missing": changed(package, lacking),
        "join.weight is": changed(package, {**tensors, "join.weight": tensors["join.weight"][:, 1:]}),
        "more.weight is unknown": changed(package, {**tensors, "more.weight": torch.zeros(1)}),
        "inputs: found": changed(package, inputs=[inputs[1], inputs[0], *inputs[2:]]),
        "format: found draftsmith-acceptance 2": changed(package, format_version=2),
        "width: found wide": changed(package, width="wide"),
        "calibration": Package({k: v for k, v in package.config.items() if k != "calibration"}, tensors),
    }
    for words, directory in broken.items():
        with pytest.raises(InputError, match=words) as error:
            FORMAT.read(directory)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="hidden_size: found 6, expected 12"):
        FORMAT.read(package, TargetFacts({"hidden_size": 2 * HIDDEN}))


def test_specdec_pp_refuses_what_its_class_is_not_fed():
    for name in ("late with numbers", "before", "all"):
        head = a_head(CASES[name])
        with pytest.raises(InputError, match=r"predicts by .*export --format acceptance") as error:
            formats()["specdec_pp", "acceptance"].write(head.config, dict(head.named_parameters()))
        assert "\n" not in str(error.value)


def test_its_command_checks_the_directory():
    assert FORMAT.serve(Served("d", "there", 8)) == "draftsmith check there --format acceptance --draft d"
    assert FORMAT.serve(Served("t", "there", 8, drafter="e")).endswith("--format acceptance --target t --draft e")
