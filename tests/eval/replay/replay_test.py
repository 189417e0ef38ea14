"""Replays of rollouts count what the decoder itself counts, round by round."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_world import near_copy
from hand_rollouts import of_answer
from quick_heads import quick_eagle_head, varied_acceptance_head
from run_models import run_models
from tiny_models import CONTEXT, tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.replay import replay
from draftsmith.eval.replay.chains import ChainRecorder, LookupRecorder
from draftsmith.eval.replay.record import Recording, TargetAnswers, record_all
from draftsmith.eval.replay.recorded import HEAD, Recorded
from draftsmith.eval.replay.rollouts import ChainRollouts, TreeRollouts
from draftsmith.eval.replay.trees import TreeRecorder
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.trace import DecodeTrace, pool
from draftsmith.modules.drafters.eagle.head import Eagle2
from draftsmith.modules.drafters.methods import Models, parse_method, parse_methods
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()
DEPTH, TOPK, TREE_DEPTH, NGRAM = 9, 3, 3, 2
CHAINS = [
    "ar", "pld:k=3:ngram=2", "pld:k=8:ngram=2",
    "spec:k=1", "spec:k=4", "spec:k=9", "confidence:t=0.5:max=9", "confidence:t=0.9:min=3:max=6",
    "specdec++:h=0.6:max=9", "specdec++:h=0.3:min=1:max=7:calibrated=on", "self-verify:k=9",
    "eagle:k=1", "eagle:k=5", "specdec++:h=0.5:max=8:drafter=eagle", "confidence:t=0.5:max=8:drafter=eagle",
    "self-verify:k=6:drafter=eagle", "cost:c=0.1:max=7", "cost:c=0.2:max=9:drafter=eagle", "online:c=0.1:max=9",
    "online:c=0.3:by=max_q:max=6", "online:c=0.1:repeats=off:max=6:drafter=eagle",
]  # fmt: skip
ON_EMBEDDED = {
    "spec:k=4",
    "specdec++:h=0.3:min=1:max=7:calibrated=on",
    "self-verify:k=9",
    "online:c=0.1:max=9",
    "eagle:k=5",
    "pld:k=8:ngram=2",
}
TREES = ["eagle2:nodes=2:depth=1:topk=3", "eagle2:nodes=7:depth=2:topk=3", "eagle2:nodes=30:depth=3:topk=3"]


@dataclasses.dataclass
class World:
    """Models, prompts, and the rollouts of the target's answers."""

    models: Models
    prompts: list[BenchPrompt]
    new_tokens: int
    eos_ids: tuple[int, ...]
    chains: dict[str, ChainRollouts]
    trees: TreeRollouts
    lookups: ChainRollouts

    def decoded(self, name: str) -> list[DecodeTrace]:
        """By the production loop."""
        return self.decoded_by(parse_method(name).build(self.models))

    def decoded_by(self, drafter) -> list[DecodeTrace]:
        target = self.models.target
        prompts = [prompt.prompt_ids for prompt in self.prompts]
        how = (GREEDY, self.new_tokens, TorchSource(0), self.eos_ids)
        return [generate_one(target, drafter, prompt, *how).trace for prompt in prompts]

    def replayed(self, name: str) -> list[DecodeTrace]:
        recorded = Recorded(self.chains, {f"eagle2/{TOPK}": self.trees}, self.models, {NGRAM: self.lookups})
        (named,) = parse_methods(name)
        return recorded.traces(named)


def tree_recording(new_tokens: int, eos_ids: tuple[int, ...]) -> Recording:
    return Recording(GREEDY, TREE_DEPTH, new_tokens, 0, eos_ids)


def make_world(models: Models, prompts: list[BenchPrompt], new_tokens: int, eos_ids: tuple[int, ...]) -> World:
    how, heads = Recording(GREEDY, DEPTH, new_tokens, 0, eos_ids), {HEAD: models.acceptance}
    chains = {name: record_all(ChainRecorder(models, name, how, heads), prompts) for name in ("draft", "eagle")}
    trees = record_all(TreeRecorder(models, Eagle2(nodes=1, topk=TOPK), tree_recording(new_tokens, eos_ids)), prompts)
    lookups = record_all(LookupRecorder(TargetAnswers(models.target, how), how, NGRAM), prompts)
    return World(models, prompts, new_tokens, eos_ids, chains, trees, lookups)


