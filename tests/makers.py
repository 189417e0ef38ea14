"""Heads that other trainers' own code writes, read by ours: `python tests/makers.py [WORD ...]` after
`make engines ENGINES=makers` prints a line for each case whose name has all of the words, and a table.

A case is a head of random weights for a tiny target, made by the trainer's class and saved by its own export. What
`import` makes of it is compared with what the trainer's class computes from the same files: EAGLE-3 and MTP along three
passes from every place of a text, blocks in all slots. Every case is float32.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
SITE = next(ROOT.glob(".engines/makers/lib/python*/site-packages"), None)
if SITE is None:
    sys.exit("No .engines/makers: run `make engines ENGINES=makers` first.")
sys.path.append(str(SITE))
# What a trainer imports and these cases do not run. Unsloth's package wants a GPU, its submodules do not.
sys.modules |= {name: MagicMock() for name in ("pulp", "nvtx")}
sys.modules["unsloth_zoo"] = types.ModuleType("unsloth_zoo")
sys.modules["unsloth_zoo"].__path__ = [str(SITE / "unsloth_zoo")]
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from worlds import tiny_llama_dir  # noqa: E402

from draftsmith.launch.export.import_head import run as import_head  # noqa: E402
from draftsmith.launch.export.settings import ImportConfig  # noqa: E402
from draftsmith.modules.drafters.branches import as_decoding  # noqa: E402
from draftsmith.modules.formats.base import NotReadHere, largest  # noqa: E402
from draftsmith.modules.pretrained.heads import load_draft_head  # noqa: E402
from draftsmith.modules.pretrained.models import load_lm  # noqa: E402
from draftsmith.modules.pretrained.reading import read_object  # noqa: E402
from draftsmith.modules.targets.base import CausalLM  # noqa: E402
from draftsmith.modules.types import InputError  # noqa: E402

LAYERS, LENGTH, PASSES, BLOCK, WINDOW, DRAFTED, MASK = 8, 26, 3, 4, 12, 100, 3
# Of logits up to 10: two float32 implementations; a wrong norm, order or mask changes them by tenths.
BAR = 1e-4


@dataclass(frozen=True)
class Text:
    """A text [T] of a target, and the target's residual states [T, H] before and after each of its layers."""

    path: Path
    lm: CausalLM
    ids: Tensor
    residual: Sequence[Tensor]

    @classmethod
    def of(cls, path: Path) -> Text:
        lm, model = load_lm(str(path)), transformers.AutoModelForCausalLM.from_pretrained(path)
        residual: list[Tensor] = []
        for module in (model.model.embed_tokens, *model.model.layers):
            module.register_forward_hook(lambda module, inputs, output: residual.append(output[0]))
        ids = torch.randint(lm.info.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            model(ids[None])
        return cls(path, lm, ids, residual)

    def states(self, layers: Sequence[int]) -> Tensor:
        """Return the states after so many layers, side by side [T, n H]."""
        return torch.cat([self.residual[number] for number in layers], -1)

    def outputs(self, layers: Sequence[int]) -> Tensor:
        """Return the outputs of layers that are counted from 0; -1 is the embedding."""
        return self.states([number + 1 for number in layers])


# By depth of a draft, logits [S, V] of drafts that follow 2, 3, .. tokens of the text, which are its own tokens.
Drafts = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A head as a trainer writes it.

    write: makes the head for a target and saves it. drafts: loads it by the trainer's class; None for heads that ours
    cannot be. near: most tokens behind which rows are compared, where the trainer lays its window otherwise than
    servers do.
    """

    maker: str
    kind: str
    name: str
    write: Callable[[Path, Path], None]
    drafts: Callable[[Path, Text], Drafts] | None = None
    family: str = "qwen3"
    near: int = 2**31
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.maker} {self.kind} {self.name} ({self.family})"


def randomized(model: nn.Module, but: Sequence[str] = ("embed_tokens", "lm_head", "verifier")) -> nn.Module:
    """Add noise to every weight but those of the target: a tensor in a wrong place changes the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not any(word in name for word in but):
                weight.nan_to_num_(0.0).add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def drafted_ids(vocab: int) -> Tensor:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[:DRAFTED].sort().values


def whole(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Return logits [.., drafted tokens] over the target's vocabulary, with -inf for all others."""
    return logits.new_full((*logits.shape[:-1], vocab), -torch.inf).index_copy_(-1, ids, logits)


def by_rows(passes: Sequence[Tensor]) -> Drafts:
    """Return drafts of logits [T - 1, V] that a training made in passes: row t is the pair of state t and token t + 1.

    Later passes have read the text's own tokens, of which the last rows have none.
    """
    return [logits[: LENGTH - 1 - depth] for depth, logits in enumerate(passes)]


def by_anchors(text: Text, states: Tensor, first: int, run: Callable[[Tensor, Tensor, Tensor], Tensor],
               add: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> Drafts:  # fmt: skip
    """Return the logits of all slots of the blocks at anchors 1, 2, ..; slot `first` drafts the anchor's next token.

    run: (ids of a block [1, n], states before it [1, a, F], positions of both [1, a + n]) -> hidden [1, n, H].
    add: (logits [1, n, V], previous tokens [1, n], hidden) -> logits, of a head behind the layers.
    """
    rows = []
    for anchor in range(1, LENGTH - BLOCK):
        block = torch.full((1, BLOCK), MASK)
        block[0, 0] = text.ids[anchor]
        hidden = run(block, states[None, :anchor], torch.arange(anchor + BLOCK)[None])[:, first:]
        logits = text.lm.lm_head(hidden)
        if add is not None:
            previous = text.ids[None, anchor : anchor + BLOCK - first]
            logits = add(logits, previous, hidden)
        rows.append(logits[0])
    return list(torch.stack(rows).unbind(1))


def of_candidates(logits: Tensor, candidates: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of a selector's candidates as logits, -inf elsewhere."""
    return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)


# -- speculators


def speculators_class(kind: str) -> Any:
    import speculators.models as models

    names = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
    names |= {"dspark": "DSparkDraftModel", "peagle": "PEagleDraftModel", "xpress": "XPressDraftModel"}
    return getattr(models, names[kind])


def write_speculators(
    kind: str, target: Path, output: Path, *, layers: int = 1, arch: str = "", window: int = 2048,
    full: Sequence[int] = (), drafted: int | None = None, **arguments: Any,
) -> None:  # fmt: skip
    from speculators.train.cli import create_transformer_layer_config

    arch = arch or ("llama" if kind == "eagle3" else "qwen3")
    config = create_transformer_layer_config(str(target), layers, arch, "silu", window, list(full))
    tables: tuple[Any, Any] = (None, None)
    if drafted is not None:
        ids = drafted_ids(config.vocab_size)
        marks = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tables = marks, ids - torch.arange(len(ids))
    # The defaults of its command line (train/config/schema.py).
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), kind == "eagle3")
    given = {"draft_vocab_size": drafted or config.vocab_size, "block_size": BLOCK, "mask_token_id": MASK, **flags}
    given |= {"markov_rank": 6, "selector_rank": 6, "selector_top_k": 5, "conv_group_size": 8, "ttt_steps": PASSES}
    given |= {"verifier_name_or_path": str(target), "draft_attn_impl": "eager", **arguments}
    model = speculators_class(kind).from_training_args(config, *tables, **given)
    trained = ("verifier",) if given.get("embed_requires_grad") else ("embed_tokens", "lm_head", "verifier")
    randomized(model, trained).save_pretrained(output)


def speculators_drafts(kind: str, path: Path, text: Text) -> Drafts:
    from speculators.models.attention import create_float_mask

    model = speculators_class(kind).from_pretrained(str(path), dtype=torch.float32).eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    states, vocab = text.states(model.target_layer_ids)[None], text.lm.info.vocab_size
    ids = torch.arange(vocab) if model.d2t is None else model.d2t + torch.arange(len(model.d2t))
    if kind == "eagle3":
        logits: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
        read = text.ids[None, 1:]
        model(states[:, :-1].clone(), read, torch.zeros_like(read), ttt_steps=PASSES)
        return by_rows([whole(part, ids, vocab) for part in logits])
    first = int(not model.config.sample_from_anchor)
    read, count = text.ids[None], LENGTH - 1 - BLOCK
    mask = torch.ones_like(read)
    mask[:, 0] = 0
    nothing = torch.zeros(1, LENGTH, states.shape[-1] // len(model.target_layer_ids))
    hidden, logits, *_, places = model._backbone_forward(
        states, read, mask, nothing, torch.zeros_like(read), max_anchors=count
    )
    logits, hidden, tokens = logits.view(count, BLOCK, -1), hidden.view(count, BLOCK, -1), text.ids[places]
    tokens = tokens.view(count, BLOCK)
    previous = torch.cat([tokens[:, :1], tokens[:, :-1]], 1) if first else tokens
    if kind == "dflash2":
        logits = of_candidates(logits, *model.candidate_selector.select(logits, hidden, previous))
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=model.markov_head.prev_embeddings(previous)
        )
    return [whole(part, ids, vocab) for part in logits[:, first:].unbind(1)]


def speculators() -> Iterator[Case]:
    plain = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    variants: dict[str, dict[str, dict[str, Any]]] = {
        "eagle3": {
            "default": {}, "reduced": {"drafted": DRAFTED}, "plain": plain, "fc_norm": {**plain, "fc_norm": True},
            "window": {"window": WINDOW}, "full": {"full": (0,)}, "layers": {"target_layer_ids": [1, 3, 6]},
            "4 states": {"target_layer_ids": [1, 3, 5, 6]}, "embedding state": {"target_layer_ids": [0, 3, 6]},
            "qwen3": {"arch": "qwen3"}, "2 layers": {"layers": 2}, "own embedding": {"embed_requires_grad": True},
            "last state": {"target_layer_ids": [2, 4, LAYERS]}, "unsorted": {"target_layer_ids": [5, 2, 4]},
        },
        "dflash": {
            "default": {}, "full": {"full": (0, 1)}, "window": {"window": WINDOW}, "mixed": {"full": (0,)},
            "anchor": {"sample_from_anchor": True}, "reduced": {"drafted": DRAFTED},
            "non-causal": {"window": WINDOW, "sliding_window_non_causal": True},
            "last state": {"target_layer_ids": [2, 4, LAYERS]},
        },
        "dflash2": {
            "default": {}, "full": {"full": (0, 1)}, "anchor": {"full": (0, 1), "sample_from_anchor": True},
            "causal": {"window": WINDOW, "sliding_window_non_causal": False}, "window": {"window": WINDOW},
        },
        "dspark": {
            "default": {}, "full": {"full": (0, 1)}, "gated": {"markov_head_type": "gated"},
            "rnn": {"markov_head_type": "rnn"}, "fill-in": {"sample_from_anchor": False},
            "no confidence": {"enable_confidence_head": False}, "reduced": {"drafted": DRAFTED},
            "confidence of the state": {"confidence_head_with_markov": False}, "mixed": {"full": (0,)},
            "rank 0": {"markov_rank": 0, "enable_confidence_head": False}, "window": {"window": WINDOW},
            "non-causal": {"window": WINDOW, "sliding_window_non_causal": True},
        },
        "peagle": {"default": {}},
        "xpress": {"default": {}},
    }  # fmt: skip
    for kind, cases in variants.items():
        for name, arguments in cases.items():
            both = name in ("default", "reduced", "full")
            for family in ("qwen3", "llama") if both else ("qwen3",):
                layers = {} if kind == "eagle3" else {"layers": 2}
                write = functools.partial(write_speculators, kind, **layers | arguments)
                drafts = None if kind in ("peagle", "xpress") else functools.partial(speculators_drafts, kind)
                near = WINDOW if arguments.get("window") else 2**31
                yield Case("speculators", kind, name, write, drafts, family, near)


MAKERS = (speculators,)

# -- ours


@torch.no_grad()
def our_drafts(path: Path, text: Text, depth: int, count: int) -> Drafts:
    """Draft along the text's own tokens from `count` places behind its second token, as the decoder does."""
    head = load_draft_head(path, text.lm)
    net, starts = head.net(text.lm), torch.arange(2, 2 + count)
    features = text.lm.features(text.ids[None], aux_layers=head.aux_layers)[0]
    with as_decoding(net.device):
        net.open(text.ids.tolist(), features, depth)
        drafts = [net.logits(net.branch(starts))]
        for level in range(1, depth):
            read = text.ids[(starts + level - 1).clamp_max(LENGTH - 1)]
            drafts.append(net.logits(net.read(read, level)))
    return drafts


def difference(ours: Drafts, theirs: Drafts, near: int) -> float:
    """Return the largest difference of logits; infinity where one of them drafts what the other cannot."""
    worst = 0.0
    for depth, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        count = max(0, min(len(other), near - depth - 2))
        own, other = own[:count], other[:count]
        worst = max(worst, largest(torch.where(own == other, 0.0, own - other)))
    return worst


def judged(case: Case, text: Text, folder: Path) -> tuple[str, str]:
    """Return a verdict and why."""
    theirs, ours = folder / "theirs", folder / "ours"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        case.write(text.path, theirs)
        try:
            import_head(ImportConfig(str(theirs), ours, str(text.path)))
            if case.drafts is None:
                return "WRONG", "read as another kind of head"
            with torch.no_grad():
                expected = case.drafts(theirs, text)
            drafts = our_drafts(ours, text, len(expected), len(expected[0]))
        except NotReadHere as error:
            return "not read here", str(error)
        except InputError as error:
            return "refused", str(error)
    imported = read_object(ours / "manifest.json", {})["imported"]
    worst = difference(drafts, expected, case.near)
    said = "".join(f"; reported: {problem}" for problem in imported["problems"])
    return "right" if worst <= BAR else "WRONG", f"{worst:.1e} as {imported['producer']}{said}"


def main(words: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        texts = {}
        for family in ("qwen3", "llama"):
            path = tiny_llama_dir(Path(scratch) / family, layers=LAYERS, family=family)
            texts[family] = Text.of(path)
        for number, case in enumerate(case for maker in MAKERS for case in maker()):
            if not all(word in str(case).split(maxsplit=2) or word in str(case) for word in words):
                continue
            verdict, why = judged(case, texts[case.family], Path(scratch) / str(number))
            counts[case.maker, verdict] += 1
            sys.stdout.write(f"{verdict:13} {case}: {why}\n")
            sys.stdout.flush()
    for maker in dict.fromkeys(maker for maker, _ in counts):
        found = ", ".join(f"{count} {verdict}" for (own, verdict), count in counts.items() if own == maker)
        sys.stdout.write(f"{maker}: {found}\n")
    total = Counter[str]()
    for (_, verdict), count in counts.items():
        total[verdict] += count
    sys.stdout.write(f"{sum(total.values())} cases: {', '.join(f'{n} {v}' for v, n in total.items())}\n")
    sys.exit(int(total["WRONG"] > 0))


if __name__ == "__main__":
    main(sys.argv[1:])
