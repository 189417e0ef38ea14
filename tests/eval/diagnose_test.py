"""A planted defect is named first, and a sound head has none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from states_server import StatesServer
from worlds import tiny_llama_dir

from draftsmith.data import prompts, responses
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.eval.diagnose.diagnosis import bad_numbers, template
from draftsmith.eval.diagnose.drafts import head_variants, measure
from draftsmith.eval.diagnose.repair import Share
from draftsmith.eval.settings import DiagnoseConfig
from draftsmith.launch.diagnose import run
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.launch.training import run as train_and_explain
from draftsmith.modules.formats.readings import other_weights, reversed_states
from draftsmith.modules.llama_config import RopeScaling, RotarySettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import build_head, load_draft_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.command import run as train
from draftsmith.train.config import drafter_config

NUM_PROMPTS, LAYERS = 16, (2, 4, 6)
WHOLE = {"draft_vocab": 0, "normalizer": "tokens"}
pytestmark = pytest.mark.slow  # a head that knows its answers takes some seconds


def make_target(root: Path, seed: int) -> Path:
    """A tiny target that is sure of what it says, so that a head learns it by heart in a hundred steps."""
    path = tiny_llama_dir(root, seed=seed, layers=8, hidden=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.lm_head.weight.data.mul_(4)
    model.save_pretrained(path)
    return path


def answered_by(target: Path, prompts_dir: Path, output: Path, temperature: float = 0.0) -> Path:
    return responses.run(
        responses.ResponsesConfig(
            data=prompts_dir, target=str(target), output=output, max_new_tokens=24, temperature=temperature,
            num_threads=1,
        )
    )  # fmt: skip


def trained_head(world, output: Path, steps: int, kind: str = "eagle3", **own: Any) -> Path:
    """Validated on what it learned. Its manifest says that this was a lot: nobody waits for as much in a test."""
    settings = drafter_config(kind)(
        data=world.responses, val=world.responses, target=str(world.target), output=output, layers=LAYERS,
        optimizer="muon", lr=0.02, schedule="hold", epochs=1000, max_steps=steps, batch_size=NUM_PROMPTS,
        val_every=steps, log_every=5, tau_prompts=0, loggers=("csv",), num_threads=1, **own,
    )  # fmt: skip
    best = train(settings)
    manifest = json.loads((best / "manifest.json").read_text())
    manifest["samples"]["training"] |= {"answer_tokens": 90_000}
    (best / "manifest.json").write_text(json.dumps(manifest))
    return best


@dataclasses.dataclass(frozen=True)
class World:
    target: Path
    prompts: Path
    responses: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("diagnose")
    target = make_target(root / "target", seed=0)
    rows = [{"prompt": f"def add{i}(a, b): " + "a + " * (i % 7)} for i in range(NUM_PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prompts.run(
        prompts.PromptsConfig(source=str(root / "prompts.jsonl"), target=str(target), output=root / "prompts")
    )
    return World(target, made, answered_by(target, made, root / "responses"))


@pytest.fixture(scope="module")
def sound(world, tmp_path_factory) -> Path:
    return trained_head(world, tmp_path_factory.mktemp("sound") / "run", 90, ttt_steps=4, **WHOLE)


@pytest.fixture(scope="module")
def block_head(world, tmp_path_factory) -> Path:
    return trained_head(world, tmp_path_factory.mktemp("block") / "run", 90, "dspark", block=4, markov_rank=16)


@pytest.fixture
def diagnosed(world, capsys):
    """Name of each finding -> its line, with the causes in their order under `likeliest` and `also`."""

    def diagnosed(head: Path, data: Path | None = None) -> dict[str, str]:
        capsys.readouterr()
        run(DiagnoseConfig(head=str(head), data=data or world.responses, target=str(world.target)))
        lines = capsys.readouterr().out.splitlines()
        causes = [line for line in lines if line.startswith(("Likeliest cause", "Also"))]
        return {line[5:].partition(":")[0]: line for line in lines if line[:5] in ("ok   ", "BAD  ")} | {
            "verdict": next(iter(causes), lines[-1])
        }

    return diagnosed


def changed(world, sound: Path, output: Path, state: Mapping[str, torch.Tensor], **changes) -> Path:
    """The sound head with other weights or another config, recorded as it is."""
    head = load_draft_head(sound, load_lm(str(world.target)))
    manifest = json.loads((sound / "manifest.json").read_text())
    del manifest["sha256"], manifest["kind"]
    other = build_head(head.kind, dataclasses.replace(head.config, **changes), state)
    return save_head(output, other, manifest, "card")


def test_a_sound_head_has_a_clean_bill(diagnosed, sound):
    found = diagnosed(sound)
    assert found.pop("verdict") == "Nothing is wrong."
    names = ["answers", "template", "temperature", "amount", "vocabulary", "depth", "layers", "weights", "switches"]
    assert list(found) == [*names, "trainer"]
    assert "100.0% of the answers begin where a served prompt ends" in found["template"]
    assert "100.0% of the answers' tokens are the target's first choice" in found["answers"]


def test_what_a_text_does_not_tell_of_a_draft_is_no_rejection(world, sound):
    """A draft at an answer's last token has no second one to compare; counted one by one."""
    target = load_lm(str(world.target))
    whole = Rows(Manifest.read(world.responses)).read(0, NUM_PROMPTS)
    rows = [{"input_ids": row["input_ids"][:-20], "loss_mask": row["loss_mask"][:-20]} for row in whole]
    variants = head_variants(load_draft_head(sound, target), None, target)[:1]
    measured = measure(target, rows, variants, 2)
    (drafts,) = measured.drafts
    ends = torch.tensor(measured.per_text).cumsum(0) - 1  # the last place of each answer
    assert drafts.compared[ends].tolist() == [1] * len(rows)
    inner = torch.ones(len(drafts.accepted), dtype=torch.bool).index_fill(0, ends, False)
    first = float((drafts.accepted >= 1).float().mean())
    second = int((drafts.accepted[inner] == 2).sum()) / int((drafts.accepted[inner] >= 1).sum())
    assert drafts.share() == pytest.approx(first) and drafts.share(2) == pytest.approx(first * second)
    assert Share.of(measured, 0, 2).value == drafts.share(2) > float((drafts.accepted == 2).float().mean())


