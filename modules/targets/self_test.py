"""Check at load that a transformers model gives the same logits in parts, after dropped tokens and as a tree as in one
forward.

transformers' architectures treat a cache, position ids and attention masks differently. Some ignore one of these
without an error, so that decoding would be wrong and look right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.targets.hybrid import Mixers
from draftsmith.modules.types import InputError, describe_error

PREFIX, TAIL = 5, 3
# Eight children of the last prefix token, and two paths that continue the first two of them. The paths' nodes are far
# from their parents in the cache and next to them in position, which exposes a model that counts slots.
TREE = (-1,) * 8 + (0, 1, 8, 9)
PATHS = ((0, 8, 10), (1, 9, 11))
REMEDY = "Use a model of another architecture: docs/models.md lists those that were tried."


def self_test(model: Any, lm: CausalLM, mixers: Mixers) -> str:
    """Compare each way a session reads with one whole forward. Returns why the model cannot read trees, or nothing.

    mixers: of `lm`; the test sets how those of a hybrid continue. Costs seven forwards of at most 22 tokens, a hybrid's
    up to twice as many; and as many in float32 where half precision shows a difference.

    Raises:
        InputError: the model cannot be decoded at all: its logits are not those of its output embedding, or reading
            after a cached prefix, or after dropped tokens, gives other ones.
    """
    name, config, known = type(model).__name__, model.config.get_text_config(), ""
    kinds = {kind for field in ("attention_layers", "layer_types") for kind in getattr(config, field, None) or ()}
    if {"local", "chunked_attention"} & kinds:  # GPT-Neo, Llama 4; no text as short as the test's shows it
        known = f"{name}, which has a window over cache slots, where nodes of other branches lie"
    elif mixers.hybrid:
        known = f"{name}, which keeps one state for all branches of a tree"
    found = _differences(model, lm, mixers, not known)
    if (found.chains or found.trees) and lm.dtype.itemsize < torch.float32.itemsize:
        # Rounding alone moves Gemma 3's logits in bfloat16 by half their spread. What fails widened says nothing.
        with suppress(Exception):
            with _widened(model, lm):
                wide = _differences(model, lm, mixers, not known)
            if not wide.chains:
                found = _differences(model, lm, mixers, not (known or wide.trees), wide.whole)
                known = known or wide.trees
    if found.chains:
        raise InputError("model", found.chains, "an architecture that decodes from a cache", REMEDY)
    return known or found.trees


class Differences(NamedTuple):
    """Why a model cannot be decoded, and why it cannot read trees; logits [2, T, V, 1] of a whole forward."""

    chains: str
    trees: str
    whole: Tensor


def _differences(model: Any, lm: CausalLM, mixers: Mixers, trees: bool, exact: Tensor | None = None) -> Differences:
    """Look for differences, in trees if they are asked for. exact: logits [2, T, V, 1] without rounding, if known."""
    name = type(model).__name__
    count, vocab_size = PREFIX + len(TREE) + TAIL, lm.info.vocab_size
    # Spread over the vocabulary.
    ids = [(number * vocab_size // count + 1) % vocab_size for number in range(1, count + 1)]
    prefix, nodes, tail = ids[:PREFIX], ids[PREFIX:-TAIL], ids[-TAIL:]
    texts = [[*prefix, *(nodes[node] for node in path), *tail] for path in PATHS]
    batch = torch.tensor(texts, device=lm.device)
    session, whole = lm.session(1, PREFIX + len(nodes) + TAIL), torch.empty(0)
    try:
        with torch.inference_mode():
            whole = model(input_ids=batch, use_cache=False).logits.to(lm.device)[..., None]  # [2, T, V, 1]
            both = whole if exact is None else torch.cat([whole, exact], -1)
        if not whole.isfinite().all():
            remedy = "Check the checkpoint, or load it in another dtype."
            raise InputError("model", f"{name} with NaN or infinite logits in {lm.dtype}", "finite logits", remedy)
        # Some recurrences continue by single tokens only.
        for stepwise in (False, True):
            mixers.stepwise = stepwise
            reason = _chain_differs(name, session, texts[0], both[0], lm)
            if not reason or not mixers.hybrid:
                break
        if reason and (at_once := _differs(name, "its output embedding", lm.lm_head(lm.features(batch)), both, lm)):
            reason = at_once
        session.keep([PREFIX], [()])
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each architecture fails in its own way
        reason = f"{name}, which fails when its cache is extended ({describe_error(error)})"
    if reason or not trees:
        return Differences(reason, reason, whole)
    return Differences("", _trees_differ(name, session, nodes, tail, both, lm), whole)


@contextmanager
def _widened(model: nn.Module, lm: CausalLM) -> Iterator[None]:
    """Context in which a model computes in float32: each module's weights are widened for its own forward only."""
    narrow, kept = lm.dtype, dict[Tensor, Tensor]()

    def switch(module: nn.Module, *_: object) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor in kept:
                tensor.data = kept.pop(tensor)
            elif tensor.dtype == narrow:
                kept[tensor], tensor.data = tensor.data, tensor.data.float()

    parts = list(model.modules())
    hooks = [part.register_forward_pre_hook(switch) for part in parts]
    hooks += [part.register_forward_hook(switch) for part in parts]
    lm.dtype = torch.float32
    try:
        yield
    finally:
        lm.dtype = narrow
        for hook in hooks:
            hook.remove()
        for tensor, data in kept.items():
            tensor.data = data


