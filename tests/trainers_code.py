"""Heads of other trainers, made by their own code and saved by their own exports, and what their classes draft from the
files. Read by makers.py.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
SITE = next(ROOT.glob(".engines/makers/lib/python*/site-packages"), None)
if SITE is None:
    sys.exit("No .engines/makers: run `make engines ENGINES=makers` first.")
sys.path.append(str(SITE))


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins of packages that a trainer imports and these cases do not run."""

    names = ("pulp", "nvtx", "torchao", "torchdata")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock()

    def exec_module(self, module: Any) -> None: ...


sys.meta_path.append(Stubs())
# Unsloth's package wants a GPU, its submodules do not.
sys.modules["unsloth_zoo"] = types.ModuleType("unsloth_zoo")
sys.modules["unsloth_zoo"].__path__ = [str(SITE / "unsloth_zoo")]
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from draftsmith.modules.pretrained.models import load_lm  # noqa: E402
from draftsmith.modules.pretrained.reading import read_object  # noqa: E402
from draftsmith.modules.targets.base import CausalLM  # noqa: E402

LAYERS, LENGTH, PASSES, BLOCK, WINDOW, DRAFTED, MASK = 8, 26, 3, 4, 12, 100, 3


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
        ids = torch.randint(lm.info.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
        # The last one is normed there.
        last: list[Tensor] = []
        model.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output[0]))
        with torch.no_grad():
            model(ids[None])
            residual = [lm.features(ids[None], aux_layers=(number,))[0] for number in range(LAYERS)] + last
        return cls(path, lm, ids, residual)

    def states(self, layers: Sequence[int]) -> Tensor:
        """Return the states after so many layers, side by side [T, n H]."""
        return torch.cat([self.residual[number] for number in layers], -1)

    def outputs(self, layers: Sequence[int]) -> Tensor:
        """Return the outputs of layers that are counted from 0; -1 is the embedding."""
        return self.states([number + 1 for number in layers])


# By depth of a draft, logits [S, V] of drafts that follow 2, 3, .. tokens of the text, which are its own tokens.
Drafts = list[Tensor]


def randomized(model: nn.Module, but: Sequence[str] = ("embed_tokens", "lm_head", "verifier")) -> nn.Module:
    """Add noise to every weight but those of the target: a tensor in a wrong place changes the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not any(word in name for word in but):
                weight.nan_to_num_(0.0).add_(0.1 * torch.randn(weight.shape, generator=generator))
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
    names |= {"dspark": "DSparkDraftModel"}
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
    from engines.speculators_code import block_logits, eagle3_logits, load

    model = load(speculators_class(kind), path)
    # They come from vLLM, which has them in the order of the layers.
    states, vocab = text.states(sorted(model.target_layer_ids)), text.lm.info.vocab_size
    ids = ids_of(model, vocab)
    if kind == "eagle3":
        return by_rows([whole(part, ids, vocab) for part in eagle3_logits(model, states[:-1], text.ids[1:], PASSES)])
    logits, _ = block_logits(model, states, text.ids)
    return [whole(part, ids, vocab) for part in logits.unbind(1)]


# -- what other trainers' classes have in common


def filled(model: Any, path: Path, text: Text) -> Any:
    """Load a directory's tensors into a model that its class made of config.json; the target's may be missing."""
    state = dict(item for file in sorted(path.glob("*.safetensors")) for item in load_file(file).items())
    # The target's embedding, which some exports round.
    state = {name: t for name, t in state.items() if "embed_tokens" not in name or t.dtype == torch.float32}
    absent, unknown = model.float().load_state_dict(state, strict=False)
    for name in absent:
        if name.endswith("embed_tokens.weight"):
            model.get_parameter(name).data.copy_(text.lm.embed(torch.arange(text.lm.info.vocab_size)))
        elif not name.endswith(("t2d", "d2t")):
            unknown.append(name)
    assert not unknown, unknown
    return model.eval()


def config_of(target: Path, **changes: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(target)
    if "num_hidden_layers" in changes and config.to_dict().get("layer_types"):
        changes["layer_types"] = ["full_attention"] * changes["num_hidden_layers"]
    return type(config).from_dict(config.to_dict() | changes)


def in_passes(text: Text, hidden: Tensor, step: Callable[[Tensor, Tensor], Tensor],
              logits: Callable[[Tensor], Tensor], ids: Tensor) -> Drafts:  # fmt: skip
    """Unroll an EAGLE-3 class over the text, as its training does. hidden [1, T - 1, H]: of fc.

    step: (token ids [1, T - 1], states) -> states. ids: those that it drafts.
    """
    passes, vocab = [], text.lm.info.vocab_size
    for number in range(PASSES):
        read = nn.functional.pad(text.ids[None, 1 + number :], (0, number))
        hidden = step(read, hidden)
        passes.append(whole(logits(hidden)[0], ids, vocab))
    return by_rows(passes)


def ids_of(model: Any, vocab: int) -> Tensor:
    """Return the ids that a class drafts, by its table of offsets; all where it has no smaller vocabulary."""
    table = getattr(model, "d2t", None)
    return torch.arange(vocab) if table is None or len(table) == vocab else table + torch.arange(len(table))


def set_drafted(model: Any, vocab: int) -> None:
    """Write the tables of a reduced vocabulary into a class's buffers."""
    ids = drafted_ids(vocab)
    model.d2t.copy_(ids - torch.arange(len(ids)))
    model.t2d.zero_()[ids] = True


