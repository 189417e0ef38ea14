"""What `draftsmith decode` shows: the right text in the right colors, whole characters only."""

from __future__ import annotations

import io
import random

import pytest
import torch
import transformers
from worlds import draft_options, draft_words, tiny_tokenizer

from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.eval.decode import DecodeConfig, TokenStream, choose_method
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.heads import drafter_identity, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm


def stream_all(tokenizer, tokens: list[int], size: int) -> str:
    stream, shown = TokenStream(tokenizer), []
    for start in range(0, len(tokens), size):
        shown += stream.push(tokens[start : start + size], 0)
    return "".join(piece for piece, _ in [*shown, *stream.finish()])


def test_any_tokens_stream_to_what_they_decode_to():
    """Random ids hold broken characters and special tokens; nothing may be lost, doubled or shown too early."""
    tokenizer = tiny_tokenizer()
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(20)]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert stream_all(tokenizer, tokens, 3) == whole


def test_a_character_is_shown_once_it_is_whole_with_the_color_of_its_last_token():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("☕", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 3  # three bytes, and this vocabulary has no token for the character
    stream = TokenStream(tokenizer)
    assert list(stream.push(tokens[:2], num_accepted=2)) == []
    assert list(stream.push(tokens[2:], num_accepted=0)) == [("☕", False)]
    ascii_tokens = tokenizer("ab", add_special_tokens=False)["input_ids"]
    pieces = list(stream.push(ascii_tokens, num_accepted=1))
    assert "".join(piece for piece, _ in pieces) == "ab" and pieces[0][1] is True


def test_a_lone_dash_reads_the_prompt_from_standard_input_without_a_byte_order_mark(models, capsys, monkeypatch):
    flags = [*draft_words({"target": models["target"]}), "--max-new-tokens", "8"]
    assert main(["decode", "What does it do?", *flags]) == 0
    answer = capsys.readouterr().out
    for words in (["-", *flags], [*flags, "-"], ["--prompt", "-", *flags]):
        monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffWhat does it do?"))
        assert main(["decode", *words]) == 0
        assert capsys.readouterr().out == answer


@pytest.mark.parametrize("method", ["ar", "specdec++", "eagle:k=2"])
def test_the_streamed_answer_is_the_targets(models, capsys, method):
    flags = draft_words({name: models[name] for name in ("target", "draft", "eagle", "acceptance")})
    flags += ["--method", method, "--max-new-tokens", "24", "--ignore-eos"]
    assert main(["decode", "What does it do?", *flags]) == 0
    captured = capsys.readouterr()
    tokenizer = load_chat_tokenizer(models["target"])
    ids = list(prompt_ids(tokenizer, [{"role": "user", "content": "What does it do?"}]))
    model = transformers.AutoModelForCausalLM.from_pretrained(models["target"])
    model.generation_config = transformers.GenerationConfig()
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert captured.out == tokenizer.decode(answer, skip_special_tokens=True) + "\n"
    assert f"{method}: drafted and accepted · the target's own\n" in captured.err
    assert "\n24 tokens (cut at the limit), tau " in captured.err


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ([], "ar"),
        (["draft"], "online"),
        (["eagle"], "online:drafter=eagle"),
        (["draft", "acceptance"], "specdec++"),
    ],
)
def test_the_method_follows_from_the_models_given(models, given, method):
    config = DecodeConfig("Hi", models["target"], **draft_options({name: models[name] for name in given}))
    assert choose_method(config).label == method


def test_a_head_is_used_with_the_drafter_that_it_was_trained_for(models, tmp_path):
    owner = load_lm(models["target"])
    manifest = {"target": drafter_identity(models["eagle"], owner), "drafter": "eagle"}
    of_eagle = save_head(tmp_path / "head", load_head(models["acceptance"]), manifest, "card")
    methods = {models["acceptance"]: "specdec++", str(of_eagle): "specdec++:drafter=eagle"}
    for directory, method in methods.items():
        config = DecodeConfig("Hi", models["target"], acceptance=directory, head=(models["draft"], models["eagle"]))
        assert choose_method(config).label == method
