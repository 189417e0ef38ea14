"""Language models that are tables of distributions, and every method over them, so that decodings can be enumerated.

`Branches` is a source that follows every branch.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import papers_drafters  # noqa: F401
import torch
from oracles.formulas import warped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from worlds import specdecpp

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, HeadPredictor
from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.stop import ConfidenceStop, CostRule, FixedLengthStop, PredictorStop, SelfVerifyStop
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree, StaticTree
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.hydra import HydraHead
from draftsmith.modules.drafters.lookahead import LookaheadDrafter
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.drafters.net import ChainDrafter, DraftNet, TreeDrafter
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.targets.base import ModelInfo, Scores
from draftsmith.modules.types import SamplingParams

V, H = 4, 6
PROMPT = (2, 0)


class Branches:
    """A `Source` that replays one branch and queues the others; `weight` is the branch's exact probability."""

    def __init__(self, path: list[int]):
        self.path, self.at, self.weight = path, 0, 1.0
        self.alternatives: list[list[int]] = []

    def _choose(self, probs: list[float]) -> int:
        possible = [i for i, p in enumerate(probs) if p > 0]
        if self.at == len(self.path):
            self.alternatives += [self.path[: self.at] + [i] for i in possible[1:]]
            self.path = self.path[: self.at] + [possible[0]]
        choice = self.path[self.at]
        self.at += 1
        self.weight *= probs[choice]
        return choice

    def accept(self, prob: float) -> bool:
        return self._choose([1 - prob, prob]) == 1

    def draw(self, probs: Tensor) -> int:
        return self._choose(probs.tolist())


def enumerate_branches(run: Callable[[Branches], Any]) -> Iterator[tuple[Any, float]]:
    """Yield (result, weight) over all branches of `run(source)`."""
    queue: list[list[int]] = [[]]
    while queue:
        source = Branches(queue.pop())
        result = run(source)
        queue += source.alternatives
        yield result, source.weight