class Arguments(dict[str, Any]):
    """Options that are read as keys and as attributes."""

    __getattr__ = dict.__getitem__


# -- Automodel


def write_automodel(
    kind: str, target: Path, output: Path, *, window: int | None = None, drafted: int | None = None,
    trained: Sequence[str] = (), **options: Any,
) -> None:  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    config, embedding = model.config, model.get_input_embeddings()
    if kind in ("dflash", "dflash2"):
        from nemo_automodel.components.speculative.dflash.registry import resolve_dflash_draft_spec
        from nemo_automodel.recipes.llm.train_dflash import TrainDFlashRecipe
        from nemo_automodel.recipes.llm.train_dflash2 import TrainDFlash2Recipe

        recipe: Any = object.__new__(TrainDFlashRecipe if kind == "dflash" else TrainDFlash2Recipe)
        recipe.__dict__.update(draft_sliding_window=window, block_size=BLOCK, mask_token_id=MASK)
        made = recipe._draft_cls(resolve_dflash_draft_spec(["Qwen3ForCausalLM"]))
        options = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5, **options}
        head = made(
            recipe._build_qwen3_draft_config(
                options, target_text_config=config, draft_cls=made, draft_num_hidden_layers=2,
                num_target_layers=LAYERS, target_layer_ids=[1, 3, 5], attention_backend="eager",
            )
        )  # fmt: skip
    elif kind == "dspark":
        from nemo_automodel.components.speculative.dspark.config import build_draft_config
        from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel

        given = {"num_draft_layers": 2, "target_layer_ids": [1, 3, 5], "confidence_head_alpha": 1.0, "num_anchors": 4}
        given |= {"confidence_head_with_markov": True, "markov_rank": 6, "markov_head_type": "vanilla"}
        head = Qwen3DSparkModel(
            build_draft_config(config, Arguments(given | {"block_size": BLOCK, "mask_token_id": MASK} | options))
        )
        head.initialize_embeddings_and_head(embed_tokens=embedding, lm_head=model.lm_head)
    else:
        from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

        # As train_eagle3.py writes it.
        fields = {"draft_vocab_size": drafted or config.vocab_size, "target_hidden_size": config.hidden_size}
        fields |= {"architectures": ["LlamaEagle3DraftModel"], "tie_word_embeddings": False, "fc_norm": False}
        fields |= {"attn_implementation": "eager", "norm_output": False}
        head = LlamaEagle3DraftModel(config_of(target, **fields | options)).float()
        head.copy_embeddings_from_target(embedding)
        head.set_vocab_mapping(drafted_ids(config.vocab_size) if drafted else torch.arange(config.vocab_size))
    but = {"embed_tokens"} if kind == "eagle3" else {"embed_tokens", "lm_head"}
    randomized(head, [*but - {*trained}]).save_pretrained(output)


