"""Draft models: their first weights, their directory read by transformers, and exact resumption."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from eagle_trainings import QUICK
from safetensors.torch import load_file, save_file
from tiny_models import padded, tiny_llama_dir
from trained_runs import newest_state, weights

import draftsmith
from draftsmith.data import prompts, responses
from draftsmith.modules.drafters.draft_model import default_layers
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.callbacks import TauProbe
from draftsmith.train.checkpoints import FOLDER, all_in
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.prepare import make_head

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
    config = settings(artifacts, tmp_path, keep_layers=(0, 1), tau_k=3, tau_max_new_tokens=21)
    target = load_lm(str(artifacts.target))
    head = make_head(config, target)
    ids = torch.arange(30)[None]
    assert torch.equal(head.model(ids), target.model(ids))
    probe = TauProbe(target, [[3, 4, 5], [7, 8]], config, 1)
    # The prefill gives a token, and five rounds give four each.
    assert probe(head, torch.device("cpu"))["tau"] == pytest.approx(21 / 6)


def test_a_resumed_run_is_the_straight_one(artifacts, tmp_path):
    straight = tmp_path / "straight"
    run(settings(artifacts, straight))
    shutil.copytree(straight, tmp_path / "killed")
    shutil.rmtree(all_in(tmp_path / "killed" / FOLDER)[-1])
    (tmp_path / "killed" / "training.json").unlink()
    run(settings(artifacts, tmp_path / "killed"))
    ours, theirs = weights(tmp_path / "killed"), weights(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


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


def test_layers_that_the_target_does_not_have_are_refused(artifacts, tmp_path):
    with pytest.raises(InputError, match="keep_layers: found 0 5, expected ascending numbers from 0 to 1"):
        run(settings(artifacts, tmp_path / "run", keep_layers=(0, 5)))


def test_the_manifest_names_the_layers_that_it_began_as(artifacts, tmp_path):
    best = run(settings(artifacts, tmp_path / "run", max_steps=1, tau_prompts=0))
    assert json.loads((best / "manifest.json").read_text())["config"]["keep_layers"] == [0, 1]
    other = run(settings(artifacts, tmp_path / "next", max_steps=1, tau_prompts=0, init=str(best), keep_layers=(1,)))
    assert json.loads((other / "manifest.json").read_text())["config"]["keep_layers"] == [1]
