"""Acceptance labels against SpecDec++'s formulas written again in float64, from transformers' logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds import padded, tiny_llama_dir, tiny_tokenizer

from draftsmith.data.labels import MixedTextLabels, label_positions
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import row_uniforms
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams

# float32 models and softmax against float64: logits differ by about 1e-5, log probabilities by a little more.
TOLERANCE = 1e-4


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Warped distribution of one position in float64."""
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()) / temperature)
    weights[top_k or len(weights) :] = 0
    weights /= weights.sum()
    weights[np.cumsum(weights) - weights >= top_p] = 0
    found = np.zeros(len(logits))
    found[order] = weights / weights.sum()
    return found


@pytest.fixture(scope="module")
def oracles(pair):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in pair]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": (0.7,), "top_k": 7, "chunk": 2}, {"temperature": (0.0,), "top_k": 0, "top_p": 1.0}],
)
def test_labels_are_the_papers_formulas(chain, remake, oracles, settings):
    directory = remake("acceptance", **settings) if settings else chain.directory("acceptance")
    manifest = Manifest.read(directory)
    (temperature,) = settings.get("temperature", (1.0,))
    top_k, top_p = settings.get("top_k", 40), settings.get("top_p", 0.95)
    warp = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert manifest.sampling == warp
    rows = Rows(directory, manifest).read(0, 99)
    responses = Rows(chain.directory("responses"), Manifest.read(chain.directory("responses")))
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in responses.iterate()]
    for number, row in enumerate(rows):
        ids, start = row["input_ids"], row["loss_mask"].index(True)
        uniforms = row_uniforms("acceptance", 0, number, len(ids) - start)
        p_logits, q_logits = (oracle(torch.tensor([ids])).logits[0].detach().numpy() for oracle in oracles)
        assert len(row["draft_ids"]) == len(ids) - start
        for j, drafted in enumerate(row["draft_ids"]):
            p, q = (distribution(logits[start + j - 1], **warp) for logits in (p_logits, q_logits))
            assert drafted == np.searchsorted(np.cumsum(q), uniforms[j], side="right")
            accept = min(1.0, p[drafted] / q[drafted])
            assert row["accept_prob"][j] == pytest.approx(accept, abs=TOLERANCE)
            assert row["overlap"][j] == pytest.approx(np.minimum(p, q).sum(), abs=TOLERANCE)
            with np.errstate(divide="ignore"):
                assert row["log_p"][j] == pytest.approx(np.log(p[drafted]), abs=TOLERANCE)
            assert row["log_q"][j] == pytest.approx(np.log(q[drafted]), abs=TOLERANCE)


def test_greedy_labels_are_exactly_agreement(chain, remake, oracles, tmp_path):
    draft = AutoModelForCausalLM.from_pretrained(chain.target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():  # the target with noise: it agrees now and then
        weight.data.add_(0.1 * torch.randn(weight.shape, generator=generator) * weight.std())
    draft.save_pretrained(tmp_path / "noisy")
    tiny_tokenizer().save_pretrained(str(tmp_path / "noisy"))
    directory = remake("acceptance", temperature=(0.0,), draft=str(tmp_path / "noisy"))
    oracles = [oracles[0], draft.double().eval()]
    kept = []
    for row in Rows(directory, Manifest.read(directory)).read(0, 99):
        ids, start = torch.tensor([row["input_ids"]]), row["loss_mask"].index(True)
        p_best, q_best = (oracle(ids).logits[0].argmax(-1)[start - 1 : -1].tolist() for oracle in oracles)
        agree = [float(a == b) for a, b in zip(p_best, q_best, strict=True)]
        assert row["draft_ids"] == q_best
        assert row["accept_prob"] == agree and row["overlap"] == agree
        assert row["log_p"] == [0.0 if same else -np.inf for same in agree]
        assert set(row["log_q"]) == {0.0}
        kept += agree
    assert 0 < sum(kept) < len(kept)  # both cases occurred


def test_labels_of_one_position_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]] * 3)
    q = torch.tensor([[0.25, 0.5, 0.0, 0.25]] * 3)
    labels = label_positions(p, q, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    assert labels["draft_ids"].tolist() == [0, 1, 3]
    torch.testing.assert_close(labels["accept_prob"], torch.tensor([1.0, 0.6, 0.0]))
    torch.testing.assert_close(labels["overlap"], torch.full((3,), 0.25 + 0.3))
    assert labels["log_p"].tolist()[2] == -torch.inf
    assert labels["accept_prob"].dtype == labels["log_p"].dtype == torch.float32


def test_p_averaged_over_drafts_is_the_overlap():
    """E_q[min(1, p/q)] = sum_v min(p, q), with the uniforms on an even grid instead of at random."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(50, generator=generator, dtype=torch.float64).pow(4) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    labels = label_positions(p.expand(20_000, -1), q.expand(20_000, -1), grid)
    # The grid is off by at most one point for each of 50 tokens.
    assert labels["accept_prob"].double().mean() == pytest.approx(float(torch.minimum(p, q).sum()), abs=50 / 20_000)


def test_only_a_chunk_of_positions_is_ever_scored(pair, monkeypatch):
    target, draft = (load_lm(str(path)) for path in pair)
    sizes = []
    for lm in (target, draft):
        head = lm.lm_head
        monkeypatch.setattr(lm, "lm_head", lambda h, head=head: (sizes.append(len(h)), head(h))[1])
    labels = MixedTextLabels(target, draft, SamplingParams(), 1, 6, 0)
    labels.label([[1, *range(50, 70)]], [[False, *[True] * 20]], torch.zeros(20))
    assert sizes == [6, 6, 6, 6, 6, 6, 2, 2]


def test_a_draft_whose_embedding_is_padded_has_the_labels_of_the_same_draft(chain, pair, remake, tmp_path):
    wide = padded(pair[1], tmp_path / "wide", 8)
    directories = chain.directory("acceptance"), remake("acceptance", draft=str(wide))
    ours, theirs = (Rows(each, Manifest.read(each)).read(0, 99) for each in directories)
    assert ours == theirs


def test_models_of_another_tokenizer_are_refused(remake, tmp_path):
    other = tiny_llama_dir(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|system|>", "<|boss|>"))
    with pytest.raises(InputError, match=r"draft: found .* with tokenizer \w+, expected the tokenizer of"):
        remake("acceptance", draft=str(other))
