"""Every kind of method in bf16, and on a GPU in float32 too: its greedy tokens are transformers' float32 choices, or as
near to these as the type rounds. On a CPU in float32 they are equal: greedy_test.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds import CONTEXT, DEVICES, quick_eagle3_head, quick_eagle_head, run_models, tiny_llama_dir

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

GREEDY, NEW_TOKENS = SamplingParams(), 24
PROMPTS = [[7 + i, 11, 13 + 2 * i] * (2 + 3 * i) for i in range(3)]
METHODS = ["ar", "spec:k=4", "specdec++:h=0.5:max=6", "confidence:t=0.2:max=6", "self-verify:k=3", "eagle:k=3",
           "eagle-static", "eagle-tree:nodes=8:depth=2:topk=3", "eagle3:k=3", "eagle3-tree", "medusa-static",
           "hydra-static", "hydra:k=3", "pld:k=4", "lookahead:w=3:n=3:g=3"]  # fmt: skip
# Of logits of order 10, a thousandth of them; in bf16 what 8 bits leave of them after two layers, and what other tokens
# are above: see the test of the bars.
GAPS = {"float32": 0.01, "bfloat16": 1.0}


@dataclass(frozen=True)
class World:
    """What decodes on a device in a type, and the target of transformers on the CPU in float32."""

    models: Models
    oracle: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Any:
    """Directories of target and draft, and heads; made on the CPU."""
    root = tmp_path_factory.mktemp("devices")
    target = tiny_llama_dir(root / "target", seed=3, layers=7)
    draft = tiny_llama_dir(root / "draft", seed=4, layers=1)
    lm = load_lm(str(target))
    rows = [prompt * 8 for prompt in PROMPTS]
    heads: dict[str, Any] = {"eagle": quick_eagle_head(lm, rows, steps=30)}
    heads["eagle3"] = quick_eagle3_head(lm, rows, steps=30, draft_vocab=200)
    torch.manual_seed(5)
    for kind in ("medusa", "hydra"):
        made: Any = head_class(kind)
        heads[kind] = made(made.new_config(made.Settings(), lm.config))
    acceptance = AcceptanceHead(AcceptanceHeadConfig(lm.info.hidden_size, num_blocks=1)).requires_grad_(False)
    return target, draft, heads, acceptance


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.gpu), "bfloat16"])
def world(request, made, device) -> World:
    if request.param == "float32" and device == "cpu":
        pytest.skip("float32 on a CPU is decoded by greedy_test.py")
    target, draft, heads, acceptance = made
    lms = [load_lm(str(path), request.param, device) for path in (target, draft)]
    kind = {"device": device, "dtype": lms[0].dtype}
    own = {name: type(head)(head.config).to(**kind).eval().requires_grad_(False) for name, head in heads.items()}
    for name, head in own.items():
        head.load_state_dict(heads[name].state_dict())
    models = run_models(*lms, lms[1], **own, acceptance=acceptance.to(device), capacity=CONTEXT, ends=())
    return World(models, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())


@torch.no_grad()
def gaps(oracle: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """How far below the best logit each token's is, by the oracle that reads what was decoded before it."""
    logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_the_targets(world, method):
    dtype = str(world.models.target.dtype).removeprefix("torch.")
    drafter = parse_method(method).build(world.models)
    for prompt in PROMPTS:
        found = generate_one(world.models.target, drafter, prompt, GREEDY, NEW_TOKENS, TorchSource(0), ())
        assert len(found.tokens) == NEW_TOKENS
        assert gaps(world.oracle, prompt, found.tokens).max() < GAPS[dtype]


def test_greedy_tokens_of_rows_are_the_targets(world):
    target, dtype = world.models.target, str(world.models.target.dtype).removeprefix("torch.")
    waiting = [PromptAnswer(target.info, prompt, NEW_TOKENS, TorchSource(0), ()) for prompt in PROMPTS]
    for found in RowPool(target, GREEDY, 3, CONTEXT).run(waiting):
        assert len(found.tokens) == NEW_TOKENS
        assert gaps(world.oracle, found.prompt, found.tokens).max() < GAPS[dtype]


def test_the_bars_tell_wrong_tokens(made):
    """Nine of ten other tokens lie further below the best than either bar."""
    oracle = AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([PROMPTS[2]])).logits[0]
    below = logits.amax(-1, keepdim=True) - logits
    assert below.quantile(0.1) > max(GAPS.values())