def automodel_drafts(kind: str, path: Path, text: Text) -> Drafts:
    fields = read_object(path / "config.json", {})
    if kind == "eagle3":
        from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

        model = filled(LlamaEagle3DraftModel(transformers.AutoConfig.from_pretrained(path)), path, text)
        cache: list[list[Tensor]] = [[], []]
        mask = torch.ones(1, LENGTH - 1, dtype=torch.long)
        # The layers that its target wrapper captures by default.
        hidden = model.project_hidden_states(text.states([2, LAYERS // 2, LAYERS - 3])[None, :-1])
        step = functools.partial(model, attention_mask=mask, cache_hidden=cache)
        return in_passes(text, hidden, step, model.compute_logits, ids_of(model, text.lm.info.vocab_size))
    config = transformers.Qwen3Config.from_dict(fields)
    config._attn_implementation = "eager"
    if kind == "dspark":
        from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel

        model = filled(Qwen3DSparkModel(config), path, text)

        def run(block: Tensor, states: Tensor, positions: Tensor) -> Tensor:
            return model._forward_backbone(
                position_ids=positions, noise_embedding=model.embed_tokens(block), target_hidden_states=states
            )

        return by_anchors(text, text.outputs(model.target_layer_ids), 0, run, markov_bias(model.markov_head))
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel

    model = filled((Qwen3DFlashDraftModel if kind == "dflash" else Qwen3DFlash2DraftModel)(config), path, text)

    def select(logits: Tensor, previous: Tensor, hidden: Tensor) -> Tensor:
        unary, candidates = logits.topk(model.candidate_selector.top_k)
        return of_candidates(
            logits, candidates, model.candidate_selector.pair_scores(hidden, unary, candidates, previous)
        )

    states, add = text.outputs(model.target_layer_ids), select if kind == "dflash2" else None
    return by_anchors(text, states, 1, functools.partial(zlab_block, model, text, None), add)


def zlab_block(model: Any, text: Text, mask: Any, block: Tensor, states: Tensor, positions: Tensor) -> Tensor:
    """Run a block by the classes that descend from z-lab's. mask: makes one for a context's length."""
    made = None if mask is None else mask(states.shape[1])
    return model(
        position_ids=positions, attention_mask=made, noise_embedding=text.lm.embed(block), target_hidden=states
    )


def markov_bias(head: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return what DeepSpec's Markov head adds to a block's logits, in all of its copies."""
    if head is None:
        return None
    return lambda logits, previous, hidden: head.apply_block_logits(logits, token_ids=previous, hidden_states=hidden)


# -- SpecForge


def write_specforge(kind: str, target: Path, output: Path, *, export: str = "hf", drafted: int | None = None,
                    inner: Any = None, **fields: Any) -> None:  # fmt: skip
    from specforge.export import export_to_hf, export_to_sglang
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    base = config_of(target).to_dict() | {"tie_word_embeddings": False, "layer_types": None}
    vocab = base["vocab_size"]
    if kind == "eagle3":
        made = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        made |= {"draft_vocab_size": drafted or vocab, "pretraining_tp": 1}
    else:
        classes = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
        made = {"architectures": [classes[kind]], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": BLOCK}
        made |= {"num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2, "draft_vocab_size": vocab}
        config = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK}
        if kind == "dspark":
            config |= {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "vanilla"}
        made["dflash_config"] = config | (inner or {})
    output.mkdir(parents=True)
    described = output.parent / "draft.json"
    described.write_text(json.dumps(base | made | fields))
    model = randomized(AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(described))), ("embed_tokens",))
    if drafted is not None:
        set_drafted(model, vocab)
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed" not in name}
    torch.save({"draft_state_dict": state, "strategy": kind}, output.parent / "training_state.pt")
    checkpoint = str(output.parent / "training_state.pt"), str(described), str(output)
    if export == "sglang":
        export_to_sglang(*checkpoint)
    else:
        export_to_hf(*checkpoint, embedding_source=str(target))


def specforge_drafts(kind: str, path: Path, text: Text) -> Drafts:
    from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    config = AutoDraftModelConfig.from_file(str(path / "config.json"))
    config._attn_implementation = "eager"
    model = filled(AutoDraftModel.from_config(config), path, text)
    if kind == "eagle3":
        layers = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        states = text.states([2, LAYERS // 2, LAYERS - 3]) if layers is None else text.outputs(layers)
        return unrolled_specforge(model, text, states)

    def masks(context: int) -> dict[str, Tensor]:
        shared = torch.tensor([[context]]), torch.ones(1, 1, dtype=torch.bool), context, BLOCK, torch.device("cpu")
        windows = {"full_attention": None, "sliding_attention": model.sliding_window}
        return {name: create_dflash_sdpa_mask(*shared, sliding_window=window) for name, window in windows.items()}

    run = functools.partial(zlab_block, model, text, masks)
    add = markov_bias(getattr(model, "markov_head", None))
    # DSpark's blocks are laid from the anchor, whatever shift_label is (algorithms/common/dflash_family_model.py).
    return by_anchors(text, text.outputs(model.target_layer_ids), int(kind == "dflash"), run, add)


def unrolled_specforge(model: Any, text: Text, states: Tensor) -> Drafts:
    """Unroll SpecForge's EAGLE-3 class, or verl's copy of it."""
    cache: list[list[Tensor]] = [[], []]
    hidden = model.project_hidden_states(states[None, :-1])
    seen = torch.ones(1, LENGTH - 1, dtype=torch.bool)
    module = sys.modules[type(model).__module__]
    mask = module.prepare_decoder_attention_mask(seen, (1, LENGTH - 1), hidden, 0)
    positions = torch.arange(LENGTH - 1)[None]

    def step(read: Tensor, hidden: Tensor) -> Tensor:
        return model.backbone(model.embed_input_ids(read), hidden, cache, mask, positions)

    return in_passes(text, hidden, step, model.compute_logits, ids_of(model, text.lm.info.vocab_size))


# -- Unsloth


def write_unsloth(kind: str, target: Path, output: Path, *, drafted: int | None = None, **options: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    vocab = model.config.vocab_size
    if kind == "eagle3":
        from unsloth_zoo.speculative import eagle3

        ids = torch.arange(vocab) if drafted is None else drafted_ids(vocab)
        marks = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        head = eagle3.build_eagle3_drafter(model, ids - torch.arange(len(ids)), marks, **options)
        eagle3.save_eagle3_drafter(str(output), randomized(head), str(target), dtype=torch.float32)
    else:
        from unsloth_zoo.speculative.dspark import Qwen3DSparkDrafter

        given = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK, "num_draft_layers": 2, "block_size": BLOCK}
        head = Qwen3DSparkDrafter.from_target(model, **given | {"markov_rank": 6} | options)
        randomized(head).save_pretrained(str(output), dtype=torch.float32)


def unsloth_drafts(kind: str, path: Path, text: Text) -> Drafts:
    vocab = text.lm.info.vocab_size
    if kind == "eagle3":
        from unsloth_zoo.speculative import eagle3

        head = eagle3.load_eagle3_drafter(str(path), transformers.AutoModelForCausalLM.from_pretrained(text.path))
        ids = ids_of(head, vocab)
        passes = head.forward_train(text.states(head.aux_layer_ids)[None], text.ids[None], ttt_steps=PASSES)
        return by_rows([whole(logits[0], ids, vocab) for logits in passes])
    from unsloth_zoo.speculative.dspark import Qwen3DSparkDrafter

    head = Qwen3DSparkDrafter.from_pretrained(str(path))
    anchors = torch.arange(1, LENGTH - BLOCK)[None]
    out = head.forward_train(
        text.outputs(head.target_layer_ids)[None], text.ids[None], torch.ones(1, LENGTH),
        anchors=(anchors, torch.ones_like(anchors, dtype=torch.bool)),
    )  # fmt: skip
    return list(head.logits(out["hidden"], out["prev_ids"])[0].unbind(1))


# -- verl-SpeCo


def verl_class(kind: str) -> tuple[Any, Any]:
    """Return the classes of a head and of its config."""
    from verl_speco.models import dflash, dspark
    from verl_speco.models.eagle.llama_eagle import LlamaForCausalLMEagle3

    own = {"dflash": (dflash.DFlashDraftModel, dflash.DFlashConfig)}
    own |= {"dspark": (dspark.DSparkDraftModel, dspark.DSparkConfig)}
    return own.get(kind, (LlamaForCausalLMEagle3, transformers.LlamaConfig))


def write_verl(kind: str, target: Path, output: Path, *, drafted: int | None = None, **options: Any) -> None:
    head, config = verl_class(kind)
    base = config_of(target).to_dict() | {"tie_word_embeddings": False}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes = {name: base[name] for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    if kind == "eagle3":
        # As eagle3_trainer_backend.py makes it without a draft's directory.
        base |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "layer_types": None}
        base |= {"draft_vocab_size": drafted or base["vocab_size"], "target_hidden_size": base["hidden_size"]}
        model = head(config.from_dict(base | {"model_type": "llama", "pretraining_tp": 1} | options))
    else:
        # As dflash_trainer_backend.py and dspark_trainer_backend.py do.
        given = {"num_hidden_layers": 2, "num_target_layers": LAYERS, "target_num_hidden_layers": LAYERS}
        given |= {"num_context_layers": 3, "target_layer_ids": [1, 3, 5], "mask_token_id": MASK}
        given |= {"target_hidden_size": base["hidden_size"], "rope_theta": 10000.0, "block_size": BLOCK}
        given |= {"architectures": [head.__name__], **({"markov_rank": 6} if kind == "dspark" else {})}
        model = head(config(**sizes | given | options))
    randomized(model, ("embed_tokens",))
    if drafted is not None:
        set_drafted(model, base["vocab_size"])
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed" not in name}
    model.save_pretrained(output, state_dict=state)


def verl_drafts(kind: str, path: Path, text: Text) -> Drafts:
    head, config = verl_class(kind)
    model = filled(head(config.from_dict(read_object(path / "config.json", {}))), path, text)
    if kind == "eagle3":
        return unrolled_specforge(model, text, text.states([2, LAYERS // 2, LAYERS - 3]))

    def run(block: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        context = model.extract_context_feature(list(states.chunk(model.num_context_layers, -1)))
        return model(block, context, positions[:, -BLOCK:], positions[:, :-BLOCK])

    add = None
    if getattr(model, "markov_head", None) is not None:
        add = markov_bias(model.markov_head)
    return by_anchors(text, text.outputs(model.target_layer_ids), int(kind == "dflash"), run, add)


# -- ModelOpt


def modelopt_model(kind: str, target: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Convert a target as ModelOpt trains it; return it and the module that drafts."""
    import modelopt.torch.speculative as speculative
    from modelopt.torch.speculative.plugins import modeling_dflash, modeling_eagle
    from transformers.models import llama, qwen3

    # transformers 5.23 takes no device; ModelOpt's own range ends below it.
    modeling_eagle.LlamaRotaryEmbedding = lambda config, device: llama.modeling_llama.LlamaRotaryEmbedding(config)
    modeling_dflash._ROTARY_CLS = lambda config, device: qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim", "rms_norm_eps")
    sizes = {name: getattr(model.config, name) for name in names}
    if kind == "eagle3":
        given = {"use_aux_hidden_state": True, "use_last_layernorm": True, "has_lm_head": True}
        shape = sizes | given | {"_attn_implementation": "eager"} | options
        settings = {"eagle_architecture_config": shape, "eagle_use_torch_compile": False}
        model = speculative.convert(model, [("eagle", settings | {"eagle_export_rope_scaling": {}})])
        model.eagle_module._maybe_init_rope()
        return model, model.eagle_module
    shape = sizes | {"num_hidden_layers": 3, "_attn_implementation": "eager"}
    if kind == "dspark":
        shape |= {"projector_type": "dspark", "markov_rank": 6}
    own = {name: options[name] for name in options if name.startswith("dflash_")}
    settings = {"dflash_block_size": BLOCK, "dflash_mask_token_id": MASK, "dflash_use_torch_compile": False, **own}
    settings["dflash_architecture_config"] = shape | {name: options[name] for name in options.keys() - own}
    model = speculative.convert(model, [("dflash", settings)])
    return model, model.dflash_module


def write_modelopt(kind: str, target: Path, output: Path, **options: Any) -> None:
    model, module = modelopt_model(kind, target, options)
    randomized(module, ())
    model.get_exporter().export(output)


def modelopt_drafts(kind: str, options: dict[str, Any], path: Path, text: Text) -> Drafts:
    once = bool(options.get("once"))
    model, module = modelopt_model(kind, text.path, options)
    filled(module, path, text)
    if once:
        # Of the two calls in a layer, of the states and then of the embeddings, the second.
        calls = itertools.count()
        module.layers[0].input_layernorm.register_forward_hook(
            lambda norm, inputs, output: output if next(calls) % 2 else inputs[0]
        )
    if kind == "eagle3":
        rows, layers = [], [number + 1 for number in model.eagle_config.eagle_aux_hidden_state_layer_ids]
        fed = module.fc(text.states(layers))[None]
        for start in range(2, LENGTH - PASSES + 1):
            hidden, logits = fed[:, : start - 1], []
            for depth in range(PASSES):
                ids, count = text.ids[None, 1 : start + depth], start - 1 + depth
                mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
                normed, plain, _ = module(hidden, text.lm.embed(ids), mask, torch.arange(count)[None])
                logits.append(module.lm_head(normed[0, -1]))
                hidden = torch.cat([hidden, plain[:, -1:]], 1)
            rows.append(torch.stack(logits))
        vocab = text.lm.info.vocab_size
        ids = ids_of(module, vocab)
        return [whole(part, ids, vocab) for part in torch.stack(rows).unbind(1)]

    def run(block: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        mask = model._build_generate_swa_mask(states.shape[1], 1, torch.float32, "cpu")
        return module(text.lm.embed(block), states, positions, mask)

    def add(logits: Tensor, previous: Tensor, hidden: Tensor) -> Tensor:
        return logits + module.compute_markov_bias(previous[:, None], hidden[:, None])[:, 0]

    return by_anchors(text, text.outputs(model.target_layer_ids), int(kind == "dflash"), run,
                      add if kind == "dspark" else None)  # fmt: skip


MAKERS: dict[str, tuple[Callable[..., None], Callable[..., Drafts]]] = {
    "speculators": (write_speculators, speculators_drafts),
    "Automodel": (write_automodel, automodel_drafts),
    "SpecForge": (write_specforge, specforge_drafts),
    "Unsloth": (write_unsloth, unsloth_drafts),
    "verl": (write_verl, verl_drafts),
    "ModelOpt": (write_modelopt, modelopt_drafts),
}