def test_answers_of_another_model(world, diagnosed, sound, tmp_path):
    others = answered_by(make_target(tmp_path / "other", seed=7), world.prompts, tmp_path / "responses")
    assert diagnosed(sound, others)["verdict"].startswith("Likeliest cause (answers): ")


def test_its_own_answers_at_temperature_1_are_no_defect(world, diagnosed, sound, tmp_path):
    own = answered_by(world.target, world.prompts, tmp_path / "responses", temperature=1.0)
    found = diagnosed(sound, own)
    assert found["answers"].startswith("ok ")
    # But not what this head was trained on.
    assert found["temperature"].endswith("trained on answers at temperature 0, these are at 1")
    assert "Likeliest cause (temperature): " in found["verdict"]


@pytest.mark.parametrize("layers", [(2, 3, 4, 5, 6, 7, 8, 9), (2, 3, 4, 5, 7, 8, 9), (3, 5, 7)])
def test_a_server_that_runs_the_target_gives_the_same_diagnosis(world, sound, tmp_path, capsys, layers):
    """Word for word, where it has the states of all layers; readings that it has no states for are left out."""
    target = load_lm(str(world.target))
    planted = changed(
        world, sound, tmp_path / "head", stored_tensors(load_draft_head(sound, target)), aux_layers=(3, 5, 7)
    )
    config = DiagnoseConfig(head=str(planted), data=world.responses, target=str(world.target))
    run(config)
    expected = capsys.readouterr().out
    with StatesServer(target, layers, tmp_path / "states") as server:
        served = dataclasses.replace(config, server=server.url)
        if 9 not in layers:
            with pytest.raises(
                InputError, match=r"expected 3, 5, 7, 9. Start it: draftsmith .* --layers 2 3 4 5 6 7 8\.?$"
            ):
                run(served)
            return
        run(served)
        found = capsys.readouterr()
        assert found.out == expected if 6 in layers else found.out != expected
        assert "Likeliest cause (layers): " in found.out
        assert 6 not in layers or "better with layers 2, 4, 6 in place of 3, 5, 7" in found.out
        assert ("2 readings of other layers are left out" in found.err) == (6 not in layers)


def repaired(world, head: Path, output: Path, **more: Any) -> tuple[int, Any]:
    options: dict[str, Any] = {"data": world.responses, **more}
    code = run(DiagnoseConfig(head=str(head), target=str(world.target), write=output, **options))
    written = output / "repaired"
    return code, load_draft_head(written, load_lm(str(world.target))) if written.exists() else None


def foreign(world, head: Path, output: Path, format: str) -> None:
    """Write the head in another system's format, without the record of what was exported, as strangers' files."""
    assert export(ExportConfig(format=format, output=output, head=head, target=str(world.target))) == 0
    (output / "draftsmith.json").unlink()


