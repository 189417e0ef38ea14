"""Hidden states of other families from the whole vLLM engine on a CPU: they are transformers', the way from them to the
logits is found, and a wrong one is refused. Run by `make test-engines`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported import FIGURES
from states_vllm_cpu_test import serving
from torch import Tensor

# Shared with the tests that need no engine.
sys.path.append(str(Path(__file__).parents[1]))
from twins import LAYERS, TWINS, save_twin, states_of

from draftsmith.data.engines import served_proof
from draftsmith.data.engines.served_proof import Recorded, prove_served, prove_teacher
from draftsmith.data.engines.vllm_serve import family_arguments
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.store.feature_codec import decode
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_outer
from draftsmith.modules.targets.proof import Served
from draftsmith.modules.targets.readout import candidates
from draftsmith.modules.types import InputError

torch.set_num_threads(1)
READ = (1, 2, LAYERS + 1)  # the last one after the final norm
GENERATOR = torch.Generator().manual_seed(3)
ROW = torch.randint(2, 512, (128,), generator=GENERATOR).tolist()
# vLLM has a gated delta rule for CPUs in bfloat16 only. Its layers differ from float32's by a few in a hundred.
BF16 = ("qwen3_5", "qwen3_next")


def compare(source: ServedStates, model: torch.nn.Module) -> list[float]:
    """Distance of the stored states of each layer to transformers', median over tokens, as a share of their length."""
    ((_, stored),) = source.read([ROW])
    states = decode(stored).float().unflatten(-1, (len(READ), -1))
    expected = states_of(model, ROW)[0]

    def away(column: int, layer: int) -> Tensor:
        own = expected[min(layer, LAYERS)]  # transformers' last one is normed
        return (states[:, column] - own).norm(dim=-1) / own.norm(dim=-1)

    return [away(column, layer).median().item() for column, layer in enumerate(READ)]


@contextmanager
def states_server(target: Path, layers: Sequence[int], dtype: str = "float32") -> Iterator[ServedStates]:
    """A server of these layers' states, and its client."""
    # vLLM needs a tokenizer to decode its answers, and the twins have none.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (target / name).exists():
            shutil.copy(Checkpoint("embedded:target").directory / name, target)
    words = ["--target", str(target), "--layers", *map(str, layers), "--dtype", dtype]
    directory = target.with_name(f"{target.name}-states")
    with serving(directory, words) as server, ServedStates(server.url, directory) as source:
        yield source


@pytest.mark.parametrize("name", TWINS)
def test_states_are_those_of_transformers_and_a_wrong_gain_is_refused(name: str, tmp_path: Path, monkeypatch):
    model = save_twin(name, tmp_path / "target")
    outer = load_outer(str(tmp_path / "target"))
    with states_server(tmp_path / "target", READ[:-1], "bfloat16" if name in BF16 else "float32") as source:
        proof = prove_teacher(source, outer, [ROW])
        distances = compare(source, model)
        FIGURES.append(f"{name}: {proof}; states off by {', '.join(f'{own:.2%}' for own in distances)}")
        right = proof.readout
        assert right.norm == ("rms+1" if name in ("gemma3", *BF16) else "rms")
        assert (right.scale, right.softcap) == {"granite": (1 / 8, None), "gemma4": (1.0, 30.0)}.get(name, (1.0, None))
        # Stored in bf16, which is 2^-9 off.
        assert max(distances) < (0.1 if name in BF16 else 0.004)

        def others(config: dict[str, object]) -> Iterator[object]:
            return (readout for readout in candidates(config) if readout.norm != right.norm)

        source.readout = None
        monkeypatch.setattr(served_proof, "candidates", others)
        with pytest.raises(InputError, match="teacher: found"):
            prove_teacher(source, outer, [ROW])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_vllm_runs_the_target_and_another_model_is_refused(name: str, dtype: str, tmp_path: Path):
    """The server has another rotary base, or takes fewer experts of a mixture."""
    right, other = tmp_path / "right", tmp_path / "other"
    if name == "llama":
        shutil.copytree(Checkpoint("embedded:target").directory, right)
        changed: dict[str, object] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    else:
        save_twin(name, right)
        changed = {"num_experts_per_tok": 1}
    shutil.copytree(right, other)
    config = json.loads((right / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changed}))
    last = Checkpoint(right).info.num_layers
    layers = (2, last, last + 1)
    recorded = Recorded([[*ROW, *ROW[:64]]], [[True] * 192], None)

    def prove(served: Path) -> Served | None:
        with states_server(served, layers[:-1], dtype) as source:
            return prove_served(source, load_outer(str(right), dtype), recorded, layers, "bf16").served

    found = prove(right)
    FIGURES.append(f"{name} in {dtype}: {found}".replace("\n", "; "))
    assert found is not None and found.kl is not None and found.kl < 0.02 and found.layers == [2, last]
    with pytest.raises(InputError, match="server: found a model with KL") as error:
        prove(other)
    FIGURES.append(f"{name} with {changed}: {error.value}")


@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_a_hybrid_whose_class_gives_no_states_is_one_line(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(InputError, match=f"engine: found vLLM's {name}, which gives no hidden states"):
        family_arguments(Checkpoint(tmp_path))


def test_a_server_of_a_family_without_states_of_its_own(tmp_path: Path):
    """vLLM's Gemma 3 has none: the server runs transformers' class in its place."""
    model = save_twin("gemma3", tmp_path / "target")
    words = ["--target", str(tmp_path / "target"), "--drafter", "eagle3", "--layers", "1", "2", "--dtype", "float32"]
    with serving(tmp_path / "states", words) as server, ServedStates(server.url, tmp_path / "owner") as source:
        outer = load_outer(str(tmp_path / "target"))
        proof = prove_teacher(source, outer, [ROW])
        assert proof.readout.norm == "rms+1"
        assert max(compare(source, model)) < 0.004
        source.readout = replace(proof.readout, norm="rms")
        assert compare(source, model)[-1] > 0.1
