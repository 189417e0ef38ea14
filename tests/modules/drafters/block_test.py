"""Block drafters: their passes against plain torch, their loss against its formula, and what cuts their drafts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from oracles import drafts
from oracles.heads import PlainBlock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput
from worlds import in_rows, quick_block_head, run_models, tiny_llama_dir

from draftsmith.eval.check.states import answered_prompts
from draftsmith.modules.decoding.loop import DecodeOptions, Round, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop, SlotConfidenceStop
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.block import net
from draftsmith.modules.drafters.block.head import Blocks
from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config, default_layers, layers_like
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.engine import cache
from draftsmith.modules.formats import formats
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.losses import compare_blocks, sampled_columns
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import FeatureBatch, SamplingParams

HEADS = {
    "dflash": {"layout": "fill-in"},
    "dflash2": {"layout": "fill-in", "conv_kernel": 2, "conv_group": 2, "selector_rank": 5, "selector_top_k": 3},
    "wide": {
        "layout": "fill-in",
        "conv_kernel": 3,
        "conv_group": 1,
        "selector_rank": 5,
        "window": 7,
        "selector_top_k": 4,
    },
    "vanilla": {"markov_rank": 5, "confidence": True},
    "gated": {"markov_rank": 5, "markov_type": "gated", "confidence": True, "layout": "fill-in"},
    "rnn": {"markov_rank": 5, "markov_type": "rnn", "confidence": True},
    "windowed": {"markov_rank": 5, "confidence": True, "window": 7},
    "reduced": {"markov_rank": 5, "confidence": True, "share": 0.6},
    "reduced fill-in": {"layout": "fill-in", "share": 0.6},
    "causal": {"markov_rank": 5, "confidence": True, "causal": True},
    "mixed": {"layout": "fill-in", "window": 7, "full_layers": (0,)},
    "mixed2": {
        "layout": "fill-in",
        "conv_kernel": 2,
        "conv_group": 2,
        "selector_rank": 5,
        "selector_top_k": 3,
        "window": 7,
        "full_layers": (1,),
        "causal": False,
    },
}
LAYERS, SLOTS, MASK = 4, 6, 7
FIRST = TrainStep(0, 1, (11, 8), (1, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> LlamaLM:
    lm: Any = load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("target"), layers=LAYERS, vocab=300)))
    return LlamaLM(lm.model.double(), lm.info)


def config_of(llama: LlamaConfig, layers: tuple[int, ...], slots: int, mask: int, name: str) -> BlockConfig:
    shape = dict(HEADS[name])
    made = DFlash2Config if "selector_rank" in shape else BlockConfig
    if "share" in shape:
        shape["draft_vocab_size"] = int(shape.pop("share") * llama.vocab_size)
    return made(layers_like(llama, 2, shape.pop("window", None)), layers, slots, mask, **shape)


def kind_of(config: BlockConfig) -> str:
    return "dspark" if config.markov_rank else "dflash2" if config.selector_rank else "dflash"


def random_head(config: BlockConfig, seed: int, std: float) -> Any:
    """Random everywhere: what a new one has of zeros would hide mistakes."""
    torch.manual_seed(seed)
    head: Any = head_class(kind_of(config))(config).double()
    for weight in head.parameters():
        weight.data.normal_(std=std)
    if config.draft_vocab_size is not None:
        head.use_draft_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return head


@pytest.fixture(params=HEADS)
def head(request, target) -> Any:
    return random_head(config_of(target.config, (1, 3), SLOTS, MASK, request.param), 3, 0.4)


def plain(head: Any, target: Any) -> PlainBlock:
    return PlainBlock(head.state_dict(), head.config, target.model.embed_tokens.weight, target.model.lm_head.weight)


def batch_of(head: Any, target: Any, packed: bool = False) -> FeatureBatch:
    """Two texts of 11 and 8 tokens, the ends of which are answers with a gap."""
    torch.manual_seed(5)
    ids, places = torch.randint(300, (2, 11)), torch.arange(11)
    features = target.features(ids, aux_layers=head.loss_layers(head.config, LAYERS))
    return drafts.batch_of(ids, features, (places > 2) & (places != 9), (11, 8), packed)


@pytest.mark.parametrize("shared", [True, False])
def test_a_training_pass_computes_each_block_as_if_it_were_alone(head, target, shared, monkeypatch):
    """shared: heads share keys in the kernel, as on a CPU, or each gets a copy, as on a GPU."""
    monkeypatch.setattr(cache, "takes_shared", lambda tensor: shared)
    monkeypatch.setattr(net, "GROUP_SLOTS", 2 * SLOTS)
    settings, config = head.Settings(anchors=100), head.config
    for packed in (False, True):
        batch = batch_of(head, target, packed)
        blocks = Blocks.of(batch, settings, config, None)
        ids, features = batch.input_ids.flatten(), batch.features.flatten(0, 1)
        slots = torch.full((len(blocks.anchors), SLOTS), MASK)
        slots[:, 0] = ids[blocks.anchors]
        width = config.hidden_size
        found = head(target.embed(slots), features[:, :-width], blocks.documents)
        number = 0
        for own in blocks.documents:
            for anchor in own.anchors.tolist():
                states = features[own.start : own.start + anchor, :-width]
                wanted = plain(head, target).slots(int(ids[own.start + anchor]), states, SLOTS)
                # Rotations are in float32, and random weights magnify what that gives.
                assert torch.allclose(found[number], wanted, atol=1e-7)
                number += 1
        # Answers are at 3..8 and 10 of the first text, at 3..7 of the second.
        assert number == len(found) == 5 + 4


def test_spans_of_a_batch_add_up_to_it(head, target):
    """Loss, gradients, sums and counts: parts of one text, of which some have no block, and whole texts together."""
    batch, settings, found = batch_of(head, target, packed=True), head.Settings(anchors=4), []
    for spans in ([None], [(0, 3), (3, 6), (6, 11), (11, 19)], [(0, 19)]):
        head.zero_grad()
        steps = [dataclasses.replace(FIRST, span=span) for span in spans]
        outputs = [head.loss(batch, target, settings, step) for step in steps]
        loss = sum(output.loss for output in outputs)
        loss.backward()
        names = [(kind, name) for kind in ("sums", "counts") for name in outputs[-1].sums]
        zero = torch.zeros(())
        totals = [sum(getattr(out, kind).get(name, zero).double() for out in outputs) for kind, name in names]
        gradients = [weight.grad.clone() for weight in head.parameters() if weight.requires_grad]
        found.append([loss, *totals, *gradients])
    for whole, *others in zip(*found, strict=True):
        assert all((whole - other).abs().max() < 1e-9 for other in others)


# Columns of the vocabulary are drawn for a Markov head, a selector, and neither; of a reduced one there are all.
SAMPLED = ("vanilla", "dflash2", "dflash", "reduced")


@pytest.mark.parametrize(
    ("head", "size"), [*((name, 0) for name in HEADS), *((name, 80) for name in SAMPLED)], indirect=["head"]
)
def test_the_loss_is_its_formula_and_so_is_its_gradient(head, target, size, monkeypatch):
    """Token by token over plain logits in float64, and numerically: every weight's gradient along a direction."""
    monkeypatch.setattr("draftsmith.modules.losses.CHUNK_ELEMENTS", 3 * (size or 300))  # several chunks
    batch, config, width = batch_of(head, target), head.config, head.config.hidden_size
    weighting = {"selector_weight": 0.7} if config.selector_rank else {}
    settings_type = type("Weighted", (head.Settings,), {"ce_weight": 0.3, "l1_weight": 0.6})
    settings = settings_type(**weighting, decay=3.0, loss_vocab=size)
    output = head.loss(batch, target, settings, FIRST)
    oracle, total, blocks = plain(head, target), 0.0, 0
    tokens, log_counts = oracle.ids, torch.zeros(len(oracle.ids))
    if size and config.draft_vocab_size is None:
        # Answers are at 3..8 and 10 of the first text, at 3..7 of the second.
        known = torch.cat([batch.input_ids[0, 4:9], batch.input_ids[1, 4:8]])
        states = torch.cat([batch.features[0, 3:8, -width:], batch.features[1, 3:7, -width:]])
        tokens, log_counts = sampled_columns(target.lm_head, states, known, size, torch.Generator().manual_seed(1))

    decay = torch.exp(-torch.arange(config.drafts).double() / 3.0)
    for ids, features, mask, length in zip(batch.input_ids, batch.features, batch.loss_mask, (11, 8), strict=True):
        for anchor in range(1, length - 1):
            if not (mask[anchor] and mask[anchor + 1]):
                continue
            blocks += 1
            states, losses = features[:anchor, :-width], []
            for j in range(config.drafts):
                label = anchor + 1 + j
                if label >= length or not mask[label]:
                    break
                # Teacher forcing: the plain draft's tokens are replaced by the text's.
                logits, odds, h = forced(oracle, ids[anchor : label + 1].tolist(), states, j)
                q = (logits[tokens] + log_counts).softmax(0)
                wanted = target.lm_head(features[label - 1, -width:])
                p = (wanted[tokens] + log_counts).softmax(0)
                apart = (p - q).abs().sum()
                known = tokens == ids[label]
                place = int(known.nonzero() if known.any() else p.argmax())
                own = 0.3 * -q[place].log() + 0.6 * apart
                own = own + 0.7 * selection(
                    oracle, logits, h, int(ids[label - 1]), tokens, features[label - 1, -width:]
                )
                if odds is not None:
                    sure = torch.sigmoid(odds)
                    share = 1 if config.draft_vocab_size is None else wanted.softmax(0)[tokens].sum()
                    accept = torch.minimum(p * share, q).sum().detach()
                    own = own - (accept * sure.log() + (1 - accept) * (1 - sure).log())
                losses.append(own)
            total = total + sum(weight / decay.sum() * own for weight, own in zip(decay, losses, strict=False))
    assert blocks == int(output.counts["loss"]) == 9
    assert output.loss.item() == pytest.approx(float(total) / blocks, rel=1e-9)
    # What a confidence head learns is a constant for the gradient.
    outcomes = []

    def with_first_outcome(*args: Any) -> Any:
        compared = compare_blocks(*args)
        outcomes.append(compared.accepted)
        return compared._replace(accepted=outcomes[0])

    monkeypatch.setattr("draftsmith.modules.drafters.block.head.compare_blocks", with_first_outcome)
    head.loss(batch, target, settings, FIRST).loss.backward()
    for name, weight in ((name, weight) for name, weight in head.named_parameters() if name != "lm_head.weight"):
        torch.manual_seed(1)
        direction, step = torch.randn_like(weight), 1e-6
        values = []
        for sign in (1, -1):
            weight.data += sign * step * direction
            values.append(head.loss(batch, target, settings, FIRST).loss.item())
            weight.data -= sign * step * direction
        along = float((weight.grad * direction).sum())
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(along, rel=1e-4, abs=1e-4), name


