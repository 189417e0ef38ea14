"""Acceptance labels by SpecDec++'s formulas and of rounds: against float64 of transformers' logits, and enumerated."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import rows_of
from oracles.acceptance import drawn, token_labels
from oracles.tables import PROMPT, LogitTable, V, enumerate_branches
from transformers import AutoModelForCausalLM
from worlds import padded, tiny_llama_dir

from draftsmith.data import acceptance
from draftsmith.data.labels import MixedTextLabels, Rollouts, label_tokens, reached
from draftsmith.data.store.datasets import collate_rollouts, open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, row_uniforms
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.branches import BranchDrafter, BranchedText, target_states
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.heads import FrozenDrafter, drafter_identity, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams

DEPTH, STRIDE = 3, 2
# Both sides compute in float64, but transformers rotates and normalizes in float32, as the artifact stores.
TOLERANCE = {"rel": 1e-5, "abs": 1e-5}


def text_row(ids, prompt_length):
    mask = [at >= prompt_length for at in range(len(ids))]
    return {"id": "a", "input_ids": ids, "loss_mask": mask, "turn": 1, "task": None}


def settings(**changes) -> Rollouts:
    plain = {"target": None, "drafter": None, "depth": 2, "stride": 1, "chunk": 100, "seed": 0, "context": 64}
    return Rollouts(**{**plain, "params": SamplingParams(1.0), **changes})


def labeled(chain, params: SamplingParams) -> list[dict[str, Any]]:
    """Label drafts of the chain's draft model along its responses."""
    target, draft = (load_lm(str(path), dtype="float64") for path in (chain.target, chain.draft))
    responses = chain.directory("responses")
    source = Rows(Manifest.read(responses), limit=5)
    how = {"drafter": FrozenDrafter(draft, {}), "depth": DEPTH, "stride": STRIDE, "chunk": 4}
    made = settings(target=target, params=params, context=target.info.max_position, **how)
    rows = made.label_shard(source, Shard(0, 0, len(source)), lambda count: None).rows
    return [{name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in row.items()} for row in rows]


@pytest.fixture
def eagle_labels(chain, remake, tmp_path) -> tuple[Path, str]:
    """Labels of a random EAGLE head's chains at temperature 1, and the head."""
    target = load_lm(str(chain.target), dtype="float64")
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config))
    saved = str(save_head(tmp_path / "head", head, {"target": target.info.identity}, "card"))
    changes = {"head": saved, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "dtype": "float64", "limit": 5}
    return remake("acceptance", depth=DEPTH, stride=STRIDE, **changes), saved


