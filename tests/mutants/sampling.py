"""Mutants of distributions and draws."""

from __future__ import annotations

from mutants.mutant import EXACT, Mutant

SAMPLING, TEST = "modules/sampling.py", "tests/modules/sampling_test.py"

MUTANTS = [
    Mutant("top-p-keeps-what-reaches-it-exactly", SAMPLING, "mass_before < top_p", "mass_before <= top_p", (TEST,)),
    Mutant("top-p-before-the-temperature", SAMPLING, "_nucleus(scaled, params.top_p)", "_nucleus(wide, params.top_p)",
           (TEST,)),
    Mutant("top-p-counts-the-token-itself", SAMPLING, "mass_before = prob.cumsum(-1) - prob",
           "mass_before = prob.cumsum(-1)", (TEST,)),
    Mutant("top-p-ignores-top-k", SAMPLING,
           "    if params.top_p < 1:\n        scaled = scaled.masked_fill(~_nucleus(scaled",
           "    if params.top_p < 1:\n        scaled = scaled.masked_fill(~_nucleus(wide / params.temperature",
           (TEST,)),
    Mutant("top-k-one-more", SAMPLING, "scaled.topk(params.top_k, dim=-1)", "scaled.topk(params.top_k + 1, dim=-1)",
           (TEST,)),
    Mutant("top-k-drops-ties", SAMPLING, "scaled.masked_fill(scaled < smallest, -torch.inf)",
           "torch.full_like(scaled, -torch.inf).scatter(-1, scaled.topk(params.top_k, dim=-1).indices, "
           "scaled.topk(params.top_k, dim=-1).values)", (TEST,)),
    Mutant("temperature-multiplies", SAMPLING, "wide / params.temperature", "wide * params.temperature", (TEST,)),
    Mutant("temperature-is-left-out", SAMPLING, "wide if params.temperature == 1 else wide / params.temperature",
           "wide", (TEST,)),
    Mutant("rows-all-with-the-first-settings", SAMPLING, "enumerate(params) if own == same]",
           "enumerate(params) if own == params[0]]", ("tests/data/rollouts_test.py",)),
    Mutant("residual-upside-down", SAMPLING, "(target_prob - draft_prob).clamp_min(0)",
           "(draft_prob - target_prob).clamp_min(0)", (TEST,)),
    Mutant("residual-not-normalised", SAMPLING, "torch.where(total > 0, excess / total, target_prob)",
           "torch.where(total > 0, excess, target_prob)", (TEST, EXACT)),
    Mutant("residual-of-equal-distributions-is-nothing", SAMPLING,
           "torch.where(total > 0, excess / total, target_prob)",
           "excess / total", (TEST,)),
    Mutant("draws-of-rows-search-left", SAMPLING, "uniforms[:, None].double(), right=True)",
           "uniforms[:, None].double(), right=False)", (TEST,)),
    Mutant("accepts-at-zero-odds", SAMPLING, "return self.uniform() < prob", "return self.uniform() <= prob", (TEST,)),
    Mutant("the-same-uniform-twice", SAMPLING, "return self._uniforms.pop()", "return self._uniforms[-1]",
           (TEST,)),
    Mutant("largest-values-of-fewer-blocks", SAMPLING, "blocks.amax(-1).topk(count, ", "blocks.amax(-1).topk(1, ",
           (TEST,)),
]  # fmt: skip