def selection(oracle: PlainBlock, logits: Tensor, h: Tensor, previous: int, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of a selector with the target's first choice, which is the last of its K candidates if it is none.
    tokens: of the vocabulary over which the loss is computed."""
    if not oracle.config.selector_rank:
        return torch.zeros(())
    first = int(tokens[(wanted @ oracle.output.T)[tokens].argmax()])
    ranked = sorted(tokens.tolist(), key=lambda token: -float(logits[token]))[: oracle.config.selector_top_k]
    if first not in ranked:
        ranked[-1] = first
    scores = (logits + oracle.edges(h, previous))[ranked]
    return -(scores.softmax(0)[ranked.index(first)]).log()


def forced(oracle: PlainBlock, tokens: list[int], states: Tensor, place: int) -> tuple[Tensor, Any, Tensor]:
    """Logits, confidence and state of draft token `place` behind tokens[0], where the draft before it were the text's.
    The logits are those of a selector's slots, which it chooses among."""
    first = int(oracle.config.layout == "fill-in")
    hidden = oracle.slots(tokens[0], states, SLOTS)[first:]
    memory = torch.zeros(oracle.config.markov_rank).double()
    for j in range(place + 1):
        logits, odds, memory = oracle.token(hidden[j], tokens[j], memory)
    return oracle.output @ hidden[j] if oracle.config.selector_rank else logits, odds, hidden[j]


@pytest.mark.parametrize("drafts", [2, 5])
def test_chains_are_the_plain_ones(head, target, drafts):
    """Greedy rounds behind prompts of different lengths, and the target's states between."""
    drafts = min(drafts, head.config.drafts)
    prompts = [[5, 9, 30, 4, 77], [8, 2, 250], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    oracle, aux_layers = plain(head, target), head.config.aux_layers
    drafter = ChainDrafter(head.net(target), FixedLengthStop(drafts), 64)
    for prompt in prompts:
        seen: list[Round] = []
        answer = generate_one(
            target, drafter, prompt, SamplingParams(), 12, TorchSource(0), (), DecodeOptions(on_round=seen.append)
        )
        whole = [*prompt, *answer.tokens]
        states = target.features(torch.tensor([whole]), aux_layers=aux_layers)[0]
        at = len(prompt)
        for own in seen:
            if own.tree is not None and own.tree.tokens:
                *_, tokens = oracle.draft(whole[at - 1], states[: at - 1], drafts)
                assert own.tree.tokens == tuple(tokens[: len(own.tree.tokens)])
            at += len(own.tokens)
        assert at == len(whole)


# Two ways through the same float64 arithmetic: sums in another order, of logits of some tens.
TOLERANCE = 1e-7


@torch.inference_mode()
def test_every_node_of_a_drawn_tree_has_the_plain_distribution_of_its_path(head, target):
    """Each of several parents of a level has the memory of its own path."""
    shape = StaticTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0]])
    prompt, first, oracle = [5, 9, 30, 4, 77], 42, plain(head, target)
    states = target.features(torch.tensor([prompt]), aux_layers=head.config.aux_layers)[0]
    drafter = TreeDrafter(head.net(target), dataclasses.replace(shape, drawn=True), 64)
    drafter.start(prompt, states, first)
    tree = drafter.propose(SLOTS, Sampler(SamplingParams(1.0), TorchSource(0)))
    depth = max(shape.depths)
    skipped = int(head.config.layout == "fill-in")
    hidden = oracle.slots(first, states, depth + skipped)[skipped:]
    assert tree.drawn is not None and len(tree.drawn) == 5
    for node, distribution in tree.drawn.items():
        path = [node]
        while path[0] >= 0:
            path.insert(0, tree.parents[path[0]])
        memory = torch.zeros(head.config.markov_rank).double()
        for h, place in zip(hidden, path, strict=False):
            logits, _, memory = oracle.token(h, first if place < 0 else tree.tokens[place], memory)
        torch.testing.assert_close(distribution, logits.softmax(-1), rtol=0, atol=TOLERANCE)