@pytest.fixture(scope="module")
def oracles(pair):
    """Logits [len(ids), V] of what follows each of some ids, of the target and of the draft."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in pair]

    def logits(ids):
        with torch.inference_mode():
            return [model(torch.tensor([ids])).logits[0] for model in models]

    return logits


def drafts_of(row):
    """(number, start, text up to the draft and the draft) of each."""
    for number, start in enumerate(row["starts"]):
        yield number, start, row["input_ids"][:start] + row["draft_ids"][number * DEPTH : (number + 1) * DEPTH]


@pytest.mark.parametrize("params", [SamplingParams(0.5, 9, 0.95), SamplingParams()], ids=["sampled", "greedy"])
def test_labels_of_rounds_are_those_drafted_one_token_at_a_time(chain, oracles, params):
    rows = labeled(chain, params)
    for number, row in enumerate(rows):
        first, length = row["loss_mask"].index(True) + 1, len(row["input_ids"])
        uniforms = row_uniforms("rollouts", 0, number, 99)
        offset = int(uniforms[0] * min(STRIDE, length - first))
        assert row["starts"] == list(range(first + offset, length, STRIDE))
        for draft, start, ids in drafts_of(row):
            distributions, reach = oracles(ids), 1.0
            for at in range(draft * DEPTH, (draft + 1) * DEPTH):
                place = start + at % DEPTH
                p_logits, q_logits = (logits[place - 1] for logits in distributions)
                assert ids[place] == drawn(q_logits, params, uniforms[1 + at])
                labels = token_labels(p_logits, q_logits, ids[place], params)
                found = {name: row[name][at] for name in (*labels, "reached")}
                assert found == pytest.approx({**labels, "reached": reach}, **TOLERANCE), (number, at)
                reach *= labels["accept_prob"]
    assert len({row["starts"][0] - row["loss_mask"].index(True) for row in rows}) == STRIDE


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, 2)])
def test_labels_give_the_distribution_of_how_many_tokens_the_decoder_accepts(params):
    """Every draft enumerated: sum_y q(y_1) q(y_2 | y_1) P_1 P_2 is the chance that a round accepts both."""
    target, draft = LogitTable(0), LogitTable(1)
    rounds: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    class Done(Exception):
        """The first round is over."""

    def decode(source):
        seen = []

        def watch(done):
            seen.append(done)
            if len(seen) == 2:  # the prefill, then the round
                raise Done

        try:
            drafter = ChainDrafter(DraftModelNet(draft), FixedLengthStop(2), 32)
            generate_one(target, drafter, PROMPT, params, 9, source, (), DecodeOptions(watch))
        except Done:
            pass
        return seen[0].tokens[0], seen[1].num_accepted

    for (first, accepted), weight in enumerate_branches(decode):
        rounds[first][accepted] += weight
    assert len(rounds) > 1
    drafts = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    for first, counts in rounds.items():
        text, starts = [*PROMPT, first], [len(PROMPT) + 1] * len(drafts)
        drafter = BranchDrafter(DraftModelNet(draft), 2)
        drafter.open(text)
        own = drafter.states(starts, drafts)[:, :-1].flatten(0, 1)
        branched = BranchedText(target, 2)
        branched.open(text)
        states = target_states(branched, starts, drafts).flatten(0, 1)
        labels = label_tokens(states, own, params, drafts.flatten())
        q, kept = labels["log_q"].exp().view(-1, 2), labels["accept_prob"].view(-1, 2)
        possible = q[:, 0] * q[:, 1] > 0
        weights = q.prod(1)[possible]
        total = sum(counts.values())
        # Labels are kept in float32.
        assert float((weights * kept[possible, 0]).sum()) == pytest.approx((counts[1] + counts[2]) / total, abs=1e-6)
        assert float((weights * kept[possible].prod(1)).sum()) == pytest.approx(counts[2] / total, abs=1e-6)


def test_what_lies_behind_a_rejection_or_an_end_token_is_not_reached():
    accept = torch.tensor([[0.5, 0.4, 0.0, 1.0], [1.0, 1.0, 0.5, 1.0]])
    drafted = torch.tensor([[7, 8, 9, 6], [7, 4, 9, 6]])
    expected = [[1.0, 0.5, 0.2, 0.0], [1.0, 1.0, 0.0, 0.0]]  # 4 ends the answer
    torch.testing.assert_close(reached(accept, drafted, (4, 5)), torch.tensor(expected))


def test_drafts_begin_where_the_decoder_may_and_end_within_the_context():
    rollouts = settings(depth=3, stride=4, context=20)

    def mask(length, prompt_length):
        return text_row([0] * length, prompt_length)["loss_mask"]

    # The first draft follows the answer's first token, the last one has room for three.
    assert rollouts.starts(mask(30, 5), 1, 0.0) == [6, 10, 14]
    assert rollouts.starts(mask(30, 5), 1, 0.76) == [9, 13, 17]
    assert rollouts.starts(mask(8, 5), 1, 0.99) == [7]  # fewer tokens than the stride: still one
    assert rollouts.starts(mask(6, 5), 1, 0.5) == []  # an answer of one token
    assert rollouts.starts(mask(30, 17), 1, 0.0) == []
    assert rollouts.starts(mask(30, 0), 2, 0.0) == [2, 6, 10, 14]  # an EAGLE head needs two tokens
    two = [2 <= at < 6 or 10 <= at < 15 for at in range(18)]  # drafts may begin at 3, 4, 5 and at 11, 12, 13, 14
    assert rollouts.starts(two, 1, 0.0) == [3, 12]
    assert rollouts.starts(two, 1, 0.5) == [5, 14]


class Source:
    """Rows that were never written, of (length, prompt length)."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def read(self, start, stop):
        return [text_row([i % V] * length, prompt) | {"id": str(i)} for i, (length, prompt) in enumerate(self.sizes)]


def test_responses_without_room_are_left_out_and_counted():
    advanced = []
    rollouts = settings(target=LogitTable(0), drafter=FrozenDrafter(LogitTable(1), {}), depth=4, context=8)
    # Of the second the first token is all there is; four tokens more than the third's first one are too many.
    source = Source((8, 2), (3, 2), (8, 4), (4, 2))
    content = rollouts.label_shard(source, Shard(0, 0, 4), advanced.append)
    assert {row["id"]: row["starts"] for row in content.rows} == {"0": [3, 4], "3": [3]}
    assert content.counts == {"tokens": 12, "drafts": 3, "drafted_tokens": 12, "too_short_dropped": 2}
    assert sum(advanced) == 4
    with pytest.raises(InputError, match="row 7: found 9 tokens, expected at most 8, the context"):
        rollouts.label_shard(Source((3, 2), (9, 2)), Shard(2, 6, 8), advanced.append)


