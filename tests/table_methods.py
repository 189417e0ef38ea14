"""Every method of the decoder over `table_models`: what is enumerated, and whose traces are checked."""

from __future__ import annotations

import dataclasses

import torch
from quick_heads import specdecpp
from table_models import H, TableLM, V

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.drafter import EachRow
from draftsmith.modules.decoding.stop import ConfidenceStop, CostRule, FixedLengthStop, PredictorStop, SelfVerifyStop
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree, StaticTree
from draftsmith.modules.decoding.tree_rule import TreeRule, TreeTimes
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.hydra import HydraConfig, HydraHead
from draftsmith.modules.drafters.lookahead import LookaheadDrafter
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.drafters.net import ChainDrafter, DraftNet, TreeDrafter
from draftsmith.modules.drafters.pearl import PearlDrafter
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.modules.layers import LlamaConfig

CAPACITY = 32


def random_acceptance_head(seed: int, **settings) -> AcceptanceHead:
    """Its outputs are spread over (0, 1), so that drafts stop at different lengths."""
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(H, num_blocks=2, **settings)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    return head


LAYER = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=H,
    max_position=CAPACITY,
)  # fmt: skip


def random_eagle_head(seed: int) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig(LAYER)).double().requires_grad_(False)
    head.fc.weight.normal_()
    return head


def random_medusa_heads(seed: int, own_lm_head: bool = False) -> MedusaHead:
    torch.manual_seed(seed)
    heads = (
        MedusaHead(MedusaConfig(H, V, CAPACITY, num_heads=3, own_lm_head=own_lm_head)).double().requires_grad_(False)
    )
    for weight in heads.parameters():
        weight.normal_()
    return heads


def random_hydra_heads(seed: int, plus: bool = False) -> HydraHead:
    """plus: with all that Hydra++ adds, and lm_heads of their own."""
    torch.manual_seed(seed)
    llama = dataclasses.replace(LAYER, num_layers=int(plus))
    heads = HydraHead(HydraConfig(llama, 3, 3 if plus else 1, own_lm_head=plus)).double().requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_()
    return heads


class TableTrees:
    """Draws nothing: a tree that is a function of what was emitted, with siblings, two depths and an equal sibling."""

    PARENTS = (-1, -1, 0, 0, 1, -1, 2)

    def start(self, prompt, features, first_token):
        self._seen = [*prompt, first_token]

    def propose(self, max_drafted, sampler):
        # Node 5 may repeat a sibling's token; depth 3 is reached by node 6 where there is room for it.
        tokens = tuple((sum(self._seen) + 3 * len(self._seen) + shift) % V for shift in (0, 1, 2, 3, 1, 0, 2))
        depths = [1, 1, 2, 2, 2, 1, 3]
        nodes = [i for i, depth in enumerate(depths) if depth <= max_drafted]
        return DraftTree(tuple(tokens[i] for i in nodes), tuple(self.PARENTS[i] for i in nodes), draft_calls=1)

    def advance(self, outcome):
        self._seen += outcome.emitted


def stop_policy(name: str, seed: int, reader: TableLM):
    """The policy that a method's name begins with, with settings that let drafts end at several lengths. reader: the
    model whose embeddings the drafter uses."""
    if name.startswith(("cost", "online")):
        early = name.startswith("cost:early")
        on_top = name.startswith("online:head")
        shape = EARLY if early or on_top else {}
        head = random_acceptance_head(seed, **shape)
        trained = HeadPredictor(head, reader.embed) if "cost" in name or on_top else None
        predictor = trained if "cost" in name else OnlinePredictor(trained)
        # Such heads say little that is right, and such drafts are seldom accepted: drafting has to be cheap.
        return PredictorStop(predictor, CostRule(0.15 if early or on_top else 0.1), min_drafted=1, max_drafted=3)
    if name.startswith("specdec++early"):
        return specdecpp(random_acceptance_head(seed, **EARLY), 0.6, 1, 3, calibrated=True, embed=reader.embed)
    if name.startswith("specdec++"):
        head = random_acceptance_head(seed)
        return specdecpp(head, h=0.6, min_drafted=1, max_drafted=3, calibrated="calibrated" in name)
    if name.startswith("confidence"):
        return ConfidenceStop(0.5, 1, 3)
    return SelfVerifyStop(3) if name.startswith("self-verify") else FixedLengthStop(int(name[-1]))