def test_a_confidence_cuts_before_the_first_token_below_the_threshold(target):
    config = BlockConfig(layers_like(target.config, 1), (1, 3), SLOTS, MASK, markov_rank=5, confidence=True)
    torch.manual_seed(3)
    head = head_class("dspark")(config).double().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.4)
    prompt = [5, 9, 30, 4, 77]
    states = target.features(torch.tensor([prompt]), aux_layers=config.aux_layers)[0]
    first = int(target.lm_head(target.features(torch.tensor([prompt])))[0, -1].argmax())
    _, odds, tokens = plain(head, target).draft(first, states, SLOTS)
    sure = torch.sigmoid(odds)
    lengths = set()
    for threshold in (0.01, *(sure + 1e-6).tolist(), 0.999):
        below = [i for i, value in enumerate(sure.tolist()) if value < threshold]
        wanted = tokens[: below[0]] if below else tokens
        drafter = ChainDrafter(head.net(target), SlotConfidenceStop(threshold, SLOTS), 64)
        drafter.start(prompt, states, first)
        tree = drafter.propose(SLOTS, Sampler(SamplingParams(), TorchSource(0)))
        assert list(tree.tokens) == wanted
        lengths.add(len(wanted))
    assert {0, SLOTS} < lengths


def test_blocks_are_drawn_by_the_seeds_and_lengths_vary_if_asked(target):
    drafter = head_class("dspark")
    settings = drafter.Settings(anchors=3, vary_block=True, layers=(1, 3), mask_token=MASK)
    head = drafter(drafter.new_config(settings, target.config)).double()
    batch = batch_of(head, target)

    def drawn(seed: int) -> tuple[Any, ...]:
        blocks = Blocks.of(batch, settings, head.config, TrainStep(seed, 99, (11, 8), (seed, seed)))
        return *blocks.anchors.tolist(), blocks.counted.shape[1]

    assert drawn(1) == drawn(1)
    assert {len(drawn(seed)) for seed in range(8)} == {3 + 3 + 1}
    assert len({drawn(seed)[:-1] for seed in range(8)}) > 3
    assert {drawn(seed)[-1] for seed in range(40)} == set(range(2, 8))
    # What is drawn for one text does not depend on the one beside it.
    alone = dataclasses.replace(
        batch, **{f.name: getattr(batch, f.name)[:1] for f in dataclasses.fields(batch) if f.name not in UNSPLIT}
    )
    of_first = Blocks.of(alone, settings, head.config, TrainStep(0, 1, (11,), (4,))).anchors.tolist()
    assert drawn(4)[:3] == tuple(of_first)