def test_an_eagle_heads_chains_are_labeled_by_its_target(chain, oracles, eagle_labels):
    directory, saved = eagle_labels
    manifest = Manifest.read(directory)
    assert manifest.kind == "rollouts" and manifest.sampling == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert manifest.identity["draft"] == drafter_identity(saved, load_lm(str(chain.target), dtype="float64"))
    for row in rows_of(directory):
        for number, start, ids in drafts_of(row):
            distributions = oracles(ids)[0].log_softmax(-1)
            for depth, at in enumerate(range(number * DEPTH, number * DEPTH + DEPTH)):
                log_p = float(distributions[start + depth - 1, row["draft_ids"][at]])
                assert row["log_p"][at] == pytest.approx(log_p, **TOLERANCE)
                assert row["accept_prob"][at] == pytest.approx(
                    min(1.0, math.exp(log_p - row["log_q"][at])), **TOLERANCE
                )


def test_a_sample_is_a_response_with_its_drafts(eagle_labels):
    rows, data = rows_of(eagle_labels[0]), open_dataset(eagle_labels[0], seed=3)
    assert len(data) == len(rows) and data.name(3) == rows[3]["id"]
    assert data.lengths[2] == len(rows[2]["input_ids"])
    batch = collate_rollouts([data[4], data[1]])
    assert [ids.tolist() for ids in batch.input_ids.split(batch.lengths)] == [rows[i]["input_ids"] for i in (4, 1)]
    assert batch.starts == (tuple(rows[4]["starts"]), tuple(rows[1]["starts"]))
    for name in ("draft_ids", "accept_prob", "log_q"):
        values = getattr(batch, name)
        assert values.shape == (sum(map(len, batch.starts)), DEPTH)
        assert values.flatten().tolist() == rows[4][name] + rows[1][name]


def test_a_token_counts_as_often_as_a_round_verifies_it(eagle_labels):
    rows, data = rows_of(eagle_labels[0]), open_dataset(eagle_labels[0])
    reached, epochs = torch.tensor([x for row in rows for x in row["reached"]]), 400
    masks = torch.stack([torch.cat([data.item(i, epoch)["loss_mask"] for i in range(len(data))])
                         for epoch in range(epochs)])  # fmt: skip
    # A draft counts from its beginning to some token.
    assert (masks[..., 1:] <= masks[..., :-1]).all() and masks[..., 0].all()
    # Five standard deviations of a binomial count, of some 50 tokens.
    error = 5 * (reached * (1 - reached) / epochs).sqrt()
    assert ((masks.flatten(1).float().mean(0) - reached).abs() <= error + 1e-6).all()
    assert torch.equal(data.item(1, 7)["loss_mask"], data.item(1, 7)["loss_mask"])


def test_labels_are_for_the_temperature_of_the_responses(remake):
    labels = Manifest.read(remake("acceptance", data=remake("responses", temperature=0.0)))
    assert labels.sampling is not None and labels.sampling["temperature"] == 0


# -- labels of mixed text

# float32 models and softmax against float64: logits differ by about 1e-5, log probabilities by a little more.
CLOSE = 1e-4


def check_mixed(directory: Path, oracles, params: SamplingParams) -> None:
    """Compare all labels with those of the logits that `oracles` gives of some ids."""
    for number, row in enumerate(Rows(Manifest.read(directory)).read(0, 99)):
        ids, start = row["input_ids"], row["loss_mask"].index(True)
        uniforms, (p_logits, q_logits) = row_uniforms("acceptance", 0, number, len(ids) - start), oracles(ids)
        assert len(row["draft_ids"]) == len(ids) - start
        for j, token in enumerate(row["draft_ids"]):
            p, q = p_logits[start + j - 1], q_logits[start + j - 1]
            assert token == drawn(q, params, uniforms[j])
            labels = token_labels(p, q, token, params)
            assert {name: row[name][j] for name in labels} == pytest.approx(labels, abs=CLOSE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_k": 7}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}],
)
def test_labels_are_the_papers_formulas(chain, remake, oracles, settings, monkeypatch):
    monkeypatch.setattr(acceptance, "CHUNK", 2)
    directory = remake("acceptance", **settings) if settings else chain.directory("acceptance")
    manifest = Manifest.read(directory)
    warp = {"temperature": 1.0, "top_k": 40, "top_p": 0.95} | settings
    assert manifest.sampling == warp
    responses = Rows(Manifest.read(chain.directory("responses")))
    rows = Rows(manifest).read(0, 99)
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in responses.iterate()]
    check_mixed(directory, oracles, SamplingParams(**warp))


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
    directories = chain.directory("acceptance"), remake("acceptance", head=str(wide))
    ours, theirs = (Rows(Manifest.read(each)).read(0, 99) for each in directories)
    assert ours == theirs


def test_models_of_another_tokenizer_are_refused(remake, tmp_path):
    other = tiny_llama_dir(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|system|>", "<|boss|>"))
    with pytest.raises(InputError, match=r"head: found .* with tokenizer \w+, expected the tokenizer of"):
        remake("acceptance", head=str(other))
