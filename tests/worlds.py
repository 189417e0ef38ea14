"""Models and heads that tests share: tiny random ones, heads trained for seconds, and whole worlds of them.

All are random or trained on the very answers they are tried on: shapes and exactness, never claims about quality.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.benchmarks.embedded.tokenizer import train_tokenizer
from draftsmith.eval.bench.runner import read_tree
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, HeadPredictor
from draftsmith.modules.decoding.loop import Generation, generate_one
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.decoding.stop import FixedLengthStop, PredictorStop, ThresholdRule
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config, layers_like
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, Eagle3Settings, draft_vocabulary, layer_like
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.drafters.settings import EagleSettings, MtpSettings
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.rotary import rope_table
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.targets.shape import llama_config, plain_shape
from draftsmith.modules.types import FeatureBatch, SamplingParams
from draftsmith.train.optimizers import MuonAdamW

# The same body runs on a CPU wherever tests run, and on a GPU where there is one (`make gpu`).
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# -- random models

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
CONTEXT = 256


@functools.cache
def tiny_tokenizer() -> Any:
    """Return a byte-level tokenizer with the embedded pair's chat template."""
    texts = ["def add(first, second):\n    return first + second\n", "What does this function do?", "Rename a to b:"]
    return train_tokenizer(texts * 4, 2048, CONTEXT)


def tiny_llama_dir(
    path: Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    family: str = "llama",
    vocab: int | None = None,
    **extra: Any,
) -> Path:
    """Write a transformers directory of random weights, with `tiny_tokenizer`; its logits are spread, so that argmaxes
    are clear.

    vocab: None takes the tokenizer's size. extra: more fields of the transformers config.
    """
    config_class, model_class = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    settings = {
        "vocab_size": vocab or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if family.startswith("qwen3"):
        settings["head_dim"] = hidden // 4
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **extra}))
    for parameter in model.parameters():  # transformers starts biases and norms at 0 and 1: hidden mistakes
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    return path


