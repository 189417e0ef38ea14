"""Hydra heads in the layout of zankner/Hydra, against classes rebuilt from their description; the prefix layer is
transformers' Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig as HFConfig
from transformers import LlamaModel as HFModel

from draftsmith.data.export.directory import read_package
from draftsmith.data.heads.directory import build_head
from draftsmith.modules.drafters.hydra import HydraConfig, HydraHead
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, Probe, TargetFacts, Trial
from draftsmith.modules.formats.detect import detect
from draftsmith.modules.formats.hydra import logits_of
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.types import InputError

H, V, POSITIONS, HEADS, INTER = 12, 40, 64, 3, 20
RAW = {
    "hidden_size": H, "vocab_size": V, "max_position_embeddings": POSITIONS, "num_attention_heads": 3,
    "num_key_value_heads": 1, "intermediate_size": INTER, "num_hidden_layers": 5, "rms_norm_eps": 1e-5,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(9)
EMBEDDING, LM_HEAD = torch.randn(2, V, H, generator=GENERATOR)
FACTS = TargetFacts(RAW, EMBEDDING, LM_HEAD)
FORMAT = formats()["hydra", "hydra"]
CASES = pytest.mark.parametrize(("prefix", "layers"), [(False, 1), (False, 3), (True, 1), (True, 4)])


class Block(nn.Module):
    """A linear layer and SiLU, with a linear way around it where sizes differ."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * H, H)
        self.res_connection = nn.Linear(parts * H, H) if parts > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Published(nn.Module):
    """hydra_head of grounded heads. The embedding is the target's module; later blocks are one object repeated."""

    def __init__(self, prefix: bool, layers: int) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.input_embed_fn = nn.Embedding(V, H, _weight=EMBEDDING.clone())
        drop = [nn.Dropout(0.2)] if prefix else []
        if prefix:
            self.prefix_embeding_layer = HFModel(HFConfig(**{**RAW, "num_hidden_layers": 1}))
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*drop, Block(2 + i), *([*drop, Block()] * (layers - 1))) for i in range(HEADS)
        )
        outs = [nn.Linear(H, V) for _ in range(HEADS)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*drop, out) if prefix else out for out in outs)
        self.eval().requires_grad_(False)
        for weight in self.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))

    def forward(self, states: Tensor, ids: Tensor) -> list[Tensor]:
        """Logits of every head; states [T, H], ids [T]; roll and cut, as the training does."""
        if hasattr(self, "prefix_embeding_layer"):
            states = self.prefix_embeding_layer(inputs_embeds=states[None]).last_hidden_state[0]
        embeds, found, count = self.input_embed_fn(ids), [], len(ids)
        for i, (mlp, out) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            inputs = [states, *(torch.roll(embeds, -(j + 1), 0) for j in range(i + 1))]
            found.append(out(mlp(torch.cat(inputs, -1)))[: count - 1 - i])
        return found