def _chain_differs(name: str, session: Session, text: list[int], whole: Tensor, lm: CausalLM) -> str:
    """Describe a difference of what follows a prefix, all of which is then dropped, and then half of it."""
    session.reset(1)
    session.extend([text[:PREFIX]])
    reason = ""
    for way, kept in (
        ("reading in two parts", PREFIX),
        ("what follows dropped tokens", PREFIX),
        ("what follows dropped tokens", PREFIX + TAIL),
    ):
        session.keep([kept])
        logits = session.extend([text[kept:]], logits_to_keep=len(text) - kept).logits[0]
        reason = reason or _differs(name, way, logits, whole[kept:], lm)
    return reason


def _trees_differ(name: str, session: Session, nodes: list[int], tail: list[int], whole: Tensor, lm: CausalLM) -> str:
    """Say why the model cannot read trees; empty if it can. The session has read the prefix."""
    try:
        # Each path's last two nodes, which a chain would not have, then what follows once one path is kept.
        logits = session.extend([nodes], [TREE], logits_to_keep=len(nodes)).logits[0]
        in_tree = torch.stack([logits[list(path[1:])] for path in PATHS])  # [2, 2, V]
        reason = _differs(name, "a tree", in_tree, whole[:, PREFIX + 1 : PREFIX + 3], lm)
        session.keep([PREFIX], [[PREFIX + node for node in PATHS[1]]])
        after = session.extend([tail], logits_to_keep=TAIL).logits[0]
        return reason or _differs(name, "what follows a kept branch", after, whole[1, -TAIL:], lm)
    except Exception as error:
        return f"{name}, which cannot read a tree ({describe_error(error)})"


def _differs(name: str, way: str, found: Tensor, expected: Tensor, lm: CausalLM) -> str:
    """Describe a difference of logits [.., T, V] beyond rounding; empty if there is none.

    It is relative to the logits' spread: the worst row's median position. A wrong mask or position shows at every
    position of a row. In bf16 a near tie between two experts of a mixture may flip at one of them, which is rounding.

    expected: [.., T, V, 1]; with 2 in the last place the second ones are without rounding.
    """
    expected, exact = expected[..., 0].double(), expected[..., -1].double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    difference, rounding = (
        ((other.double() - expected).norm(dim=-1) / spread).median(-1).values.max().item() for other in (found, exact)
    )
    # Rounding grows with depth; a wrong mask changes logits by their own size. The square root of the precision is
    # between both: 3e-4 in float32, 0.09 in bfloat16.
    eps = torch.finfo(lm.dtype).eps
    if lm.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, 2.0**-10)  # of TF32
    if difference <= max(eps**0.5, min(2 * rounding, 0.5)):  # NaN differs
        return ""
    return f"{name}, which gives other logits for {way} than for one whole forward ({difference:.2g} of their spread)"
