"""Models of one tokenizer whose embeddings are padded to different sizes draft for each other."""

from __future__ import annotations

import pytest
import torch
import transformers
from worlds import padded, tiny_llama_dir

from draftsmith.eval.bench.runner import load_smaller_lm
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

PROMPT = [5, 17, 250, 31, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target") / "model")


@pytest.mark.parametrize("rows", [16, -16])
@pytest.mark.parametrize("loading", [{}, {"packed": True}, {"loader": "hf"}], ids=["lean", "packed", "hf"])
def test_a_padded_draft_has_its_own_distribution_over_the_targets_tokens(target, tmp_path, loading, rows):
    path = padded(target, tmp_path / "draft", rows)
    lm = load_lm(str(target))
    draft = load_smaller_lm("draft", {"target": str(target), "draft": str(path)}, lm, 90, **loading)
    ids, size = torch.tensor([PROMPT]), lm.info.vocab_size
    with torch.no_grad():
        own = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits[..., :size]
        found = draft.lm_head(draft.features(ids)).softmax(-1)
    expected = torch.zeros(*ids.shape, size)
    expected[..., : own.shape[-1]] = own.softmax(-1)
    # Logits of order 10 through two float32 layers, whose sums are ordered differently.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert (found[..., own.shape[-1] :] == 0).all(), "a token that the draft does not have is never drawn"

    # The target may emit a token that the draft does not have, and never drafts one that itself lacks.
    session = draft.session(1, 90)
    session.extend([[*PROMPT, size - 1]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature)
        alone, drafted = (
            generate_one(lm, drafter, PROMPT, params, 60, TorchSource(0), ())
            for drafter in (None, parse_method("spec:k=3").build(Models(lm, draft, capacity=120)))
        )
        assert max(drafted.tokens) < size and drafted.trace.num_target_calls < 60
        assert temperature or drafted.tokens == alone.tokens