@pytest.fixture(scope="module")
def embedded():
    """The shipped pair, and an EAGLE head that knows a little."""
    target, draft = load_lm("embedded:target"), load_lm("embedded:draft")
    prompts = read_prompts("embedded:prompts", "embedded:target", "dev", "rename,add_docstring", 2)
    answers = [generate_one(target, None, p.prompt_ids, GREEDY, 48, TorchSource(0)).tokens for p in prompts]
    rows = [[*p.prompt_ids, *answer][-80:] for p, answer in zip(prompts, answers, strict=True)]
    eagle = quick_eagle_head(target, rows, steps=25, batch_size=2)
    acceptance = varied_acceptance_head(target.info.hidden_size)
    models = run_models(target, draft, eagle=eagle, acceptance=acceptance, capacity=1024)
    return make_world(models, prompts, 48, target.info.eos_ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Contexts that end: the draft's in the middle of an answer, the target's where max_new_tokens asks for more; and
    an end token that the target goes on behind."""
    root = tmp_path_factory.mktemp("tiny")
    directory = tiny_llama_dir(root / "target", seed=3)
    draft = near_copy(directory, Path(root / "draft"), noise=0.1, max_position_embeddings=CONTEXT - 30)
    target = load_lm(str(directory))
    prompts = [BenchPrompt(str(n), [5 + (7 * i + 3 * n) % 200 for i in range(n)]) for n in (CONTEXT - 50, 150, 12)]
    answers = [generate_one(target, None, p.prompt_ids, GREEDY, 60, TorchSource(0), ()).tokens for p in prompts]
    rows = [[*p.prompt_ids, *answer][-70:] for p, answer in zip(prompts, answers, strict=True)]
    eagle = quick_eagle_head(target, rows, steps=80)
    draft_lm = load_lm(str(draft))
    models = run_models(target, draft_lm, eagle=eagle, acceptance=varied_acceptance_head(32), capacity=400)
    ends = [end_amid_agreement(draft_lm, p.prompt_ids, a) for p, a in zip(prompts[1:], answers[1:], strict=True)]
    return make_world(models, prompts, 60, tuple(ends))


def end_amid_agreement(draft, prompt: list[int], answer: list[int]) -> int:
    """A token of the answer's middle around which the draft agrees with the target."""
    logits = draft.lm_head(draft.features(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1])
    agrees = (logits.argmax(-1) == torch.tensor(answer)).tolist()
    return next(answer[i] for i in range(20, 58) if all(agrees[i : i + 2]) and answer[i] not in answer[:20])


@pytest.mark.parametrize(
    ("which", "name"),
    [(which, name) for which in ("embedded", "tiny") for name in (*CHAINS, *TREES)
     if which == "tiny" or name in ON_EMBEDDED or name == TREES[-1]],
)  # fmt: skip
def test_a_replay_is_the_decoders_trace(request, which, name):
    world = request.getfixturevalue(which)
    decoded = world.decoded(name)
    assert world.replayed(name) == decoded
    totals = pool(decoded)
    if name == "ar":
        return
    # The drafts were right in part and wrong in part, or this would show little.
    assert 0 < totals.num_accepted < totals.num_draft_tokens


def test_the_tiny_world_meets_the_ends_it_is_made_for(tiny):
    rollouts = tiny.chains["draft"]
    assert {answer.ended for answer in rollouts.answers} == {True, False}
    assert rollouts.available().min() == 0 < rollouts.available().max() == DEPTH
    assert rollouts.answers[0].room == 50 < tiny.new_tokens
    assert rollouts.past_end.sum() > 0


def test_the_oracle_discards_nothing_and_calls_the_target_once_a_disagreement(embedded):
    """Lemma 2.1 of SpecDec++, its count taken position by position: where does the draft's own choice after the
    target's text differ from the text?"""
    rollouts = embedded.chains["draft"]
    for number, trace in enumerate(replay.replay(rollouts, replay.oracle(rollouts))):
        own = of_answer(rollouts, number)
        differs = own.token[:, 0] != own.answers[0].tokens[1:]
        *runs, last = map(len, "".join("x" if differ else "." for differ in differs).split("x"))
        # A draft of at most K tokens also ends a round in every K + 1 tokens of agreement.
        more = sum(run // (DEPTH + 1) for run in runs) + max(0, -(-last // (DEPTH + 1)) - 1)
        assert trace.num_discarded == 0
        assert trace.num_target_calls == 1 + differs.sum() + (last > 0) + more


def test_what_is_known_of_drafted_tokens(embedded):
    rollouts = embedded.chains["draft"]
    verified = rollouts.verified()
    texts = [answer.tokens for answer in rollouts.answers]
    for row in range(0, len(rollouts.start), 7):
        text = texts[rollouts.answer[row]][rollouts.start[row] :]
        same = [a == b for a, b in zip(rollouts.token[row], text, strict=False)]
        accepted = (same + [False]).index(False)
        assert rollouts.num_accepted[row] == accepted
        expected = [1.0] * accepted + [0.0] * (len(same) > accepted)
        assert rollouts.accept_prob[row, verified[row]].tolist() == expected[:DEPTH]
    drafted = rollouts.token >= 0
    assert (rollouts.log_q[drafted] == rollouts.log_max_q[drafted]).all()  # greedy drafts are the argmax
    # The entropy lies between that of the most and of the least spread distribution with this maximum.
    largest = np.exp(rollouts.log_max_q[drafted])
    spread = -largest * np.log(largest) - (1 - largest) * np.log(np.maximum(1 - largest, 1e-300) / 2047)
    assert (rollouts.entropy[drafted] <= spread + 1e-3).all() and (rollouts.entropy[drafted] >= -1e-6).all()


def test_head_logits_are_those_of_the_state_that_has_read_the_token(embedded):
    """Against the draft's own teacher-forced states."""
    rollouts, draft = embedded.chains["draft"], embedded.models.draft
    answer, prompt = rollouts.answers[0], embedded.prompts[0]
    for row in (0, 20):
        drafted = rollouts.token[row].tolist()
        ids = [*prompt.prompt_ids, *answer.tokens[: rollouts.start[row]], *drafted]
        states = draft.features(torch.tensor([ids]))[0, -DEPTH:]
        expected = embedded.models.acceptance(states).tolist()
        assert rollouts.heads[HEAD][row] == pytest.approx(expected, abs=1e-3)
