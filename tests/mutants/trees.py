"""Mutants of trees and EAGLE heads."""

from __future__ import annotations

from mutants.mutant import LIMITS, REPLAY_TEST, TREE, Mutant

TREE_PY, GROWN = "modules/decoding/tree.py", "modules/decoding/growth.py"
DRAFTING, READER = "modules/drafters/feature_heads.py", "modules/engine/rows.py"
EAGLE, CACHE = "modules/drafters/eagle.py", "modules/engine/cache.py"
BLOCK, BLOCK_HEAD = (f"modules/drafters/block/{name}.py" for name in ("drafter", "head"))
BLOCK_TEST = "tests/modules/drafters/block_test.py"
EAGLE_TREES, EAGLE_TEST = "tests/modules/drafters/eagle_tree_test.py", "tests/modules/drafters/eagle_test.py"
CONTEXTS = f"{LIMITS}::test_a_tree_is_drafted_to_the_end_of_the_heads_context_as_a_chain_is"
CACHE_TEST = "tests/modules/engine/cache_test.py"

MUTANTS = [
    Mutant("candidates-of-one-level-more", TREE_PY, "topk * (1 + (levels - 1) * topk)", "topk * (1 + levels * topk)",
           (REPLAY_TEST,)),
    Mutant("paths-in-another-order", TREE_PY, "key=lambda path: (len(path), path)", "key=lambda path: path", (TREE,)),
    Mutant("paths-twice-are-let-in", TREE_PY, "if not ordered or len(numbers) != len(ordered):", "if not ordered:",
           (TREE,)),
    Mutant("tree-value-is-a-nodes-own", GROWN, "(log_prob + values[..., None])", "log_prob", (EAGLE_TREES,)),
    Mutant("tree-nodes-of-equal-value-in-any-order", GROWN,
           "values.sort(descending=True, stable=True).indices[:, :count]",
           "values.flip(1).sort(descending=True, stable=True).indices[:, :count].neg() + values.shape[1] - 1",
           (EAGLE_TREES,)),
    Mutant("tree-siblings-see-each-other", DRAFTING, "self._themselves[:count, :count].expand(",
           "0 * self._themselves[:count, :count].clamp_min(0).expand(", (EAGLE_TREES,)),
    Mutant("tree-positions-one-too-far", READER, "position = before + depth - 1", "position = before + depth",
           (EAGLE_TREES,)),
    Mutant("tree-one-level-too-deep", GROWN, "for row in growing if depth < depths[row]",
           "for row in growing if depth <= depths[row]", (EAGLE_TREES,)),
    Mutant("eagle-keeps-drafted-rows", DRAFTING, "        self.cache.keep(self._kept)\n", "        pass\n",
           (EAGLE_TREES, EAGLE_TEST)),
    Mutant("tree-frontier-with-another-parents-state", GROWN,
           "above, frontier = chosen // width, chosen + count",
           "above, frontier = chosen % width, chosen + count", (EAGLE_TREES,)),
    Mutant("tree-parents-by-their-old-numbers", GROWN,
           "tuple([places[parent] for parent in own_parents])",
           "tuple([min(parent, len(taken) - 1) for parent in own_parents])", (EAGLE_TREES,)),
    Mutant("tree-context-one-too-short", DRAFTING, "self.longest_text = most + 2",
           "self.longest_text = most + 1", (CONTEXTS,)),
    Mutant("tree-rule-hears-of-rounds-without-a-draft", "modules/drafters/net.py",
           "self.rules is not None and row.tree.tokens:", "self.rules is not None:", (EAGLE_TREES,)),
    Mutant("static-tree-takes-the-next-rank", GROWN, "[shape.ranks[node] for node in nodes]",
           "[max(shape.ranks[node] - 1, 0) for node in nodes]", (EAGLE_TREES,)),
    Mutant("static-tree-reads-behind-other-parents", GROWN, "[above[i] for i in inner]", "inner",
           ("tests/modules/drafters/eagle_tree_test.py",)),
    Mutant("static-tree-all-from-the-first-parent", GROWN, "[places[shape.parents[node]] for node in nodes]",
           "[0 for node in nodes]",
           (EAGLE_TREES,)),
    Mutant("tree-mask-hides-grandparents", CACHE, "for _ in range(max(depths).bit_length()):", "for _ in range(1):",
           (CACHE_TEST,)),
    Mutant("tree-mask-depths-from-1", CACHE, "depths.append(depths[parent] + 1 if parent >= 0 else 0)",
           "depths.append(depths[parent] + 1 if parent >= 0 else 1)", ("tests/modules/targets/parity_test.py",)),
    Mutant("eagle-features-of-its-own-token", EAGLE, "        features=features[:, ahead(0)],",
           "        features=features[:, ahead(1)],", (EAGLE_TEST,)),
    Mutant("eagle-mask-one-row-early", EAGLE, "batch.loss_mask[:, ahead(2)]", "batch.loss_mask[:, ahead(1)]",
           (EAGLE_TEST,)),
    Mutant("eagle-flat-rows-one-early", EAGLE, "return rows + offset", "return rows + max(offset - 1, 0)", (EAGLE_TEST,)),
    Mutant("eagle-steps-lose-a-row", EAGLE, "pairs.position_ids >= number", "pairs.position_ids > number",
           ("tests/train/eagle_test.py",)),
    Mutant("eagle-rows-see-the-newer-pass-only", "modules/attention.py", "entries[0], entries[1:])", "entries[0], entries[-1:])",
           (EAGLE_TEST,)),
    Mutant("eagle-passes-stay-at-the-first-position", EAGLE, "at = (position_ids + j)", "at = position_ids",
           (EAGLE_TEST,)),
    Mutant("eagle-context-one-too-long", DRAFTING, "self.longest_text = most + 2",
           "self.longest_text = most + 3", (CONTEXTS,)),
    Mutant("drawn-trees-never-drawn", "modules/drafters/methods.py", "drawn=self.drawn)", "drawn=False)",
           ("tests/modules/drafters/contract_test.py::test_its_static_tree_is_drawn_where_it_is_asked_for",)),
    Mutant("block-branches-see-the-anchors-state", BLOCK, "DocumentBlocks.of(0, anchors, slots,",
           "DocumentBlocks.of(0, anchors + 1, slots,",
           (f"{BLOCK_TEST}::test_branches_are_the_plain_drafts_from_every_place",)),
    Mutant("block-tree-memory-of-the-first-parent", BLOCK, "memory.gather(1, parents[..., None]",
           "memory.gather(1, 0 * parents[..., None]",
           (f"{BLOCK_TEST}::test_every_node_of_a_drawn_tree_has_the_plain_distribution_of_its_path",)),
    Mutant("blocks-begin-at-a-texts-first-token", BLOCK_HEAD, "return place[place > 0]", "return place",
           (f"{BLOCK_TEST}::test_no_block_begins_at_a_texts_first_token",)),
    Mutant("block-loss-without-the-other-tokens", "modules/losses.py", "max(size // 2, 1)", "size // 2",
           ("tests/modules/losses_test.py::test_columns_of_a_sampled_loss_stand_for_the_whole_vocabulary",)),
]  # fmt: skip
