"""Mutants of replayed rollouts, of the labels and of the losses."""

from __future__ import annotations

from mutants.mutant import Mutant, replayed

REPLAY, CHAINS, COUPLING = (f"eval/replay/{name}.py" for name in ("replay", "chains", "coupling"))
RULES, REPLAYED, STOP_RULES_TEST, COUPLED = (
    f"tests/eval/replay/{name}_test.py" for name in ("rules", "replay", "stop_rules", "coupling")
)
LOSSES, METRICS = "modules/losses.py", "modules/metrics.py"
EAGLE = "modules/drafters/eagle/head.py"
LOSS_TEST, METRIC_TEST = "tests/modules/losses_test.py", "tests/modules/metrics_test.py"
LABELS, ROLLOUTS, DATASETS = "data/mixed_text.py", "data/rollouts.py", "data/store/datasets.py"
LABEL_TEST, ROLLOUT_TEST, DATASET_TEST = (
    f"tests/data/{name}_test.py" for name in ("acceptance", "rollouts", "store/datasets")
)
COSTS, COST_TEST = "eval/cost/machine.py", "tests/eval/cost/machine_test.py"

STORED, START = "train/stored_tokens.py", "train/acceptance_start.py"
FITTING = "modules/acceptance/fitting.py"
GAIN, GAIN_TEST = "eval/stop_gain.py", "tests/eval/stop_gain_test.py"
START_TEST = "tests/train/acceptance_start_test.py"
REPETITION, SUMMARY = "data/text/repetition.py", "eval/bench/summary.py"
REPETITION_TEST, SUMMARY_TEST = "tests/data/text/repetition_test.py", "tests/eval/bench/summary_test.py"