def fields(prefix: bool, layers: int) -> dict:
    return {
        "hydra_num_heads": HEADS, "hydra_num_layers": layers, "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }  # fmt: skip


def write(directory: Path, prefix: bool, layers: int) -> Published:
    made = Published(prefix, layers)
    torch.save(made.state_dict(), directory / "hydra_lm_head.pt")
    (directory / "config.json").write_text(json.dumps(fields(prefix, layers)))
    return made


@CASES
def test_a_published_directory_is_read_bit_by_bit_and_computes_the_same(tmp_path, prefix, layers):
    made = write(tmp_path, prefix, layers)
    package = read_package(str(tmp_path))
    assert detect(package.config, {name: tuple(tensor.shape) for name, tensor in package.tensors.items()}) is FORMAT
    parsed, reading = FORMAT.parse(package, FACTS), FORMAT.read(package, FACTS)
    llama = LlamaConfig(V, H, INTER, int(prefix), 3, 1, 4, POSITIONS, 1e-5)
    assert parsed.config == HydraConfig(llama, HEADS, layers, True) and not reading.errors
    assert {*reading.used, *(finding.where for finding in reading.findings)} == package.tensors.keys()
    first = 1 if prefix else 0
    for i in range(HEADS):
        own = {"linear": made.hydra_mlp[i][first].linear, "skip": made.hydra_mlp[i][first].res_connection}
        if layers > 1:
            own["block.linear"] = made.hydra_mlp[i][-1].linear
        out = made.hydra_lm_head[i][1] if prefix else made.hydra_lm_head[i]
        wanted = {f"heads.{i}.{name}": module for name, module in own.items()} | {f"lm_heads.{i}": out}
        for name, module in wanted.items():
            for part in ("weight", "bias"):
                assert torch.equal(parsed.state[f"{name}.{part}"], getattr(module, part))
    ours = build_head("hydra", parsed.config, parsed.state)
    assert isinstance(ours, HydraHead)
    ids, x = torch.randint(V, (9,), generator=GENERATOR), torch.randn(9, H, generator=GENERATOR)
    with torch.no_grad():
        for found, logits in zip(logits_of(ours, ids, x, FACTS), made(x, ids), strict=True):
            assert torch.allclose(found, logits, atol=1e-5)  # float32, in products of other numbers of rows
        probe = Probe(ids, 2, ids, x, x.flip(0))
        assert FORMAT.compare(reading, ours, package, Trial(FACTS, [probe]))[0].passed
        ours.heads[1].skip.bias[0] += 1
        assert not FORMAT.compare(reading, ours, package, Trial(FACTS, [probe]))[0].passed


@CASES
def test_what_is_written_fills_the_published_classes_and_comes_back(prefix, layers):
    llama = LlamaConfig(V, H, INTER, int(prefix), 3, 1, 4, POSITIONS, 1e-5)
    config = HydraConfig(llama, HEADS, layers, True)
    torch.manual_seed(1)
    state = dict(HydraHead(config).named_parameters())
    package = FORMAT.write(config, state, torch.float32, FACTS)
    made = Published(prefix, layers)
    missing, unknown = made.load_state_dict(dict(package.tensors), strict=False)
    assert not unknown and set(missing) <= {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    ids, x = torch.randint(V, (9,), generator=GENERATOR), torch.randn(9, H, generator=GENERATOR)
    with torch.no_grad():
        ours = logits_of(build_head("hydra", config, {n: t.detach() for n, t in state.items()}), ids, x, FACTS)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, made(x, ids), strict=True))
    reading, parsed = FORMAT.read(package, FACTS), FORMAT.parse(package, FACTS)
    assert not reading.errors and parsed.config == config
    assert all(torch.equal(parsed.state[name], weight) for name, weight in state.items())
    json_config = {"num_heads": HEADS, "num_layers": layers, "own_lm_head": True, "llama": vars(llama) | {
        "rope_scaling": vars(llama.rope_scaling)}}  # fmt: skip
    assert not FORMAT.settings_differ(json_config, reading)
    assert FORMAT.settings_differ(json_config | {"num_layers": 9}, reading)


def package_of(prefix: bool, layers: int = 2, **changed) -> Package:
    state = {name: tensor.clone() for name, tensor in Published(prefix, layers).state_dict().items()}
    return Package(fields(prefix, layers) | changed, state)


def changed(package: Package, **tensors: Tensor | None) -> Package:
    """tensors: by names with _ for each dot; None takes one away."""
    state = dict(package.tensors)
    for name in list(state):
        if name.replace(".", "_") in tensors:
            value = tensors[name.replace(".", "_")]
            state |= {} if value is None else {name: value}
            if value is None:
                del state[name]
    return Package(package.config, state)


