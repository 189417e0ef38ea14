"""Mutants of EAGLE-3: alignment, training-time test, losses, drafting."""

from __future__ import annotations

from mutants.mutant import Mutant

HEAD, LOSS = "modules/drafters/eagle3.py", "modules/losses.py"
DIAGONAL, LEAN, PAIRS = "modules/attention.py", "modules/engine/lean.py", "modules/drafters/feature_heads.py"
TRAINING, NET_TEST = (f"tests/modules/drafters/eagle3_{name}_test.py" for name in ("training", "net"))
LOSS_TEST = "tests/modules/losses_test.py"
DIAGONAL_TEST = "tests/modules/attention_test.py"
LLAMA, FOREIGN, SYSTEMS = (f"modules/formats/{name}.py" for name in ("llama", "foreign", "systems"))
INTEROP_TEST = "tests/modules/formats/eagle3_test.py"

MUTANTS = [
    Mutant("eagle3-predicts-a-row-late", HEAD, "self.position - 1 - number", "self.position - number", (TRAINING,)),
    Mutant("eagle3-drafts-begin-before-the-text", HEAD, "self.place > number", "self.place >= number", (TRAINING,)),
    Mutant("eagle3-mask-one-token-early", HEAD, 'if mask == "previous":', "if mask:", (TRAINING,)),
    Mutant("eagle3-predicts-the-next-documents-first-token", HEAD, "chosen = chosen & ~first\n", "pass\n", (TRAINING,)),
    Mutant("eagle3-sequences-weigh-by-their-tokens", HEAD, 'if settings.normalizer == "sequence":',
           'if settings.normalizer == "none":', (TRAINING,)),
    Mutant("eagle3-passes-weigh-alike", HEAD, "[settings.ttt_step_decay**i", "[1.0**i", (TRAINING,)),
    Mutant("eagle3-layers-may-collapse", "modules/layers.py", "list(layers) != sorted(set(layers))", "list(layers) != sorted(layers)",
           (TRAINING,)),
    Mutant("eagle3-rare-tokens-first", HEAD, "wanted.sort(descending=True", "wanted.sort(descending=False",
           (TRAINING,)),
    Mutant("eagle3-reach-forgets-what-came-before", LOSS, "(chance * counted).cumprod(1)", "(chance * counted)",
           (TRAINING,)),
    Mutant("eagle3-rope-stays-at-the-first-pass", HEAD, "at = (position_ids + j)", "at = position_ids", (NET_TEST,)),
    Mutant("eagle3-embeddings-stay-at-the-first-pass", HEAD, "normed[:, j : j + rows]", "normed[:, :rows]", (NET_TEST,)),
    Mutant("eagle3-state-before-embedding", LEAN, "torch.cat([self.input_norm(embeds), hidden], -1)",
           "torch.cat([hidden, self.input_norm(embeds)], -1)", (TRAINING,)),
    Mutant("eagle3-output-norm-lost-in-decoding", PAIRS, "self.head.normed(hidden if picked is None else picked_of(hidden, picked))",
           "hidden if picked is None else picked_of(hidden, picked)", (TRAINING,)),

              Mutant("eagle3-residual-is-the-normed-state", HEAD,
           "(state if layer.normed_residual else hidden)",
           "state", (NET_TEST,)),
    Mutant("eagle3-draft-ids-taken-for-the-targets", HEAD, "index_copy_(-1, self.d2t, logits)",
           "index_copy_(-1, torch.arange(logits.shape[-1]), logits)", (TRAINING,)),
    Mutant("eagle3-acceptance-of-renormed-p", LOSS, "p if share is None else p * share", "p", (LOSS_TEST,)),
    Mutant("loss-gradient-of-what-is-no-distribution", LOSS, "        q /= norm\n", "", (LOSS_TEST,)),
    Mutant("loss-logits-not-shifted", LOSS, "q -= q.amax(-1, keepdim=True)\n", "pass\n", (LOSS_TEST,)),
    Mutant("loss-gradient-of-the-last-chunk-only", LOSS, "grad[part] = leaf.grad", "grad[:] = 0; grad[part] = leaf.grad",
           (LOSS_TEST,)),
    Mutant("eagle3-measures-in-every-step", HEAD, "step is None or step.logged\n", "True\n",
           (TRAINING,)),
    Mutant("eagle3-unknown-tokens-count", LOSS, "weights * known[:, None] if drop_unknown else",
           "weights if drop_unknown else", (LOSS_TEST,)),

              Mutant("diagonal-own-entries-in-a-softmax-of-their-own", DIAGONAL,
           "            total = torch.logaddexp(norm, scores.logsumexp(-1))\n",
           "            total = scores.logsumexp(-1)\n", (DIAGONAL_TEST,)),
    Mutant("eagle3-reads-the-final-state", HEAD, "states=batch.features[..., :-size],",
           "states=batch.features[..., size:],", (TRAINING,)),
    Mutant("eagle3-vllm-is-not-told-how-many-states", SYSTEMS,
           "return {} if len(layers) == NUM_STATES else {COUNT: len(layers)}", "return {}", (INTEROP_TEST,)),
    Mutant("eagle3-imported-with-an-fc-of-other-states", LLAMA, "fits = len(layers) == count and",
           "fits =", (INTEROP_TEST,)),
    Mutant("eagle3-of-two-states-taken-for-eagle-1", FOREIGN, "    if foreign.eagle3:",
           "    if False:", (INTEROP_TEST,)),
    Mutant("eagle3-sglang-reads-layers-one-late", SYSTEMS, "[number - 1 for number in layers]",
           "[number for number in layers]", (INTEROP_TEST,)),
    Mutant("export-of-another-head-unnoticed", "data/export/check.py", "elif theirs[name] != hashes[name]:", "elif False:",
           ("tests/data/export/check_test.py",)),
    Mutant("diagonal-backward-by-its-own-norm", DIAGONAL, "            norm = total\n", "", (DIAGONAL_TEST,)),
    Mutant("diagonal-shared-heads-in-another-order", DIAGONAL, "shared.repeat_interleave(groups, 1)",
           "shared.repeat(1, groups, 1, 1)", (DIAGONAL_TEST,)),
]  # fmt: skip