TRAINERS = {
    "normed twice": ("layer.hidden_norm.weight", "the state normed twice (as ModelOpt 0.47 trains)"),
    "no last norm": ("norm.weight", "no norm before lm_head (as SpecForge 0.2 trains where norm_output is false)"),
    "YaRN": ("", "(without YaRN, which ModelOpt 0.47 adds at export)"),
}


def of_another_trainer(mistake: str, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same head with a norm that its weights absorb, and this norm in the files of a trainer that has another."""
    spread = (0.5 * torch.randn(64, generator=torch.Generator().manual_seed(0))).exp()
    if mistake == "no last norm":
        return {**state, "lm_head.weight": state["lm_head.weight"] * state["norm.weight"]} | {
            "norm.weight": torch.ones(64)
        }, spread
    first, columns = "layer.input_layernorm.weight", torch.cat([spread, torch.ones(64)])
    state = {**state, first: state[first] * spread}
    state |= {name: state[name] / columns for name in (f"layer.self_attn.{part}_proj.weight" for part in "qkv")}
    return state, state["layer.hidden_norm.weight"] / state[first] * state[first].square().mean().sqrt()


@pytest.mark.parametrize("mistake", TRAINERS)
def test_what_other_trainers_compute_is_named_and_written_as_servers_read_it(world, sound, tmp_path, capsys, mistake):
    right, (name, label) = load_draft_head(sound, load_lm(str(world.target))), TRAINERS[mistake]
    state, changes = stored_tensors(right), {}
    if name:
        state, norm = of_another_trainer(mistake, state)
        planted = {**state, name: norm}
    else:
        yarn = RopeScaling("yarn", 32.0, original_max_position=2048)
        planted, changes = state, {"llama": dataclasses.replace(right.config.llama, rope_scaling=yarn)}
    code, found = repaired(world, changed(world, sound, tmp_path / "head", planted, **changes), tmp_path / "out")
    out = " ".join(capsys.readouterr().out.split())
    assert code == 0 and out.count("WRONG") == 1 and label in out
    assert RotarySettings.of(found.config.llama) == RotarySettings.of(right.config.llama)
    # Two roundings of a product.
    assert all(torch.allclose(tensor, state[name], rtol=1e-5) for name, tensor in stored_tensors(found).items())


@pytest.mark.parametrize("mistake", ["none", "order of layers", "switch", "pairs of q and k, and layers"])
def test_repair_finds_what_is_wrong_and_nothing_else(world, sound, tmp_path, capsys, mistake):
    right = load_draft_head(sound, load_lm(str(world.target)))
    state, layers = stored_tensors(right), tuple(layer + 1 for layer in LAYERS)
    turned = next(other.state for other in other_weights(right.config, state) if "twice" in other.label)
    reversed_layers = {name: reversed_states(name, tensor, 3) for name, tensor in state.items()}
    planted: dict[str, tuple[Any, dict[str, Any]]] = {
        "none": (state, {}),
        "order of layers": (reversed_layers, {}),
        "switch": (state, {"norm_output": not right.config.norm_output}),
        "pairs of q and k, and layers": (turned, {"aux_layers": layers}),
    }
    weights, changes = planted[mistake]
    code, found = repaired(world, changed(world, sound, tmp_path / "head", weights, **changes), tmp_path / "out")
    out = capsys.readouterr().out
    assert code == 0 and out.count("WRONG") == {"none": 0}.get(mistake, 1 + mistake.count(" and layers"))
    assert ("Nothing to repair." in out) == (found is None) == (mistake == "none")
    if found is not None:
        assert found.config == right.config
        assert all(torch.equal(tensor, state[name]) for name, tensor in stored_tensors(found).items())


@pytest.mark.parametrize("served", [False, True])
def test_repair_of_another_systems_directory_says_what_its_files_should_hold(world, sound, tmp_path, capsys, served):
    """Also where a server runs the target: for the states, and for import, export and its check."""
    files, ids = tmp_path / "vllm", "eagle_aux_hidden_state_layer_ids"
    foreign(world, sound, files, "vllm")
    right = json.loads((files / "config.json").read_text())
    wrong = {**right, ids: [number + 1 for number in right[ids]]}
    (files / "config.json").write_text(json.dumps(wrong))
    capsys.readouterr()
    with StatesServer(load_lm(str(world.target)), (2, 3, 4, 5, 6, 7, 8, 9), tmp_path / "states") as server:
        more = {"server": server.url, "data": world.prompts} if served else {}
        code, found = repaired(world, files, tmp_path / "out", **more)
    assert bool(server.rows) == served
    assert code == 0 and found.config.aux_layers == LAYERS
    assert f"config.json {ids}: {wrong[ids]}, should be {right[ids]}" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "out" / "files" / "config.json").read_text())[ids] == right[ids]


def test_repair_of_a_gguf_file_names_its_settings(world, sound, tmp_path, capsys):
    files = tmp_path / "gguf"
    foreign(world, sound, files, "llamacpp")
    field = gguf.GGUFReader(files / "head.gguf", "r+").fields["eagle3.target_layers"]
    for place in field.data:
        field.parts[place][0] += 1
    capsys.readouterr()
    code, found = repaired(world, files, tmp_path / "out")
    assert code == 0 and found.config.aux_layers == LAYERS
    wrong = [layer + 1 for layer in LAYERS]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"CHANGED head.gguf eagle3.target_layers: {wrong}, should be {list(LAYERS)}" in shown


@pytest.mark.parametrize("format", ["vllm", "llamacpp"])
def test_repair_of_a_draft_vocabulary_in_the_other_convention(world, sound, tmp_path, capsys, format):
    """vLLM wants what is added to a drafted id, llama.cpp the id: servers draft other tokens, or refuse the file."""
    target, files = load_lm(str(world.target)), tmp_path / format
    whole = load_draft_head(sound, target)
    said = [row["input_ids"] for row in Rows(Manifest.read(world.responses)).iterate()]
    kept = torch.tensor(sorted({token for ids in said for token in ids}))
    state = {**stored_tensors(whole), "d2t": kept, "lm_head.weight": whole.lm_head.weight[kept]}
    head = changed(world, sound, tmp_path / "head", state, draft_vocab_size=len(kept))
    foreign(world, head, files, format)
    offsets = kept - torch.arange(len(kept))

    def stored(directory: Path) -> torch.Tensor:
        if format == "vllm":
            return load_file(directory / "model.safetensors")["d2t"]
        (tensor,) = (one for one in gguf.GGUFReader(directory / "head.gguf").tensors if one.name == "d2t")
        return torch.from_numpy(tensor.data.copy())

    right, wrong = (offsets, kept) if format == "vllm" else (kept, offsets)
    assert torch.equal(stored(files), right)
    if format == "vllm":
        save_file({**load_file(files / "model.safetensors"), "d2t": wrong}, files / "model.safetensors")
    else:
        (tensor,) = (one for one in gguf.GGUFReader(files / "head.gguf", "r+").tensors if one.name == "d2t")
        tensor.data[:] = wrong.numpy()
        tensor.data.base.flush()
    capsys.readouterr()
    code, found = repaired(world, files, tmp_path / "out")
    out = capsys.readouterr().out
    assert code == 0 and torch.equal(found.d2t, kept)
    assert "WRONG d2t: has" in out and out.count("WRONG") == 1
    assert torch.equal(stored(tmp_path / "out/files"), right)


@pytest.mark.parametrize("mistake", ["none", "mask token and layout"])
def test_repair_of_a_block_drafter(world, block_head, tmp_path, capsys, mistake):
    right = load_draft_head(block_head, load_lm(str(world.target)))
    changes = {} if mistake == "none" else {"mask_token": 3, "layout": "fill-in"}
    head = changed(world, block_head, tmp_path / "head", stored_tensors(right), **changes)
    code, found = repaired(world, head, tmp_path / "out")
    assert code == 0 and capsys.readouterr().out.count("WRONG") == len(changes)
    assert mistake == "none" or found.config == right.config


def test_repair_of_a_directory_that_is_only_read_leaves_the_repaired_head(world, block_head, tmp_path, capsys):
    """DeepSpec's own, by `num_anchors`: nothing writes it."""
    files = tmp_path / "deepspec"
    foreign(world, block_head, files, "sglang")
    fields = json.loads((files / "config.json").read_text())
    right = fields.pop("mask_token_id", None) or fields["dflash_config"].pop("mask_token_id")
    (files / "config.json").write_text(json.dumps({**fields, "num_anchors": 512, "mask_token_id": right - 1}))
    code, found = repaired(world, files, tmp_path / "out")
    shown = capsys.readouterr()
    assert code == 0 and found.config.mask_token == right and shown.out.count("WRONG") == 1
    assert "deepspec is only read" in shown.err and not (tmp_path / "out" / "files").exists()


def test_repair_returns_the_code_of_an_export_that_differs(world, sound, tmp_path, capsys, monkeypatch):
    files = tmp_path / "vllm"
    foreign(world, sound, files, "vllm")
    fields = json.loads((files / "config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    (files / "config.json").write_text(json.dumps({**fields, ids: [number + 1 for number in fields[ids]]}))
    # The export's own check finds a difference.
    monkeypatch.setattr("draftsmith.launch.export.export.hashes_of", lambda state: dict.fromkeys(state, "0123"))
    code, found = repaired(world, files, tmp_path / "out")
    assert code == 1 and found is not None and "CHANGED" not in capsys.readouterr().out
    assert not (tmp_path / "out" / "files").exists()


def test_repair_of_a_weak_head_says_that_it_is_weak(world, tmp_path, capsys):
    code, found = repaired(world, trained_head(world, tmp_path / "run", 8, ttt_steps=2, **WHOLE), tmp_path / "out")
    assert (code, found) == (1, None) and "a weak head" in capsys.readouterr().out


def test_a_draft_vocabulary_without_frequent_tokens(world, diagnosed, sound, tmp_path):
    target = load_lm(str(world.target))
    whole = load_draft_head(sound, target)
    counts = torch.zeros(target.info.vocab_size)
    for row in Rows(Manifest.read(world.responses)).iterate():
        counts += torch.bincount(torch.tensor(row["input_ids"])[row["loss_mask"].index(True) :], minlength=len(counts))
    kept = counts.argsort(descending=True)[5:].sort().values
    state = {**stored_tensors(whole), "d2t": kept, "lm_head.weight": whole.lm_head.weight[kept]}
    head = build_head("eagle3", dataclasses.replace(whole.config, draft_vocab_size=len(kept)), state)
    found = diagnosed(save_head(tmp_path / "head", head, {"target": target.info.identity}, "card"))
    assert found["verdict"].startswith("Likeliest cause (vocabulary): ")
    assert f"it cannot draft {1 - counts[kept].sum() / counts.sum():.1%} of" in found["vocabulary"]


def test_a_head_trained_on_one_pass(world, diagnosed, tmp_path):
    verdict = diagnosed(trained_head(world, tmp_path / "run", 70, ttt_steps=1, **WHOLE))["verdict"]
    assert verdict.startswith("Likeliest cause (depth): ") and "(ttt_steps was 1)" in verdict


@pytest.mark.parametrize("by", [-2, 1])
def test_a_mask_that_does_not_begin_behind_the_served_prompt(world, by):
    data = Manifest.read(world.responses)
    rows = list(Rows(data).iterate())
    moved = [{**row, "loss_mask": torch.tensor(row["loss_mask"]).roll(by).tolist()} for row in rows]
    finding = template(Checkpoint(world.target), moved, data)
    assert finding.lost == 1 and "<|assistant|>" in finding.advice
    other = dataclasses.replace(data, identity={**data.identity, "chat_template": "0123"})
    assert "another template" in template(Checkpoint(world.target), rows, other).advice
    own = data.identity["chat_template"]
    assert not template(Checkpoint(world.target), rows, data, own).lost
    assert "trained on another template" in template(Checkpoint(world.target), rows, data, "0123").advice


@pytest.mark.parametrize(
    ("metrics", "begins"),
    [
        # Each place counts rounds that accept all before it, too: 60 %, again 60 %, 55 %.
        ({"accepted_1": 0.6, "accepted_2": 0.36, "accepted_3": 0.198, "top1": 0.1}, ""),
        ({"accepted_1": 0.6, "accepted_2": 0.12}, "a later token"),
        ({"accepted_1": 0.4, "accepted_2": 0.3}, "the first token"),
        ({"top1": 0.4}, "the first token"),
        ({"loss": 1.0}, ""),
    ],
)
def test_bad_numbers_of_a_validation(metrics, begins):
    found = bad_numbers(metrics)
    assert found.startswith(begins) and bool(found) == bool(begins)


def test_a_training_with_bad_numbers_says_how_to_explain_them(world, tmp_path, capsys):
    train_and_explain(
        drafter_config("eagle3")(
            data=world.responses, target=str(world.target), output=tmp_path / "run", max_steps=2, batch_size=8,
            val_share=0.5, tau_prompts=0, loggers=("csv",), num_threads=1, layers=LAYERS,
        )
    )  # fmt: skip
    shown = capsys.readouterr().err
    assert "warning: the first token is accepted less often than 50%" in shown
    assert f"See why: draftsmith diagnose {tmp_path / 'run' / 'best'} --data=" in shown