def padded(directory: Path, path: Path, rows: int) -> Path:
    """Copy a model with more rows of embeddings, or fewer: no token has them."""
    shutil.copytree(directory, path)
    config, state = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    config["vocab_size"] += rows
    generator = torch.Generator().manual_seed(rows % 9)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & state.keys():
        more = torch.randn(max(rows, 0), state[name].shape[1], generator=generator)
        state[name] = torch.cat([state[name], more])[: config["vocab_size"]]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def near_copy(directory: Path, to: Path, noise: float, **config: Any) -> Path:
    """Write the target with a little noise on its weights: a draft that is often right and often wrong."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(noise * weight.data.std() * torch.randn(weight.shape, generator=generator))
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(to)
    tiny_tokenizer().save_pretrained(str(to))
    return to


def every_head(llama: LlamaConfig, layers: tuple[int, ...]) -> dict[str, Any]:
    """Make a new head of each kind for a target.

    layers: whose states EAGLE-3 reads, and block drafters but the first.
    """
    like, aux_layers = layers_like(llama, 1), layers[-2:]
    block = {
        "dflash": BlockConfig(like, aux_layers, 5, 7, "fill-in"),
        "dflash2": DFlash2Config(like, aux_layers, 5, 7, "fill-in", conv_group=2, selector_rank=8, selector_top_k=4),
        "dspark": BlockConfig(like, aux_layers, 4, 7, markov_rank=8, confidence=True),
    }
    heads: dict[str, Any] = {"eagle": EagleHead(EagleConfig.for_target(llama))}
    heads["eagle3"] = Eagle3Head(Eagle3Config(layer_like(llama), layers, llama.vocab_size))
    # No Llama ships such a module, but one drafts for any target.
    sizes = {"model_type": "qwen3_5_text", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"hidden_size": llama.hidden_size, "vocab_size": llama.vocab_size, "intermediate_size": 16, "head_dim": 8}
    sizes["max_position_embeddings"] = llama.max_position
    heads["mtp"] = MtpHead(MtpHead.new_config(MtpSettings(), plain_shape(sizes)))
    for kind in ("medusa", "hydra"):
        made: Any = head_class(kind)
        heads[kind] = made(made.new_config(made.Settings(num_heads=3), llama))
    return heads | {kind: head_class(kind)(config) for kind, config in block.items()}


# -- heads trained for seconds. A random head would never have a token accepted, and a new acceptance head says one half
# to everything.


def _learn(head: Any, loss: Callable[[int], Tensor], steps: int, rate: float, decays: bool = False) -> Any:
    """Train a head in place and freeze it. loss: of a step's number. decays: the rate falls in the second half."""
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    # A Markov head's tables are not orthogonalised: most of their rows have no gradient.
    matrices = [weight for name, weight in trained.items() if weight.ndim == 2 and "markov_w" not in name]
    others = [weight for name, weight in trained.items() if weight.ndim != 2 or "markov_w" in name]
    optimizer = MuonAdamW(matrices, others, rate, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        for group in optimizer.param_groups if decays and step > steps // 2 else []:
            group["lr"] *= 0.97
    return head.eval().requires_grad_(False)


def _batch(target: Any, ids: Tensor, aux_layers: tuple[int, ...] = ()) -> FeatureBatch:
    """Make a batch of rows of ids [B, T] and their features, all of whose tokens count."""
    features, positions = target.features(ids, aux_layers=aux_layers), torch.arange(ids.shape[1]).expand_as(ids)
    return FeatureBatch(ids, features, torch.ones_like(ids, dtype=torch.bool), positions)


def _rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    """Cut rows of token ids to the shortest's length: [B, T]."""
    width = min(map(len, rows))
    return torch.tensor([row[-width:] for row in rows])


def quick_eagle_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, batch_size: int = 16, fc_bias: float = 0.0
) -> EagleHead:
    """Train an EAGLE head on rows of token ids.

    target: a lean Llama, whose sizes the head takes. fc_bias: what a bias of fc begins with, its standard deviation; 0
    is a head without.
    """
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config, fc_bias=fc_bias > 0))
    if fc_bias:
        torch.nn.init.normal_(head.fc.bias, std=fc_bias)
    batches = [_batch(target, part) for part in _rectangle(rows).split(batch_size)]
    settings = EagleSettings(feature_weight=0.2, token_weight=1.0)

    def loss(step: int) -> Tensor:
        return head.loss(batches[step % len(batches)], target, settings, None).loss

    return _learn(head, loss, steps, 5e-3, decays=True)


def quick_eagle3_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, draft_vocab: int = 0, ttt_steps: int = 2, **shape: Any
) -> Eagle3Head:
    """Train an EAGLE-3 head by its own loss. draft_vocab: tokens that it can draft, those of the rows first.
    ttt_steps: how far it learns to draft. shape: fields of its config that are not as training sets them."""
    torch.manual_seed(0)
    # Of version 3, which every format holds.
    settings = Eagle3Settings(draft_vocab=draft_vocab, ttt_steps=ttt_steps, version="3")
    head = Eagle3Head(dataclasses.replace(Eagle3Head.new_config(settings, target.config), **shape))
    ids = _rectangle(rows)
    use_tokens_of(head, ids, target)
    batch = _batch(target, ids, Eagle3Head.loss_layers(head.config, target.info.num_layers))
    return _learn(head, lambda step: head.loss(batch, target, settings, None).loss, steps, 5e-3)


def use_tokens_of(head: Any, ids: Tensor, target: Any) -> None:
    """Let the head draft the most frequent of these tokens, by the target's rows."""
    counts, tokens = torch.bincount(ids.flatten(), minlength=head.config.vocab_size), head.tokens
    tokens = head.d2t if tokens is None else draft_vocabulary(counts, len(tokens))
    head.use_draft_vocabulary(tokens, target.model.lm_head.weight)