class TableLM:
    """A `CausalLM` whose logits and features are arbitrary functions of the whole prefix, made in float64.

    A distribution depends on every token and on their order, so a decoder that keeps, feeds or scores a wrong token is
    found. Two or three tokens of the V have mass, others than the next model's: p and q have zeros in different places.
    """

    packed = False

    def __init__(
        self,
        seed: int,
        support: tuple[int, ...] = (2, 2, 2, 3),
        max_position: int = 64,
        dtype: torch.dtype = torch.float64,
    ):
        self.seed, self.support = seed, support
        self.device, self.dtype = torch.device("cpu"), dtype
        self.info = ModelInfo(H, V, 1, max_position, (), {"config": f"table-{seed}"})
        rng = torch.Generator().manual_seed(seed)
        self._embedding = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype)
        self._lm_head = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype)
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def row(self, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits [V] and feature [H] after `prefix`."""
        if prefix not in self._rows:
            index = self.seed
            for token in prefix:  # the same in every process; modulo a prime, as torch looks at 32 bits of a seed
                index = (index * 1_000_003 + token + 1) % (2**31 - 1)
            rng = torch.Generator().manual_seed(index)
            logits = 1.5 * torch.randn(V, generator=rng, dtype=torch.float64)
            size = self.support[int(torch.randint(len(self.support), (1,), generator=rng))]
            logits[torch.randperm(V, generator=rng)[size:]] = -torch.inf
            feature = torch.randn(H, generator=rng, dtype=torch.float64)
            self._rows[prefix] = (logits.to(self.dtype), feature.to(self.dtype))
        return self._rows[prefix]

    def session(
        self, rows: int, capacity: int, aux_layers: tuple[int, ...] = (), static: bool | None = None
    ) -> TableSession:
        return TableSession(self, rows, capacity, aux_layers)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self._embedding[input_ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self._lm_head.T

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        rows = [[self.row(tuple(ids[: t + 1]))[1] for t in range(len(ids))] for ids in input_ids.tolist()]
        return captured(torch.stack([torch.stack(row) for row in rows]), aux_layers)


class LogitTable(TableLM):
    """A table whose features are its logits, so that what `features` and `lm_head` give is what decoding draws from."""

    def row(self, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        logits, _ = super().row(prefix)
        return logits, logits

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        return super().features(input_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden


def captured(features: Tensor, aux_layers: Sequence[int]) -> Tensor:
    """What layers give: other arrangements of the feature [.., H], side by side."""
    return torch.cat([features.roll(number, -1) for number in aux_layers], -1) if aux_layers else features


class TableSession:
    """Remembers which tokens are cached and nothing else; the prefix of a token is what it can see."""

    static = False

    def __init__(self, lm: TableLM, rows: int, capacity: int, aux_layers: tuple[int, ...] = ()):
        self._lm, self.most_rows, self._capacity, self.aux_layers = lm, rows, capacity, aux_layers
        self._cached: list[list[int]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        return [len(cached) for cached in self._cached]

    def reset(self, rows: int) -> None:
        assert rows <= self.most_rows
        self._cached = [[] for _ in range(rows)]

    def prefill(self, rows: Sequence[int], prompts: Any) -> Tensor:
        for row in rows:
            assert row <= len(self._cached) and row < self.most_rows
            self._cached[row : row + 1] = [[]]
        fed = dict(zip(rows, prompts, strict=True))
        return self.extend([fed.get(row, ()) for row in range(len(self._cached))]).logits[list(rows), 0]

    def extend(self, tokens: Any, parents: Any = None, logits_to_keep: int = 1) -> Scores:
        assert len(tokens) == len(self._cached)
        read = [
            self._read(row, own, range(-1, len(own) - 1) if parents is None else parents[row])
            for row, own in enumerate(tokens)
        ]
        # What is padding is to be looked at by nobody.
        logits = [torch.stack([row[0] for row in own[-logits_to_keep:]]) if own else torch.empty(0, V) for own in read]
        features = [torch.stack([row[1] for row in own]) if own else torch.empty(0, H) for own in read]
        scores, states = (pad_sequence(part, True, torch.nan).to(self._lm.dtype) for part in (logits, features))
        return Scores(scores, captured(states, self.aux_layers))

    def step(self, tokens: Any) -> tuple[Tensor, Tensor]:
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]

    def _read(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        kept = tuple(self._cached[row])
        prefixes: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            prefixes.append((*(kept if parent < 0 else prefixes[parent]), token))
        assert max(map(len, prefixes), default=0) <= self._lm.info.max_position, "past the context"
        self._cached[row] += tokens
        assert len(self._cached[row]) <= self._capacity, "past the session's capacity"
        return [self._lm.row(prefix) for prefix in prefixes]

    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        (cached,) = self._cached
        cached += tokens.tolist()
        assert len(cached) <= self._capacity, "past the session's capacity"
        prefixes = [tuple(cached[slot] for slot in row.nonzero()[:, 0].tolist()) for row in visible]
        own = positions[-len(tokens) :].tolist()
        assert own == [len(prefix) - 1 for prefix in prefixes], "a token's position is the number of those before it"
        assert len(positions) == visible.shape[1] == len(cached)
        return torch.stack([self._lm.row(prefix)[1] for prefix in prefixes])

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        paths = [()] * len(lengths) if slots is None else slots
        for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            assert all(slot >= length for slot in path) and list(path) == sorted(set(path))
            cached = self._cached[row]
            assert length <= len(cached)
            self._cached[row] = cached[:length] + [cached[slot] for slot in path]

    def select(self, rows: Sequence[int]) -> None:
        assert all(row >= place for place, row in enumerate(rows))
        self._cached = [self._cached[row] for row in rows]


def target_distribution(
    target: TableLM, params: SamplingParams, length: int, eos_ids: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first `length` tokens after PROMPT, cut after an end token: the definition of
    lossless."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = defaultdict(float)
        for tokens, weight in distribution.items():
            if tokens and tokens[-1] in eos_ids:
                grown[tokens] += weight
                continue
            for token, p in enumerate(warped(target.row((*PROMPT, *tokens))[0], params)):
                if p > 0:
                    grown[(*tokens, token)] += weight * p
        distribution = grown
    return dict(distribution)


class _Enough(Exception):
    """Raised by the observer of rounds: the tokens under test have been emitted."""


def decoded_distribution(
    target: TableLM,
    make_drafter: Callable[[], Any],
    params: SamplingParams,
    length: int,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """The distribution of the first `length` tokens that the production loop emits, every branch followed.

    A branch ends with the round that emits the last of them: what comes later sums to one.
    """

    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    for rounds, weight in emitted_rounds(target, make_drafter, params, length, max_new_tokens, eos_ids):
        distribution[tuple(token for done in rounds for token in done.tokens)[:length]] += weight
    return dict(distribution)


def emitted_rounds(
    target: TableLM,
    make_drafter: Callable[[], Any],
    params: SamplingParams,
    length: int,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
) -> Iterator[tuple[list[Any], float]]:
    """Yield the rounds (`Round`) of every branch, with its weight, to the one that emits the `length`-th token."""

    def run(source: Branches) -> list[Any]:
        rounds: list[Any] = []

        def watch(done: Any) -> None:
            rounds.append(done)
            if sum(len(each.tokens) for each in rounds) >= length:
                raise _Enough

        try:
            generate_one(target, make_drafter(), PROMPT, params, max_new_tokens, source, eos_ids, DecodeOptions(watch))
        except _Enough:
            pass
        return rounds

    return enumerate_branches(run)


def total_variation(first: dict[tuple[int, ...], float], second: dict[tuple[int, ...], float]) -> float:
    """Half the summed differences; 1 for distributions that never agree."""
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second}) / 2


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


def random_hydra_heads(seed: int, own_lm_head: bool = False) -> HydraHead:
    torch.manual_seed(seed)
    heads = HydraHead(MedusaConfig(H, V, CAPACITY, num_heads=3, own_lm_head=own_lm_head)).double().requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_()
    return heads


class TableTrees(Drafter):
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


def stop_policy(name: str, seed: int):
    """The policy that a method's name begins with, with settings that let drafts end at several lengths."""
    if name.startswith(("cost", "online")):
        predictor = HeadPredictor(random_acceptance_head(seed)) if "cost" in name else OnlinePredictor()
        # Such heads say little that is right, and such drafts are seldom accepted: drafting has to be cheap.
        return PredictorStop(predictor, CostRule(0.1), min_drafted=1, max_drafted=3)
    if name.startswith("specdec++"):
        head = random_acceptance_head(seed)
        return specdecpp(head, h=0.6, min_drafted=1, max_drafted=3, calibrated="calibrated" in name)
    if name.startswith("confidence"):
        return ConfidenceStop(0.5, 1, 3)
    return SelfVerifyStop(3) if name.startswith("self-verify") else FixedLengthStop(int(name[-1]))


def method(name: str, target: TableLM, seed: int = 7):
    """A function that makes a fresh drafter, as every branch starts from nothing."""
    draft = TableLM(seed + 100)
    if name == "ar":
        return lambda: None
    if name.startswith(("spec:k=", "specdec++", "cost", "online", "confidence", "self-verify", "eagle:k=")):
        if name.endswith("eagle") or name.startswith("eagle"):
            head = random_eagle_head(seed)
            return lambda: ChainDrafter(head.net(target), stop_policy(name, seed), CAPACITY)
        return lambda: ChainDrafter(DraftModelNet(draft), stop_policy(name, seed), CAPACITY)
    if name.startswith("medusa"):
        shape = None if "k=" in name else EAGLE_TREES["drawn" if "drawn" in name else "eagle-static"]
        heads = random_medusa_heads(seed, "own" in name)
        return lambda: chain_or_tree(heads.net(target), shape)
    if name.startswith("hydra"):
        shape = None if "k=" in name else EAGLE_TREES["drawn" if "drawn" in name else "eagle-static"]
        hydra = random_hydra_heads(seed, "own" in name)
        return lambda: chain_or_tree(hydra.net(target), shape)
    if name in EAGLE_TREES:
        head = random_eagle_head(seed)
        return lambda: TreeDrafter(head.net(target), EAGLE_TREES[name], CAPACITY)
    return lambda: sequence_drafter(name, draft, seed)


def chain_or_tree(net: DraftNet, shape: StaticTree | None):
    """Chains of two tokens, or trees if there is a shape."""
    if shape is None:
        return ChainDrafter(net, FixedLengthStop(2), CAPACITY)
    return TreeDrafter(net, shape, CAPACITY)


def sequence_drafter(name: str, draft: TableLM, seed: int) -> Drafter:
    if name.startswith(("pre-verify", "pre+self-verify", "hsddw")):
        middle, dynamic = TableLM(seed + 200), name.startswith("hsddw")
        stop = FixedLengthStop(1) if name.startswith("pre-verify") else SelfVerifyStop(2)
        return HierarchicalDrafter(middle, ChainDrafter(DraftModelNet(draft), stop, CAPACITY), 3, dynamic, CAPACITY)
    if name.startswith("pld"):
        return PromptLookupDrafter(3, 2)
    if name.startswith("lookahead"):
        return LookaheadDrafter(3, 3, 4)
    assert name == "tree"
    return TableTrees()


EAGLE_TREES = {
    "eagle-static": StaticTree.from_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1]]),
    # Drawn without replacement; with top_k=2 the third child of the root does not exist.
    "drawn": dataclasses.replace(StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]]), drawn=True),
    "eagle-tree": DynamicTree(nodes=6, depth=2, topk=3),
}
METHODS = ["ar", "spec:k=1", "spec:k=2", "spec:k=3", "specdec++", "specdec++calibrated", "confidence", "self-verify",
           "cost", "online",
           "cost:eagle", "online:eagle", "eagle:k=2", "specdec++:eagle", "confidence:eagle", "tree",
           *EAGLE_TREES, "pre-verify", "pre+self-verify", "hsddw", "medusa-static",
           "medusa:k=2", "medusa-static:own", "medusa-static:drawn",
           "hydra-static", "hydra:k=2", "hydra:own", "hydra-static:drawn",
           "pld", "lookahead"]  # fmt: skip


def random_tree(rng: random.Random, size: int) -> list[int]:
    """Return the parents of a tree's nodes; -1 is the root."""
    return [rng.randrange(-1, i) for i in range(size)]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root's child down to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