BROKEN = {
    "Hydra++ declared as Hydra": (
        package_of(True, hydra_head_arch="mlp"), "hydra_mlp.0.1.res_connection.weight", "drops it without a word",
    ),
    "Hydra++ declared as Hydra, its lm_heads": (
        package_of(True, hydra_head_arch="mlp"), "hydra_lm_head.0.1.weight", "of prefix-mlp, and this is mlp?",
    ),
    "Hydra declared as Hydra++": (
        package_of(False, hydra_head_arch="prefix-mlp"), "prefix_embeding_layer.norm.weight", "does not find it",
    ),
    "not grounded": (package_of(False, grounded_heads=False), "grounded_heads", "read no drafted token"),
    "nothing said of grounding": (
        Package({n: v for n, v in fields(False, 2).items() if n != "grounded_heads"}, package_of(False).tensors),
        "grounded_heads", "is not true",
    ),
    "states of another layer": (package_of(False, hidden_state_offset=1), "hidden_state_offset", "another layer"),
    "attention": (package_of(False, hydra_head_arch="cross-attn"), "hydra_head_arch", "cross-attn is not followed"),
    "more heads": (package_of(False, hydra_num_heads=4), "hydra_mlp.3.0.linear.weight", "does not find it"),
    "fewer heads": (package_of(False, hydra_num_heads=2), "hydra_lm_head.2.bias", "drops it without a word"),
    "fewer layers": (package_of(False, hydra_num_layers=1), "hydra_mlp.0.1.linear.weight", "drops it without a word"),
    "an lm_head that is cut": (
        changed(package_of(False), hydra_lm_head_1_weight=torch.zeros(V - 1, H)), "hydra_lm_head.1.weight", "raises",
    ),
    "blocks that differ": (
        changed(package_of(True, 3), hydra_mlp_0_3_linear_bias=torch.ones(H)), "hydra_mlp.0.3.linear.bias",
        "is overwritten by hydra_mlp.0.5.linear.bias",
    ),
    "a lost bias": (changed(package_of(True), hydra_lm_head_0_1_bias=None), "hydra_lm_head.0.1.bias", "not find it"),
    "another target's embedding": (
        changed(package_of(False), input_embed_fn_weight=torch.ones(V, H)), "input_embed_fn.weight",
        "would go on with this other embedding",
    ),
    "another file": (
        Package(fields(False, 2), package_of(False).tensors, {}, ("model.safetensors",)), "hydra_lm_head.pt",
        "is not there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_copy_is_found_and_said_in_a_line(case):
    package, where, text = BROKEN[case]
    errors = FORMAT.read(package, FACTS).errors
    assert any(where == error.where and text in error.text for error in errors), errors
    assert not any("\n" in error.text for error in errors)
    with pytest.raises(InputError, match="weights"):
        FORMAT.parse(package, FACTS)


@pytest.mark.parametrize(
    ("case", "name"), [("a lost bias", "lm_heads.0.bias"), ("Hydra declared as Hydra++", "norm.weight")]
)
def test_what_is_not_there_is_undefined(case, name):
    """No comparison of logits passes by chance."""
    package, _, _ = BROKEN[case]
    reading = FORMAT.read(package, FACTS)
    assert reading.weights[name].isnan().all()
    ids, x = torch.arange(6), torch.randn(6, H, generator=GENERATOR)
    head = HydraHead(reading.settings["config"]).requires_grad_(False)
    measures = FORMAT.compare(reading, head, package, Trial(FACTS, [Probe(ids, 2, ids, x, None)]))
    assert not measures[0].passed


def test_without_a_target_nothing_says_the_sizes():
    with pytest.raises(InputError, match="Pass --target"):
        FORMAT.parse(package_of(False), None)


PLUS = LlamaConfig(V, H, INTER, 1, 3, 1, 4, POSITIONS)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (HydraConfig(PLUS, HEADS), "--lm-head own"),
        (HydraConfig(LlamaConfig(V, H, INTER, 1, 3, 1, 4, POSITIONS, qkv_bias=True), HEADS, 1, True), "qkv_bias"),
        (HydraConfig(LlamaConfig(V, H, INTER, 1, 3, 1, 8, POSITIONS), HEADS, 1, True), "head_dim"),
        (HydraConfig(LlamaConfig(V, H, INTER, 1, 3, 1, 4, 64, rope_theta=5e5), HEADS, 1, True), "rope_theta"),
        (
            HydraConfig(LlamaConfig(V, H, INTER, 1, 3, 1, 4, 64, rope_scaling=RopeScaling("llama3")), HEADS, 1, True),
            "rope_scaling",
        ),
    ],
)
def test_heads_that_the_format_cannot_hold_are_refused(config, text):
    with pytest.raises(InputError, match=text):
        FORMAT.check(config)