def quick_block_head(
    target: Any, rows: Sequence[Sequence[int]], steps: int, kind: str = "dspark", rate: float = 5e-3,
    draft_vocab: int = 0, filling: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Train a DFlash or DSpark head of one layer by its own loss. draft_vocab: tokens that it can draft, those of the
    rows first. filling: DSpark's slots are filled in as DFlash's are. options: of its training."""
    torch.manual_seed(0)
    head_type = head_class(kind)
    settings = head_type.Settings(**{"num_layers": 1, "markov_rank": 16 * (kind == "dspark"), **options})
    config = dataclasses.replace(head_type.new_config(settings, target.config), draft_vocab_size=draft_vocab or None)
    if filling:
        config = dataclasses.replace(config, layout="fill-in", block_size=config.block_size + 1)
    head: Any = head_type(config)
    ids = _rectangle(rows)
    if draft_vocab:
        use_tokens_of(head, ids, target)
    batch = _batch(target, ids, head_type.loss_layers(head.config, target.info.num_layers))
    return _learn(head, lambda step: head.loss(batch, target, settings, None).loss, steps, rate)


# Tokens that `captured_head` can draft.
KNOWN = torch.arange(3, 41, 2)


def captured_head(lm: Any) -> Eagle3Head:
    """Make a random EAGLE-3 head of a lean target, in float64: it reads two layers and drafts the tokens of KNOWN."""
    torch.manual_seed(0)
    config = Eagle3Config(layer_like(lm.config), (0, lm.info.num_layers - 1), len(KNOWN))
    head = Eagle3Head(config).double().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.3)
    head.use_draft_vocabulary(KNOWN)
    return head


def varied_acceptance_head(hidden_size: int, seed: int = 1, std: float = 0.3, **settings: Any) -> AcceptanceHead:
    """Make a random head with outputs spread over (0, 1), so that drafts stop at different lengths."""
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(hidden_size, num_blocks=2, **settings)).requires_grad_(False)
    torch.nn.init.normal_(head.out.weight, std=std)
    return head


def specdecpp(
    head: AcceptanceHead, h: float, min_drafted: int, max_drafted: int, calibrated: bool = False
) -> PredictorStop:
    """Make the stop policy of SpecDec++."""
    return PredictorStop(HeadPredictor(head, calibrated), ThresholdRule(h), min_drafted, max_drafted)


# -- models side by side


def run_models(*lms: Any, **more: Any) -> Models:
    """Make `Models` as a run has them: draft trees by name, and times of this machine. lms: target, draft, mid. more:
    heads by kind, and other fields."""
    kinds = ("eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dflash2", "dspark")
    given = {kind: more.pop(kind, None) for kind in kinds}
    heads = {kind: head for kind, head in given.items() if head is not None}
    known = {"trees": {"eagle-1": read_tree("eagle-1")}, "times": MeasuredTimes(), **more}
    return Models(*lms, heads=heads, **known)


SMALL = LlamaConfig(
    vocab_size=24, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position=64,
)  # fmt: skip
FIRST_MLP = ("layers.0.mlp.down_proj.weight", (0, 0))
# Where a NaN is put: a weight that every draft goes through.
NAN_IN = {
    **dict.fromkeys(("target", "draft", "mid", "eagle", "dflash", "dflash2", "dspark"), FIRST_MLP),
    **dict.fromkeys(("eagle3", "mtp"), ("layer.mlp.down_proj.weight", (0, 0))),
    "medusa": ("heads.0.linear.weight", (0, 0)),
    "hydra": ("heads.0.linear.weight", (0, 0)),
    "acceptance": ("out.weight", (0, 0)),
}


def small_lm(seed: int, nan_in: tuple[str, tuple[int, ...]] | None = None) -> LlamaLM:
    """Make a random lean Llama, with a NaN at a place of one weight if asked for."""
    rng = torch.Generator().manual_seed(seed)
    model = LlamaModel(SMALL)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=rng)
        weight.data = 0.6 * noise if weight.ndim == 2 else 1 + 0.2 * noise
    model.cos, model.sin = rope_table(SMALL, SMALL.max_position)
    if nan_in is not None:
        model.get_parameter(nan_in[0]).data[nan_in[1]] = math.nan
    info = ModelInfo(SMALL.hidden_size, SMALL.vocab_size, 1, SMALL.max_position, (), {})
    return LlamaLM(model.eval().requires_grad_(False), info)


def small_models(broken: str | None = None) -> Models:
    """Make all models that methods use, one of them with a NaN."""
    seeds = {"target": 1, "draft": 2, "mid": 3}
    lms = [small_lm(seed, FIRST_MLP if name == broken else None) for name, seed in seeds.items()]
    torch.manual_seed(4)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(SMALL.hidden_size, num_blocks=1))
    heads: dict[str, nn.Module] = {**every_head(SMALL, (0, 1)), "acceptance": acceptance}
    for kind, head in heads.items():
        head.requires_grad_(False)
        if broken == kind:
            name, place = NAN_IN[kind]
            head.get_parameter(name).data[place] = math.nan
    return run_models(*lms, **heads, capacity=SMALL.max_position)


# Every method that learns nothing from one answer for the next, with settings for tiny models.
CHAINS = ("eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dflash2", "dspark")
STEADY_METHODS = [
    "ar", "pld:k=4:ngram=2", "lookahead:w=3:n=3:g=3", "spec:k=3", "specdec++:h=0.4:min=1:max=5",
    "confidence:t=0.3:max=5", "self-verify:k=4", "pre-verify:k=3", "pre+self-verify:k=3", "hsddw:k=3:max=6",
    *(f"{kind}:k=3" for kind in CHAINS), *(f"{kind}-static" for kind in CHAINS), "dspark-confidence:k=4:t=0.3",
    *(f"{kind}-tree:nodes=5:depth=2:topk=2" for kind in CHAINS if kind not in ("medusa", "hydra")),
]  # fmt: skip


def make_tiny_world(root: Path) -> dict[str, str]:
    """Write a target, a draft that agrees with it now and then, one head of each kind and prompts below `root`.

    Returns flag -> path of target, draft, eagle, acceptance and prompts; the other heads are beside them.
    """
    target = tiny_llama_dir(root / "target", seed=0, layers=3)
    near_copy(target, root / "draft", noise=0.08)
    target_lm, draft_lm = load_lm(str(target)), load_lm(str(root / "draft"))
    torch.manual_seed(2)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(hidden_size=32, num_blocks=2))
    torch.nn.init.normal_(acceptance.out.weight, std=1.0)  # a new head says one half to everything
    save_head(root / "acceptance", acceptance, {"target": draft_lm.info.identity}, "card")
    llama = llama_config(json.loads((target / "config.json").read_text()))
    for kind, head in every_head(llama, (0, 1, 2)).items():
        save_head(root / kind, head, {"target": target_lm.info.identity}, "card")
    rows = [
        {"id": f"row-{i}", "task": "ab"[i % 2], "split": "test" if i < 5 else "train",
         "messages": [{"role": "user", "content": f"What does function number {i} do?" + " Rename a to b:" * i}]}
        for i in range(6)
    ]  # fmt: skip
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {name: str(root / name) for name in ("target", "draft", "eagle", "acceptance")}
    return {**found, "data": str(root / "prompts.jsonl")}


def draft_options(models: Mapping[str, Any]) -> dict[str, Any]:
    """Make options of a command: `draft` and `eagle` of `models` together as its `head`; None is left out."""
    options = {name: value for name, value in models.items() if name not in ("draft", "eagle") and value is not None}
    drafts = tuple(models[name] for name in ("draft", "eagle") if models.get(name) is not None)
    return {**options, "head": drafts} if drafts else options


def draft_words(models: Mapping[str, Any]) -> list[str]:
    """Make the same as words of a command line."""
    return [
        f"--{name.replace('_', '-')}={word}"
        for name, value in draft_options(models).items()
        for word in (value if isinstance(value, tuple) else (value,))
    ]


# -- greedy decoding beside transformers

GREEDY, HIDDEN, NEW_TOKENS = SamplingParams(), 32, 60


@dataclass(frozen=True)
class World:
    """One target, what drafts for it, the prompts, and what transformers answers to each of them."""

    directory: Path
    target: Any
    hf_target: Any
    draft: Any
    hf_draft: Any
    short_draft: Any
    mid: Any
    eagle: EagleHead
    acceptance: AcceptanceHead
    prompts: list[list[int]]
    answers: list[list[int]]
    oracle: Any

    def models(self, capacity: int = CONTEXT, **more: Any) -> Models:
        """Return the models of a run."""
        lms = (self.target, self.draft, self.mid)
        return run_models(*lms, eagle=self.eagle, acceptance=self.acceptance, capacity=capacity, **more)

    def drafter(self, method: str, capacity: int = CONTEXT) -> Any:
        """Build a method; `hf-draft` and `hf-target` draft three tokens, and one of the two runs by transformers."""
        if method == "ar":
            return None
        if method.startswith("hf"):
            draft = self.hf_draft if method == "hf-draft" else self.draft
            return ChainDrafter(DraftModelNet(draft), FixedLengthStop(3), capacity)
        return parse_method(method).build(self.models(capacity))

    def run(
        self, method: str, prompt: list[int], count: int, eos_ids: tuple[int, ...] = (), drafter: Any = None
    ) -> Any:
        """Decode one prompt greedily."""
        target = self.hf_target if method == "hf-target" else self.target
        drafter = drafter or self.drafter(method)
        return generate_one(target, drafter, prompt, GREEDY, count, TorchSource(0), eos_ids)


def in_rows(
    target: Any, prompts: Sequence[Sequence[int]], count: int, eos_ids: tuple[int, ...] = (), session: Any = None
) -> list[Generation]:
    """Answer prompts greedily without a draft, side by side."""
    waiting = [PromptAnswer(target.info, own, count, TorchSource(0), eos_ids, i) for i, own in enumerate(prompts)]
    longest = max(len(answer.prompt) + answer.room for answer in waiting)
    for _ in RowPool(target, GREEDY, len(prompts), longest, session).run(waiting):
        pass
    return [Generation(answer.tokens, answer.trace, answer.ended) for answer in waiting]


def transformers_answers(oracle: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Answer all prompts in one batch, padded at the left: token by token `generate` is most of these tests' time."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[:, width:].tolist()


def make_world(root: Path) -> World:
    """Make everything under `root`; only the EAGLE head is trained, on some of the answers."""
    directory = tiny_llama_dir(root / "target", seed=3, hidden=HIDDEN)
    draft = near_copy(directory, root / "draft", noise=0.15)
    mid = near_copy(directory, root / "mid", noise=0.08)
    short = near_copy(directory, root / "short", noise=0.15, max_position_embeddings=40)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    target, rng = load_lm(str(directory)), random.Random(0)
    # Prompts of one token and of many.
    lengths = [1, 1, 2, 3] + [rng.randrange(2, 40) for _ in range(20)]
    prompts = [[rng.randrange(5, target.info.vocab_size) for _ in range(length)] for length in lengths]
    answers = transformers_answers(oracle, prompts, NEW_TOKENS)
    rows = [(prompt + answer)[:NEW_TOKENS] for prompt, answer in zip(prompts[:16], answers, strict=False)]
    torch.manual_seed(2)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(HIDDEN, num_blocks=1))
    acceptance.blocks[0].linear.weight.data.normal_(std=0.3)
    return World(
        directory, target, load_lm(str(directory), loader="hf"), load_lm(str(draft)),
        load_lm(str(draft), loader="hf"), load_lm(str(short)), load_lm(str(mid)),
        quick_eagle_head(target, rows, steps=120), acceptance.requires_grad_(False), prompts, answers, oracle,
    )  # fmt: skip