UNSPLIT = ("lengths", "scale")


def test_no_block_begins_at_a_texts_first_token(target):
    """Nothing precedes it that a block could read; a text may be an answer from there on."""
    drafter = head_class("dspark")
    settings = drafter.Settings(anchors=100, layers=(1, 3), mask_token=MASK)
    head = drafter(drafter.new_config(settings, target.config)).double()
    batch = batch_of(head, target)
    whole = dataclasses.replace(batch, loss_mask=batch.attention_mask)
    anchors = Blocks.of(whole, settings, head.config, FIRST).anchors.tolist()
    # Places 1 to 9 of 11 tokens, and 1 to 6 of 8 in the second row; the last has no token behind it.
    assert anchors == [*range(1, 10), *range(12, 18)]


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [(36, (1, 9, 17, 25, 33)), (28, (1, 7, 13, 19, 25)), (30, (1, 8, 14, 20, 27))],
)
def test_the_layers_read_by_default_are_everybodys(layers, wanted):
    """z-lab's rule for Qwen3-8B, Qwen3-0.6B and SmolLM2-135M, which numbers outputs."""
    assert default_layers(layers, 5) == tuple(number + 1 for number in wanted)


# -- in transformers' generate(speculation_type='dflash'), a decoder by others


NEW_TOKENS = 48


