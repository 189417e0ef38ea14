#!/bin/sh
# The whole pipeline on the models that ship: prompts, the target's answers, an acceptance head (SpecDec++), an EAGLE
# and an EAGLE-3 head, their settings chosen on one split and measured on another, an export and a report.
#
#     make demo                           # in a clone, 7 minutes of two CPU cores
#     sh examples/demo.sh                 # where draftsmith is installed
#     STEPS_EAGLE3=1800 OUTPUT=runs/demo/long sh examples/demo.sh
#
# Repeated, it continues: finished commands say so and do nothing.
set -eu

: "${OUTPUT:=runs/demo/quick}"
: "${TRAIN_PROMPTS:=960}"        # 0 takes all of the shipped training prompts
: "${MAX_NEW_TOKENS:=256}"       # of an answer
: "${EPOCHS_ACCEPTANCE:=7}"
: "${STEPS_EAGLE:=840}"
: "${STEPS_EAGLE3:=450}"
: "${VAL_EVERY:=210}"            # steps between validations
: "${DEV_PROMPTS:=9}"            # prompts to choose the methods' settings on
: "${TEST_PROMPTS:=16}"          # prompts to measure on
: "${REPEATS:=2}"                # runs of every method on every prompt
: "${NUM_THREADS:=2}"            # of the data stages; the bench uses one
# Tasks whose greedy answers end in loops are left out: any drafter would look good on them.
TASKS=add_docstring,add_type_hints,remove_docstring,remove_type_hints,rename,sort_imports,wrap_in_try

step() { printf '\n== %s\n' "$*" >&2; }

step "Prompts"
draftsmith data prompts --source embedded:prompts --split train --tasks "$TASKS" --limit "$TRAIN_PROMPTS" \
    --target embedded:target --output "$OUTPUT/prompts"

step "Responses: the target answers, greedily, as it will decode"
draftsmith data responses --data "$OUTPUT/prompts" --target embedded:target --temperature 0 --batch-size 128 \
    --max-new-tokens "$MAX_NEW_TOKENS" --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"

step "Labels: which drafted tokens does the target keep?"
draftsmith data acceptance --data "$OUTPUT/responses" --target embedded:target --head embedded:draft \
    --temperature 0 --num-threads "$NUM_THREADS" --output "$OUTPUT/acceptance"

step "Features: the target's hidden states, stored once"
draftsmith data features --data "$OUTPUT/responses" --target embedded:target --num-threads "$NUM_THREADS" \
    --output "$OUTPUT/features"

step "Acceptance head (SpecDec++): when to stop drafting"
draftsmith train acceptance --config acceptance-embedded --data "$OUTPUT/acceptance" --head embedded:draft \
    --epochs "$EPOCHS_ACCEPTANCE" --loggers csv --output "$OUTPUT/acceptance-head"

step "EAGLE head, from the stored states"
draftsmith train eagle --config eagle-embedded --data "$OUTPUT/features" --target embedded:target \
    --max-steps "$STEPS_EAGLE" --val-every "$VAL_EVERY" --loggers csv --output "$OUTPUT/eagle-head"

step "EAGLE-3 head: the target reads the answers in the training itself"
draftsmith train eagle3 --config eagle3-embedded --data "$OUTPUT/responses" --target embedded:target \
    --max-steps "$STEPS_EAGLE3" --val-every "$VAL_EVERY" --loggers csv --output "$OUTPUT/eagle3-head"

# Draft lengths and thresholds are chosen on prompts that the measurement does not use.
step "Settings, chosen on the dev prompts"
HEADS="embedded:draft,$OUTPUT/eagle-head/best,$OUTPUT/eagle3-head/best"
SETTINGS=spec:k=4,spec:k=6,spec:k=8,specdec++:h=0.3:calibrated=on,specdec++:h=0.6:calibrated=on
SETTINGS=$SETTINGS,eagle:k=4,eagle:k=5,eagle:k=6,eagle3:k=4,eagle3:k=5,eagle3:k=6
SETTINGS=$SETTINGS,online,online:drafter=eagle,online:drafter=eagle3
draftsmith eval bench --target embedded:target --head "$HEADS" --acceptance "$OUTPUT/acceptance-head/best" \
    --data embedded:prompts --split dev --tasks "$TASKS" --methods "$SETTINGS" --limit "$DEV_PROMPTS" \
    --max-new-tokens "$MAX_NEW_TOKENS" --repeats 1 --output "$OUTPUT/dev"

# The fastest setting of each method; `ar` decodes without a draft and is always measured.
FASTEST=$(python3 - "$OUTPUT/dev/results.json" <<'PYTHON'
import json, sys
best = {}
for row in sorted(json.load(open(sys.argv[1]))["methods"], key=lambda row: row["tokens_per_s"]):
    best[row["method"].split(":")[0]] = row["method"]
print(",".join(best[name] for name in sorted(best) if name != "ar"))
PYTHON
)

step "Measurement on the test prompts; the numbers also go into the heads' cards"
draftsmith eval bench --target embedded:target --head "$HEADS" --acceptance "$OUTPUT/acceptance-head/best" \
    --data embedded:prompts --split test --tasks "$TASKS" --methods "$FASTEST" --limit "$TEST_PROMPTS" \
    --max-new-tokens "$MAX_NEW_TOKENS" --repeats "$REPEATS" --card --traces 1 --output "$OUTPUT/test"

step "The EAGLE head for vLLM, checked"
draftsmith export --format vllm --head "$OUTPUT/eagle-head/best" --output "$OUTPUT/vllm"

step "The report"
draftsmith eval report "$OUTPUT/test" --output "$OUTPUT/report.html"
