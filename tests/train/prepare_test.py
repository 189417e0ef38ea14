"""What a head starts from, what it is trained on and what is saved: several kinds from their data to decoding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from trainings import QUICK, newest_state, weights
from worlds import padded, tiny_llama_dir

import draftsmith
from draftsmith.data import features, prompts, responses
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.draft_model import default_layers
from draftsmith.modules.drafters.eagle3 import Eagle3Head
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams
from draftsmith.train import prepare as preparing
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.module import LitHead
from draftsmith.train.prepare import make_head
from draftsmith.train.tau import TauProbe, answer_prompts

# -- draft models


SHORT = {name: value for name, value in QUICK.items() if name != "token_weight"}
SHORT |= {"max_steps": 6, "save_every": 3, "keep": 9, "tau_prompts": 1}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
}


def settings(artifacts, output, **changes):
    values = {"data": artifacts.responses, "target": str(artifacts.target), "output": output, **SHORT, **changes}
    return drafter_config("draft")(**values)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_was_trained(artifacts, tmp_path, family):
    target = tiny_llama_dir(tmp_path / "target", seed=3, layers=5, family=family, **FAMILIES[family])
    texts = prompts.PromptsConfig(
        str(artifacts.responses.with_name("prompts.jsonl")), str(target), tmp_path / "prompts", limit=12
    )
    prompts.run(texts)
    made = responses.ResponsesConfig(
        tmp_path / "prompts", str(target), tmp_path / "responses", max_new_tokens=24, num_threads=1
    )
    data = SimpleNamespace(target=target, responses=responses.run(made))
    tied = FAMILIES[family].get("tie_word_embeddings", False)
    run(settings(data, tmp_path / "run", keep_layers=(0, 2, 4), train_embeddings=tied, tokens_per_batch=256))

    trained = make_head(settings(data, tmp_path, keep_layers=(0, 2, 4)), load_lm(str(target)))
    begun = {name: weight.clone() for name, weight in trained.state_dict().items()}
    state = newest_state(tmp_path / "run")["state_dict"]
    trained.load_state_dict({name.removeprefix("head."): weight for name, weight in state.items()})
    ids = torch.arange(40)[None] % trained.config.vocab_size
    for name in ("best", "last"):
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "run" / name, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(theirs(ids).logits, trained.model(ids), rtol=0, atol=2e-4)
    moved = [name for name, weight in trained.state_dict().items() if not torch.equal(weight, begun[name])]
    assert ("model.embed_tokens.weight" in moved) == tied and any("layers.1" in name for name in moved)

    # Tokenizer and end tokens are the target's, and greedy answers with it are the target's own.
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (target, tmp_path / "run" / "best")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    large = draftsmith.load_target(str(target))
    plain, drafted = (
        draftsmith.generate(large, [5, 6, 7], drafter, max_new_tokens=24).tokens
        for drafter in (None, draftsmith.load_drafter(str(tmp_path / "run" / "best"), large, "spec:k=3"))
    )
    assert plain == drafted


def test_with_all_layers_it_is_the_target(artifacts, tmp_path):
    config = settings(artifacts, tmp_path, keep_layers=(0, 1))
    target = load_lm(str(artifacts.target))
    head = make_head(config, target)
    ids = torch.arange(30)[None]
    assert torch.equal(head.model(ids), target.model(ids))
    probe = TauProbe(target, (), 3, answer_prompts(target, None, [[3, 4, 5], [7, 8]]))
    # The prefill gives a token, and 16 rounds give four each, but for the last.
    assert probe(head, torch.device("cpu"))["tau"] == pytest.approx(64 / 17)


def test_any_model_of_the_tokenizer_can_be_distilled(artifacts, tmp_path):
    """The model may have another width than the target, and a trained draft can be trained further."""
    small = tiny_llama_dir(tmp_path / "small", seed=5, layers=1, hidden=16)
    best = run(settings(artifacts, tmp_path / "first", init=str(small)))
    again = make_head(settings(artifacts, tmp_path, init=str(best)), load_lm(str(artifacts.target)))
    stored = weights(tmp_path / "first", "best")
    assert again.config.hidden_size == 16 and again.config.kept == (0,)
    assert torch.equal(again.model.lm_head.weight, stored["lm_head.weight"])
    assert not torch.equal(
        again.model.layers[0].mlp.up_proj.weight, load_lm(str(small)).model.layers[0].mlp.up_proj.weight
    )


def test_a_draft_model_keeps_an_output_embedding_of_its_own_beside_a_tied_config(artifacts, tmp_path):
    small = tiny_llama_dir(tmp_path / "small", seed=5, layers=1, tie_word_embeddings=True)
    state = load_file(small / "model.safetensors")
    state["lm_head.weight"] = torch.randn(state["model.embed_tokens.weight"].shape)
    save_file(state, small / "model.safetensors", {"format": "pt"})
    begun = make_head(settings(artifacts, tmp_path, init=str(small)), load_lm(str(artifacts.target)))
    saved = save_head(tmp_path / "saved", begun, {}, "")
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)(ids).logits
        again = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)(ids).logits
    # Logits of order 10 through one float32 layer; with the embedding they are off by 10.
    torch.testing.assert_close(begun.model(ids), expected, atol=1e-4, rtol=0)
    assert torch.equal(again, expected)


def test_a_draft_model_padded_to_another_size_is_distilled_in_the_targets(artifacts, tmp_path):
    target, small = load_lm(str(artifacts.target)), tiny_llama_dir(tmp_path / "small", seed=5, layers=1)
    ids = torch.arange(5, 30)[None]
    for rows in (8, -8):
        wide = padded(small, tmp_path / f"wide{rows}", rows)
        begun = make_head(settings(artifacts, tmp_path, init=str(wide)), target)
        saved, oracle = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for path in (save_head(tmp_path / f"saved{rows}", begun, {}, ""), wide)
        )
        with torch.no_grad():
            logits, expected = saved(ids).logits, oracle(ids).logits
        common = min(expected.shape[-1], target.info.vocab_size)
        assert logits.shape[-1] == begun.config.llama.vocab_size == target.info.vocab_size
        assert torch.equal(logits[..., :common], expected[..., :common])


def test_by_default_one_of_six_layers_is_kept():
    layers = {count: default_layers(count) for count in (1, 2, 5, 16, 30)}
    assert layers == {1: (0,), 2: (0, 1), 5: (0, 4), 16: (0, 8, 15), 30: (0, 7, 14, 22, 29)}


def test_the_manifest_names_the_layers_that_it_began_as(artifacts, tmp_path):
    best = run(settings(artifacts, tmp_path / "run", max_steps=1, tau_prompts=0))
    assert json.loads((best / "manifest.json").read_text())["config"]["keep_layers"] == [0, 1]
    other = run(settings(artifacts, tmp_path / "next", max_steps=1, tau_prompts=0, init=str(best), keep_layers=(1,)))
    assert json.loads((other / "manifest.json").read_text())["config"]["keep_layers"] == [1]


# -- EAGLE-3, from supervised prompts of the embedded target


TARGET = "embedded:target"
EAGLE3 = {"max_steps": 3, "batch_size": 4, "val_share": 0.25, "val_every": 3, "log_every": 1, "loggers": ("csv",),
         "ttt_steps": 3, "tau_prompts": 1}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    root: Path = tmp_path_factory.mktemp("eagle3")
    texts = prompts.run(
        prompts.PromptsConfig(
            "embedded:prompts", TARGET, root / "texts", columns="prompt=prompt,answer=answer", split="train",
            tasks="sort_imports", limit=12, supervised=True,
        )
    )  # fmt: skip
    stored = features.run(features.FeaturesConfig(texts, TARGET, root / "features", drafter="eagle3", num_threads=1))
    return SimpleNamespace(root=root, texts=texts, features=stored)


def trained(made, name: str, **changes) -> Path:
    settings = {"data": made.features, "target": TARGET, "output": made.root / name, **EAGLE3, **changes}
    return run(drafter_config("eagle3")(**settings))


def test_features_are_the_three_states_and_the_final_one(made):
    target, manifest = load_lm(TARGET), Manifest.read(made.features)
    assert manifest.identity["target"]["layers"] == "2,6,9,13"
    row = open_dataset(made.features)[0]
    wanted = target.features(row["input_ids"][None], aux_layers=(2, 6, 9, 13))[0]
    assert row["features"].shape == wanted.shape == (len(row["input_ids"]), 4 * 128)
    assert torch.equal(row["features"], wanted.bfloat16())
    final = target.features(row["input_ids"][None])[0]
    assert torch.equal(wanted[:, -128:], final)


def test_a_head_with_a_reduced_vocabulary_is_trained_saved_and_lossless(made):
    best = trained(made, "reduced", draft_vocab=64)
    head = load_head(best)
    assert isinstance(head, Eagle3Head) and head.config.draft_vocab_size == 64
    target = load_lm(TARGET)
    rows = Rows(Manifest.read(made.texts))
    counts = torch.zeros(2048, dtype=torch.int64)
    data = open_dataset(made.features)
    for row in range(len(data)):
        item = data[row]
        counts += torch.bincount(item["input_ids"][item["loss_mask"]], minlength=2048)
    # All but the end tokens that are always there occur in the answers.
    assert counts[head.d2t].gt(0).float().mean() > 0.9
    assert set(target.info.eos_ids) <= set(head.d2t.tolist())
    assert torch.equal(head.lm_head.weight, target.model.lm_head.weight[head.d2t])  # frozen: the target's own rows
    prompt = next(iter(rows.read(0, 1)))["input_ids"][:20]
    drafter = ChainDrafter(head.net(target), FixedLengthStop(3), 64)
    source = TorchSource(0)
    plain, drafted = (
        generate_one(target, used, prompt, SamplingParams(), 24, source).tokens for used in (None, drafter)
    )
    assert plain == drafted


def test_a_head_is_fine_tuned_with_its_own_layers_and_vocabulary(made):
    first = trained(made, "first", draft_vocab=64, layers=(1, 4, 7), data=made.texts, tau_prompts=0)
    second = trained(made, "again", init=str(first), data=made.texts, tau_prompts=0, train_lm_head=True)
    second = second.parent / "last"  # best/ may hold the head that it began with
    before, again = load_head(first), load_head(second)
    assert again.config == before.config and again.config.aux_layers == (1, 4, 7)
    assert torch.equal(again.d2t, before.d2t)
    assert not torch.equal(again.lm_head.weight, before.lm_head.weight)
    # For another target its frozen rows are that one's; trained ones, and those of which nothing is known, stay.
    published = save_head(made.root / "published", before, {}, "card")
    other = load_lm(TARGET)
    other.model.lm_head.weight.data.mul_(1.25)
    for start, kept in ((first, None), (second, again), (published, before)):
        for train in (False, True):
            settings = {"data": made.texts, "target": TARGET, "output": made.root / "on", "init": str(start)}
            head = make_head(drafter_config("eagle3")(**settings, train_lm_head=train), other)
            rows = other.model.lm_head.weight[before.d2t] if kept is None else kept.lm_head.weight
            assert torch.equal(head.lm_head.weight, rows) and torch.equal(head.d2t, before.d2t)
            assert head.tied_to_target == (("lm_head.weight",) if kept is None and not train else ())


# -- Medusa


@pytest.mark.parametrize("lm_head", ["own", "target"])
def test_what_the_optimizer_holds_is_saved_and_the_target_stays_bit_equal(artifacts, tmp_path, monkeypatch, lm_head):
    """The published trainer moves the shared lm_head, and does not save it."""
    seen = {}
    make_head, optimizers = preparing.make_head, LitHead.configure_optimizers

    def watched_head(config, target, *counts):
        seen["target"] = target
        seen["before"] = {name: weight.clone() for name, weight in target.model.state_dict().items()}
        return make_head(config, target, *counts)

    def watched_optimizers(self):
        made = optimizers(self)
        seen["held"] = [weight for group in made.param_groups for weight in group["params"]]
        seen["named"] = {weight: name for name, weight in self.head.named_parameters()}
        return made

    monkeypatch.setattr(preparing, "make_head", watched_head)
    monkeypatch.setattr(LitHead, "configure_optimizers", watched_optimizers)
    own = {"num_heads": 2, "lm_head": lm_head, "tau_prompts": 2}
    quick = {name: value for name, value in QUICK.items() if name != "token_weight"}
    config = drafter_config("medusa")(
        data=artifacts.responses, target=str(artifacts.target), output=tmp_path, **{**quick, **own}
    )
    run(config)
    after = seen["target"].model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in seen["before"].items())
    saved = load_file(tmp_path / "last" / "model.safetensors")
    names = {seen["named"][weight] for weight in seen["held"]}
    assert names == set(saved) and len(names) == 2 * (2 + (lm_head == "own"))
    for weight in seen["held"]:  # and what is saved is what was trained
        assert torch.equal(saved[seen["named"][weight]], weight)
    head = load_head(tmp_path / "best", load_lm(str(artifacts.target)), kind="medusa")
    assert head.config.own_lm_head == (lm_head == "own")
    if lm_head == "own":
        start = seen["before"]["lm_head.weight"]
        assert not any(torch.equal(layer.weight, start) for layer in head.lm_heads)