class Assistant(PreTrainedModel):
    """Exported block drafter in plain torch, as `generate` calls it. Returns the states of the slots.

    calls: context rows of each call, one more than the tokens that the call before had accepted.
    """

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config, plain: PlainBlock):
        super().__init__(config)
        self.plain, self.anchor = plain, nn.Parameter(torch.zeros(1))
        self.states, self.calls = torch.zeros(0), list[int]()

    def forward(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, past_key_values: Any, **_: Any
    ) -> BaseModelOutput:
        context, slots = context_hidden_states[0].double(), noise_embeds.shape[1]
        first = past_key_values.get_seq_length() == 0
        self.states = context if first else torch.cat([self.states, context])
        self.calls.append(len(context))
        rows = torch.zeros(1, 1, len(context) + slots, 1)
        for layer in range(self.config.num_hidden_layers):
            past_key_values.update(rows, rows, layer)
        (anchor,) = (self.plain.embedding.float() == noise_embeds[0, 0]).all(-1).nonzero()[0].tolist()
        return BaseModelOutput(self.plain.slots(anchor, self.states, slots)[None].float())


def test_transformers_drafts_and_accepts_as_our_chain(tmp_path):
    path = str(tiny_llama_dir(tmp_path / "target", layers=8, hidden=48))
    target = load_lm(path)
    texts = [text["input_ids"] for text in answered_prompts(target, target.info.max_position)]
    prompts = [text[: 12 + 8 * (number % 2)] for number, text in enumerate(texts)]
    greedy, answers = SamplingParams(), in_rows(target, prompts, NEW_TOKENS)
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    head = quick_block_head(target, rows, 60, "dflash", layers=(1, 3, 5), block=4, anchors=128)
    package = formats()["vllm", "dflash"].write(head.config, dict(head.named_parameters()), torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    hf.generation_config.eos_token_id = None
    config = Qwen3Config(
        hidden_size=48, num_hidden_layers=1, block_size=package.config["block_size"], **package.config["dflash_config"]
    )
    accepted = 0
    for prompt in prompts:
        plain = PlainBlock(package.tensors, head.config, target.model.embed_tokens.weight, target.model.lm_head.weight)
        assistant = Assistant(config, plain)
        answer = hf.generate(
            torch.tensor([prompt]), assistant_model=assistant, speculation_type="dflash", max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )  # fmt: skip
        chain = parse_method("dflash:k=4").build(run_models(target, dflash=head, capacity=128))
        ours = generate_one(target, chain, prompt, greedy, NEW_TOKENS, TorchSource(0), ())
        assert answer[0, len(prompt) :].tolist() == ours.tokens
        # Where one token is left neither drafts.
        steps = [step for step in ours.trace.steps if step.num_drafted]
        assert assistant.calls == [len(prompt), *(1 + step.num_accepted for step in steps[:-1])]
        accepted += sum(step.num_accepted for step in steps)
    assert accepted > 10


@pytest.mark.parametrize("rank", [20, 40])
def test_a_new_markov_head_is_the_bigram_model_of_the_answers(target: LlamaLM, rank: int) -> None:
    """At full rank it has the smoothed distributions of the counts."""
    size, rng = 20, torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (size, size), generator=rng).double() * (torch.rand(size, size, generator=rng) < 0.4)
    counts[3], counts[:, 5] = 0, 0
    config = BlockConfig(
        dataclasses.replace(layers_like(target.config, 1), vocab_size=size), (1, 3), SLOTS, MASK, markov_rank=rank
    )
    head = net.MarkovHead(config).double()
    head.start(counts.to_sparse().coalesce())
    share = (counts.sum(0) + 0.1) / (counts.sum(0) + 0.1).sum()
    expected = (counts + share) / (counts.sum(1, keepdim=True) + 1)
    tokens = torch.arange(size)
    found = head.add(torch.zeros(size, size).double(), head.step(torch.empty(0), tokens)[0]).softmax(-1)
    if rank > size:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    # The nearest of fewer: only directions of little weight are left out.
    assert (found.argmax(1) == expected.argmax(1)).double().mean() > 0.9
    assert (found[3] - share).abs().max() < 1e-9  # of a token that nothing follows
