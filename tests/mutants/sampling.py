"""Mutants of distributions and draws."""

from __future__ import annotations

from mutants.mutant import EXACT, Mutant

SAMPLING, TEST = "modules/sampling.py", "tests/modules/sampling_test.py"
FINITE = "tests/modules/decoding/finite_test.py"

MUTANTS = [
    Mutant("top-p-keeps-what-reaches-it-exactly", SAMPLING, "mass_before < params.top_p", "mass_before <= params.top_p", (TEST,)),
    Mutant("top-p-before-the-temperature", SAMPLING, "ordered, order = scaled.sort(", "ordered, order = wide.sort(",
           (TEST,)),
    Mutant("top-p-counts-the-token-itself", SAMPLING, "mass_before = prob.cumsum(-1, dtype=torch.float64) - prob",
           "mass_before = prob.cumsum(-1, dtype=torch.float64)", (TEST,)),
    Mutant("top-p-ignores-top-k", SAMPLING, "prob = ordered.softmax(-1)", "prob = wide.div(params.temperature).softmax(-1).sort(descending=True).values",
           (TEST,)),
    Mutant("top-k-one-more", SAMPLING, "scaled.topk(params.top_k, dim=-1)", "scaled.topk(params.top_k + 1, dim=-1)",
           (TEST,)),
    Mutant("top-k-drops-ties", SAMPLING, "scaled.masked_fill(scaled < smallest, -torch.inf)",
           "torch.full_like(scaled, -torch.inf).scatter(-1, scaled.topk(params.top_k, dim=-1).indices, "
           "scaled.topk(params.top_k, dim=-1).values)", (TEST,)),
    Mutant("temperature-multiplies", SAMPLING, "scaled / min(max(params.temperature, COLDEST), HOTTEST)",
           "scaled * min(max(params.temperature, COLDEST), HOTTEST)", (TEST,)),
    Mutant("temperature-is-left-out", SAMPLING,
           "if params.temperature != 1:", "if False:", (TEST,)),
    Mutant("rows-all-with-the-first-settings", SAMPLING, "enumerate(params) if own == same]",
           "enumerate(params) if own == params[0]]", ("tests/data/rollouts_test.py",)),
    Mutant("residual-upside-down", SAMPLING, "(target_prob - draft_prob).clamp_min(0)",
           "(draft_prob - target_prob).clamp_min(0)", (TEST,)),
    Mutant("residual-not-normalized", SAMPLING, "torch.where(total == 0, target_prob, excess / total)",
           "torch.where(total == 0, target_prob, excess)", (TEST, EXACT)),
    Mutant("residual-of-equal-distributions-is-nothing", SAMPLING,
           "torch.where(total == 0, target_prob, excess / total)",
           "excess / total", (TEST,)),
    Mutant("draws-of-rows-search-left", SAMPLING, "(total * uniforms.double())[:, None], right=True)",
           "(total * uniforms.double())[:, None], right=False)", (TEST,)),
    Mutant("accepts-at-zero-odds", SAMPLING, "return self.uniform() < prob", "return self.uniform() <= prob", (TEST,)),
    Mutant("the-same-uniform-twice", SAMPLING, "return self._uniforms.pop()", "return self._uniforms[-1]",
           (TEST,)),
    Mutant("draws-by-a-float32-sum", SAMPLING, "cumulative = probs.cumsum(-1, dtype=torch.float64).numpy()",
           "cumulative = probs.cumsum(-1).numpy()", (FINITE, TEST)),
    Mutant("draws-of-rows-by-a-float32-sum", SAMPLING,
           "cumulative = probs.cumsum(-1, dtype=torch.float64)\n    total", "cumulative = probs.cumsum(-1)\n    total",
           (FINITE, TEST)),
    Mutant("best-of-broken-logits", SAMPLING,
           "return token if math.isfinite(array.item(token)) else NO_TOKEN", "return token", (FINITE,)),
    Mutant("best-of-broken-rows", SAMPLING, "torch.where(best.isfinite(), index, NO_TOKEN)", "index", (TEST,)),
    Mutant("draws-from-broken-rows", SAMPLING,
           "torch.where((total > 0) & total.isfinite(), torch.minimum(index, last), NO_TOKEN)",
           "torch.minimum(index, last)", (TEST,)),
    Mutant("a-ratio-that-is-no-number-accepts", "modules/decoding/verify.py",
           "if ratio != ratio:", "if False:",
           (FINITE,)),
    Mutant("cold-logits-overflow", SAMPLING, "if params.temperature < COLD:", "if False:", (TEST,)),
    Mutant("largest-values-of-fewer-blocks", SAMPLING, "blocks.amax(-1).topk(count, ", "blocks.amax(-1).topk(1, ",
           (TEST,)),
]  # fmt: skip