def method(name: str, target: TableLM, seed: int = 7, rows: int = 1):
    """A function that makes a fresh drafter, as every branch starts from nothing."""
    draft = TableLM(seed + 100)
    if name == "ar":
        return lambda: None
    if name.startswith(("spec:k=", "specdec++", "cost", "online", "confidence", "self-verify", "eagle:k=")):
        if name.endswith("eagle") or name.startswith("eagle"):
            head = random_eagle_head(seed)
            return lambda: ChainDrafter(head.net(target), policies(name, seed, target, rows), CAPACITY)
        return lambda: ChainDrafter(DraftModelNet(draft), policies(name, seed, draft, rows), CAPACITY)
    if name.startswith("medusa"):
        shape = None if "k=" in name else EAGLE_TREES["drawn" if "drawn" in name else "eagle-static"]
        heads = random_medusa_heads(seed, "own" in name)
        return lambda: chain_or_tree(heads.net(target), shape, rows)
    if name.startswith("hydra"):
        shape = None if "k=" in name else EAGLE_TREES["drawn" if "drawn" in name else "eagle-static"]
        hydra = random_hydra_heads(seed, "++" in name)
        return lambda: chain_or_tree(hydra.net(target), shape, rows)
    if name in EAGLE_TREES:
        head = random_eagle_head(seed)

        def tree_drafter():
            rules = [TreeRule(TREE_TIMES, "depth=auto" in name) for _ in range(rows)] if "nodes=auto" in name else None
            return TreeDrafter(head.net(target), EAGLE_TREES[name], CAPACITY, rows, rules=rules)

        return tree_drafter
    return lambda: EachRow([sequence_drafter(name, target, draft, seed) for _ in range(rows)])


def chain_or_tree(net: DraftNet, shape: StaticTree | None, rows: int):
    """Chains of two tokens, or trees if there is a shape."""
    if shape is None:
        return ChainDrafter(net, [FixedLengthStop(2) for _ in range(rows)], CAPACITY)
    return TreeDrafter(net, shape, CAPACITY, rows)


def policies(name: str, seed: int, reader: TableLM, rows: int):
    """A policy for each row."""
    return [stop_policy(name, seed, reader) for _ in range(rows)]


def sequence_drafter(name: str, target: TableLM, draft: TableLM, seed: int):
    """A drafter of one sequence."""
    if name.startswith(("pre-verify", "pre+self-verify", "hsddw")):
        middle, dynamic = TableLM(seed + 200), name.startswith("hsddw")
        stop = FixedLengthStop(1) if name.startswith("pre-verify") else SelfVerifyStop(2)
        return HierarchicalDrafter(middle, ChainDrafter(DraftModelNet(draft), [stop], CAPACITY), 3, dynamic, CAPACITY)
    if name.startswith("pld"):
        return PromptLookupDrafter(3, 2)
    if name.startswith("lookahead"):
        return LookaheadDrafter(3, 3, 4)
    if name.startswith("pearl"):
        return PearlDrafter(draft, int(name[-1]), CAPACITY)
    assert name == "tree"
    return TableTrees()


EAGLE_TREES = {
    "eagle-static": StaticTree.from_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1]]),
    # Drawn without replacement; with top_k=2 the third child of the root does not exist.
    "drawn": dataclasses.replace(StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]]), drawn=True),
    "eagle-tree": DynamicTree(nodes=6, depth=2, topk=3),
    "eagle-tree:nodes=auto": DynamicTree(nodes=9, depth=2, topk=2),
    "eagle-tree:nodes=auto:depth=auto": DynamicTree(nodes=9, depth=2, topk=2),
}
FEATURES = ("log_q", "logit_q", "logit_max_q", "entropy", "depth", "temperature")
EARLY = {"state": "before", "features": FEATURES}
# A node costs enough for few to be taken at a good pace, and many at a bad one.
TREE_TIMES = TreeTimes(0.2, 0.2, tuple(1 + 0.2 * nodes for nodes in range(10)))
METHODS = ["ar", "spec:k=1", "spec:k=2", "spec:k=3", "specdec++", "specdec++calibrated", "confidence", "self-verify",
           "specdec++early", "cost", "online", "online:head",
           "cost:eagle", "online:eagle", "eagle:k=2", "specdec++:eagle", "confidence:eagle", "tree",
           *EAGLE_TREES, "pre-verify", "pre+self-verify", "hsddw", "medusa-static",
           "medusa:k=2", "medusa-static:own", "medusa-static:drawn",
           "hydra-static", "hydra:k=2", "hydra++", "hydra-static:drawn",
           "pld", "lookahead", "pearl:k=1", "pearl:k=2"]  # fmt: skip
