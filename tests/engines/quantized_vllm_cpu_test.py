"""Checkpoints that compressed-tensors' own code compresses: our weights are those that it decompresses, and our
distributions those of the whole vLLM engine on a CPU. Run by `make test-engines`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from exported import FIGURES
from safetensors.torch import save_file

from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.models import load_lm

torch.set_num_threads(1)
# Format, weights, inputs, numbers up to the largest one of a scale, and the most that vLLM's distribution may differ by
# in nat: its bfloat16 alone takes 0.001, inputs rounded to FP8 0.014; the unquantized target is off by 0.12 for W4A16.
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, float, float]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None,
              7.5, 0.005),
    "INT8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
             {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, 127.5, 0.005),
    "FP8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, 448, 0.03),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEMES)
def test_our_weights_are_compressed_tensors_and_our_distributions_vllms(kind, tmp_path):
    from vllm import LLM, SamplingParams

    name, weights, inputs, largest, bar = SCHEMES[kind]
    target, directory = Checkpoint("embedded:target"), tmp_path / kind
    shutil.copytree(target.directory, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=name)
    compressor, tensors, expected = BaseCompressor.get_value_from_registry(name), target.state(), {}
    for weight in [weight for weight in tensors if weight.endswith("_proj.weight")]:
        plain, stem = tensors.pop(weight).float(), weight.removesuffix("weight")
        grouped = plain.unflatten(1, (-1, weights.get("group_size", plain.shape[1])))
        scale = grouped.abs().amax(-1) / largest
        parts = compressor.compress({"weight": plain, "weight_scale": scale}, scheme)
        expected[weight] = compressor.decompress(dict(parts), scheme)["weight"].float()
        tensors |= {f"{stem}{part}": tensor for part, tensor in parts.items() if tensor is not None}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    groups = {"group_0": scheme.model_dump(mode="json")}
    settings = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, "ignore": ["lm_head"]}
    settings |= {"quantization_status": "compressed"}
    raw = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(raw))
    ours = Checkpoint(directory).state()
    assert len(expected) == 84
    for weight, exact in expected.items():
        torch.testing.assert_close(ours[weight], exact, rtol=2e-7, atol=0)

    text = load_tokenizer(directory)(Path(__file__).read_text())["input_ids"][:300]
    llm = LLM(str(directory), dtype="bfloat16", enforce_eager=True, max_num_seqs=2, max_model_len=512)
    params = SamplingParams(max_tokens=1, prompt_logprobs=20, temperature=0)
    answers = llm.generate([{"prompt_token_ids": text}], params)[0].prompt_logprobs[1:]
    lm = load_lm(str(directory))
    own = lm.lm_head(lm.features(torch.tensor([text])))[0].log_softmax(-1)
    divergence = 0.0
    for row, answer in zip(own, answers, strict=False):
        logs = torch.tensor([each.logprob for each in answer.values()])
        divergence += (logs.exp() * (logs - row[list(answer)])).sum().item() / len(answers)
    FIGURES.append(f"{kind}: KL of vLLM's distributions from ours {divergence:.4f} nat")
    assert abs(divergence) < bar