MUTANTS = [
    # -- measuring
    Mutant("peak-of-pages-that-were-free", "benchmarks/step_peak.py", "    ctypes.CDLL(None).malloc_trim(0)\n", "",
           ("tests/benchmarks/throughput_test.py",)),
    # -- repetitions
    Mutant("repetition-of-a-token-less", REPETITION, "ids[at - size + 1 : at + 1]", "ids[at - size + 2 : at + 1]",
           (REPETITION_TEST,)),
    Mutant("repetition-of-the-last-place", REPETITION,
           "first.setdefault(gram, FROM_ANSWER if mask[at] else FROM_PROMPT)",
           "first[gram] = FROM_ANSWER if mask[at] else FROM_PROMPT", (REPETITION_TEST,)),
    Mutant("repetition-of-prompts-counted", REPETITION, "counts[origin] += bool(answered)", "counts[origin] += 1",
           (REPETITION_TEST,)),
    Mutant("repetition-rounds-begin-with-the-prefill", SUMMARY, '[len(prompt) :], row["prefill_emitted"]',
           "[len(prompt) :], 0", (SUMMARY_TEST,)),
    # -- replays
    Mutant("replay-confidence-stops-at-its-threshold", REPLAY,
           "minimum - 1 : maximum]) < t", "minimum - 1 : maximum]) <= t", (RULES,)),
    Mutant("replay-minimum-one-late", REPLAY, "rollouts.log_q[:, minimum - 1 : maximum]",
           "np.roll(rollouts.log_q, -1, 1)[:, minimum - 1 : maximum]", (RULES,)),
    Mutant("replay-maximum-is-no-end", REPLAY, "    stop[:, -1] = True\n", "", (RULES,)),
    Mutant("replay-oracle-drafts-the-last-token", REPLAY, "lengths - 1 - rollouts.start", "lengths - rollouts.start",
           (RULES,)),
    Mutant("replay-drafts-past-the-last-token", REPLAY, "answer.room - emitted - 1", "answer.room - emitted",
           (replayed("eagle2:nodes=7:depth=2:topk=3"),)),
    Mutant("replay-emits-past-the-end", REPLAY, "min(accepted + 1, length - emitted)", "accepted + 1",
           (replayed("spec:k=4"),)),
    Mutant("replay-self-verify-stops-at-its-threshold", REPLAY, "entropies > policy.threshold",
           "entropies >= policy.threshold", (RULES,)),
    Mutant("replay-self-verify-never-forgets", REPLAY, "        policy.reset()\n", "", (replayed("self-verify:k=9"),)),
    Mutant("replay-nothing-behind-an-end-token", REPLAY,
           "rollouts.num_accepted if rollouts.past_end is None else rollouts.num_accepted + rollouts.past_end",
           "rollouts.num_accepted", (replayed("spec:k=4"),)),
    Mutant("replay-tree-one-node-more", REPLAY, "(rank >= taken)", "(rank > taken)", (RULES,)),
    Mutant("predicted-replay-hears-of-the-last-round", REPLAY, "        last = (0, 0)  #",
           "        last = last if traces else (0, 0)  #", (STOP_RULES_TEST,)),
    Mutant("predicted-replay-late-predicts-at-once", REPLAY, "view.num_drafted - 1 - self.late",
           "view.num_drafted - 1", (STOP_RULES_TEST,)),
    Mutant("coupling-rejects-to-the-wrong-residual", COUPLING, "self._free.draw(residual(probs, distribution))",
           "self._free.draw(residual(distribution, probs))", (COUPLED,)),
    Mutant("coupling-side-by-side-to-the-wrong-residual", COUPLING, "residual(distributions, target), distributions)",
           "residual(target, distributions), distributions)", (STOP_RULES_TEST,)),
    Mutant("coupling-stays-on-the-text-after-a-rejection", COUPLING, "        self._on_text = False\n        return",
           "        return", (COUPLED,)),
    Mutant("coupling-odds-upside-down", COUPLING, "* distribution[token].item() < probs[token].item()",
           "* probs[token].item() < distribution[token].item()", (COUPLED,)),
    Mutant("coupling-side-by-side-stays-on-the-text", COUPLING, "= on_text & (tokens == wanted).cpu()",
           "= on_text", (STOP_RULES_TEST,)),
    Mutant("rollouts-labels-below-the-first-rejection", CHAINS, "(offset <= equal[:, None])",
           "(offset <= equal[:, None] + 1)", (REPLAYED,)),
    Mutant("rollouts-accepted-past-the-answer", CHAINS, "accepted = np.minimum(equal, left)", "accepted = equal",
           (REPLAYED,)),
    # -- costs
    Mutant("costs-first-step-twice", COSTS, "cost.first + (step.draft_calls - 1) * cost.step",
           "cost.first + step.draft_calls * cost.step", (COST_TEST,)),
    Mutant("costs-no-root", COSTS, "self.target_s(step.num_drafted + 1, ", "self.target_s(step.num_drafted, ",
           (COST_TEST,)),
    # -- labels
    Mutant("labels-one-position-late", LABELS, "torch.tensor(mask).nonzero()[:, 0] - 1 for",
           "torch.tensor(mask).nonzero()[:, 0] for",
           (LABEL_TEST,)),
    Mutant("labels-p-at-temperature-1", LABELS, "probabilities(target.lm_head(target_hidden[piece]), params)",
           "probabilities(target.lm_head(target_hidden[piece]), SamplingParams(1.0))", (LABEL_TEST,)),
    Mutant("labels-odds-upside-down", LABELS, "(p / q).clamp(max=1.0)", "(q / p).clamp(max=1.0)", (LABEL_TEST,)),
    Mutant("labels-overlap-of-the-union", LABELS, "torch.minimum(target_prob, draft_prob)",
           "torch.maximum(target_prob, draft_prob)", (LABEL_TEST,)),
    Mutant("mixing-upside-down", DATASETS, "row, len(places)) >= self.mix", "row, len(places)) < self.mix",
           (DATASET_TEST,)),
    Mutant("mixing-the-same-in-every-epoch", DATASETS, 'row_uniforms(f"mix/{self.seed}", epoch, row, ',
           'row_uniforms(f"mix/{self.seed}", 0, row, ', (DATASET_TEST,)),
    Mutant("mixing-the-same-in-every-row", DATASETS, 'row_uniforms(f"mix/{self.seed}", epoch, row, ',
           'row_uniforms(f"mix/{self.seed}", epoch, 0, ', (DATASET_TEST,)),
    Mutant("mixing-labels-of-the-targets-tokens", DATASETS, "values[drafted] = self._lists[name][row][own]",
           "values[places] = self._lists[name][row]", (DATASET_TEST,)),
    Mutant("mixing-counts-the-targets-tokens", DATASETS, '"loss_mask": torch.from_numpy(drafted)}',
           '"loss_mask": torch.from_numpy(self.answers[row])}', (DATASET_TEST,)),
    Mutant("mixing-keeps-the-targets-tokens", DATASETS,
           '        ids[drafted] = self._lists["draft_ids"][row][own]\n',
           "", (DATASET_TEST,)),
    Mutant("rollouts-repetitions-of-the-drawn-token", ROLLOUTS, "q.gather(-1, followed.clamp_min(0)[:, None])",
           "q.gather(-1, tokens[:, None])", (ROLLOUT_TEST,)),
    Mutant("replay-undrawn-heads-miss-the-mean", CHAINS, "mean_score(halves[mask].double(), followed.double().cpu())",
           "halves[mask].double()", (STOP_RULES_TEST,)),
    Mutant("rollouts-reached-not-shifted", ROLLOUTS, "torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)",
           "passed", (ROLLOUT_TEST,)),
    Mutant("rollouts-go-on-behind-an-end-token", ROLLOUTS, "(accept_prob * ~ends).cumprod(-1)",
           "accept_prob.cumprod(-1)",
           (ROLLOUT_TEST,)),
    Mutant("rollouts-begin-before-the-decoder-may", ROLLOUTS, "range(max(first + 1, min_start), ",
           "range(max(first, min_start), ", (ROLLOUT_TEST,)),
    Mutant("rollouts-past-the-context", ROLLOUTS, "self.context - self.depth + 1", "self.context - self.depth + 2",
           (ROLLOUT_TEST,)),
    Mutant("rollouts-short-texts-all-at-one-temperature", ROLLOUTS, "(number + i) % len(self.sampling)",
           "i % len(self.sampling)", (ROLLOUT_TEST,)),
    Mutant("rollouts-unreached-tokens-count", "data/store/rollout_dataset.py", '"loss_mask": weight > 0}',
           '"loss_mask": weight >= 0}', (ROLLOUT_TEST,)),
    Mutant("rollouts-all-tokens-weigh-the-same", "train/drafted_tokens.py", "weight=data.weight[mask]",
           "weight=torch.ones_like(data.weight[mask])", ("tests/train/rollouts_test.py",)),
    Mutant("rollouts-states-after-for-heads-of-before", "train/drafted_tokens.py",
           "states[:, 1:] if late else states[:, :depth]", "states[:, -depth:]",
           ("tests/train/rollouts_test.py::test_a_draft_of_one_token_is_read_too",)),
    # -- losses and metrics
    Mutant("loss-weights-swapped", LOSSES, "w_acc * prob * accept + w_rej * (1 - prob) * reject",
           "w_rej * prob * accept + w_acc * (1 - prob) * reject", (LOSS_TEST,)),
    Mutant("loss-tokens-all-weigh-the-same", LOSSES,
           "torch.ones_like(prob) if batch.weight is None else batch.weight[batch.loss_mask].float()",
           "torch.ones_like(prob)", ("tests/train/rollouts_test.py",)),
    Mutant("loss-kl-plus-the-entropy", LOSSES, "(1 - prob) * reject) - entropy)", "(1 - prob) * reject) + entropy)",
           (LOSS_TEST,)),
    Mutant("loss-token-weight", EAGLE, "token_weight: float = 0.1,\n    decay",
           "token_weight: float = 1.0,\n    decay",
           (LOSS_TEST,)),
    Mutant("loss-gradient-without-the-target", LOSSES, "logits.sub_(log_norm).exp_().sub_(target_prob)",
           "logits.sub_(log_norm).exp_()", (LOSS_TEST,)),
    Mutant("loss-gradient-of-masked-tokens", LOSSES, "pull(logits) * keep[part, None].to(states.dtype)", "pull(logits)",
           (LOSS_TEST, "tests/train/eagle_test.py")),
    Mutant("loss-top3-of-two", LOSSES, "logits.topk(min(3, logits.shape[-1]), dim=-1)",
           "logits.topk(min(2, logits.shape[-1]), dim=-1)", (LOSS_TEST,)),
    Mutant("loss-mean-over-the-last-steps-tokens", EAGLE, "torch.tensor(len(wanted), device=wanted.device)",
           "kept[-1].sum()", (LOSS_TEST,)),
    Mutant("loss-all-steps-weigh-the-same", EAGLE, "[decay**i for i in range(len(passes))]",
           "[1.0 for i in range(len(passes))]", ("tests/train/eagle_test.py",)),
    Mutant("auc-ties-count-whole", METRICS, "(below + negatives / 2)", "(below + negatives)", (METRIC_TEST,)),
    Mutant("ece-of-unsorted-tokens", METRICS, "order = prob.argsort(stable=True)",
           "order = torch.arange(len(prob))", (METRIC_TEST,)),
    # -- what ending drafts would gain
    Mutant("gain-of-answers-that-were-learned", GAIN, "own, kept = fold == held, fold != held",
           "own, kept = fold == held, fold >= 0", (GAIN_TEST,)),
    Mutant("gain-over-the-best-length-of-all", GAIN, "best = max(fixed, key=lambda played: played.pace(c, kept))",
           "best = max(fixed, key=lambda played: played.pace(c, fold >= 0))", (GAIN_TEST,)),
    Mutant("gain-folds-part-a-conversation", GAIN, "permutation(count)[rounds.owner] % FOLDS",
           "permutation(len(rounds.owner)) % FOLDS", (GAIN_TEST,)),
    Mutant("gain-rounds-begin-at-the-last-token", GAIN, "begins[:, place + 1 : place + 1 + width] +=",
           "begins[:, place : place + width] +=", (GAIN_TEST,)),
    Mutant("gain-verified-beyond-the-draft", GAIN, "np.where(drafted, reached, 0.0), np", "reached, np", (GAIN_TEST,)),
    Mutant("gain-online-fitted-on-all", GAIN, 'index("repeat")]], rounds.tokens_of(kept)',
           'index("repeat")]], rounds.tokens_of(kept | True)', (GAIN_TEST,)),
    Mutant("gain-head-fitted-on-all", GAIN, "apart = kept & (", "kept = kept | True; apart = kept & (", (GAIN_TEST,)),
    Mutant("gain-answers-of-a-conversation-in-one", GAIN, "(np.diff(places) != 1) | (np.diff(owner) != 0)",
           "(np.diff(owner) != 0)", (GAIN_TEST,)),
    Mutant("gain-of-a-head-by-chance", GAIN, "self.over_online.low > 0 and self", "self", (GAIN_TEST,)),
    Mutant("gain-pace-stays-the-fixed-lengths", GAIN,
           "before, pace, acceptance = pace, found.pace(c, kept), found.acceptance(kept)", "before = pace",
           (GAIN_TEST,)),
    # -- where an acceptance head begins
    Mutant("stored-tokens-of-every-weight", STORED, ">= LEAST_WEIGHT]", ">= 0]", (START_TEST,)),
    Mutant("stored-blocks-in-the-answers-order", STORED, "self.tokens = tokens[order]",
           "self.tokens = tokens[order.sort().values]", (START_TEST,)),
    Mutant("stored-owner-of-the-answer", STORED, '"owner": owner})', '"owner": batch.owner})', (START_TEST,)),
    Mutant("start-without-the-weights-correction", FITTING, "bias - float(head.corrected(0.0))", "bias", (START_TEST,)),
    Mutant("start-of-tokens-that-weigh-alike", FITTING, "RIDGE, weight)", "RIDGE)", (START_TEST,)),
    Mutant("start-with-the-worst-size", START, "key=lambda tried: tried.kl)", "key=lambda tried: -tried.kl)",
           (START_TEST,)),
    Mutant("start-is-not-validated", "train/acceptance_objective.py", "self.validates_first = reader.weighted",
           "self.validates_first = False", (START_TEST,)),
]  # fmt: skip
