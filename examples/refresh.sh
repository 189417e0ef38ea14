#!/bin/sh
# Train an old head on for a changed target (a fine-tune, a merge, a quantization), measure both, and export the new one.
#
#     HEAD=runs/head/best TARGET=runs/my-finetune SOURCE=chats.jsonl sh examples/refresh.sh
#
# Repeated, it continues: finished commands say so and do nothing.
set -eu

: "${HEAD:?a head: what a training or draftsmith import wrote, or as another trainer published it}"
: "${TARGET:?the changed target}"
: "${SOURCE:?prompts to train on, as for data prompts; not those of BENCH}"
: "${SOURCE_SPLIT:=none}"         # of these prompts; none takes all
: "${PROMPTS:=1000}"              # number of prompts to train on
: "${BENCH:=embedded:prompts}"    # prompts to measure on
: "${SPLIT:=test}"                # of these prompts; none takes all
: "${LIMIT:=48}"                  # so many of them
: "${MAX_NEW_TOKENS:=256}"        # of an answer
: "${CONFIG:=eagle3-embedded}"    # options of the training: a YAML file, or a shipped one
: "${EPOCHS:=4}"
: "${LR:=2.5e-3}"                 # half of the rate that the head was trained with
: "${DRAFTED:=5}"                 # tokens that a round drafts
: "${FORMAT:=vllm}"               # of the export
: "${NUM_THREADS:=2}"
: "${OUTPUT:=runs/refresh}"

step() { printf '\n== %s\n' "$*" >&2; }

measure() {   # HEAD METHOD OUTPUT [--card]
    head=$1 method=$2 output=$3
    shift 3
    draftsmith eval bench --target "$TARGET" --head "$head" --methods "$method:k=$DRAFTED" --data "$BENCH" \
        --split "$SPLIT" --limit "$LIMIT" --max-new-tokens "$MAX_NEW_TOKENS" --repeats 1 --temperature 0,1 \
        --output "$output" "$@"
}

compare() { draftsmith eval compare "$@" || [ $? -ne 2 ]; }   # 1 and 3: worse somewhere, or not shown

step "The old head, as a head of the changed target"
draftsmith import "$HEAD" --target "$TARGET" --output "$OUTPUT/old-head"
# eagle3, dspark, mtp, ...
KIND=$(sed -n 's/^  "kind": "\(.*\)",*$/\1/p' "$OUTPUT/old-head/config.json")

# A target may ship a drafter of its own, an MTP module, which a new head has to beat.
step "The MTP module that ships with the target; an error says that it ships none"
SHIPPED=
if draftsmith import "$TARGET" --format mtp --target "$TARGET" --output "$OUTPUT/module"; then
    SHIPPED=$OUTPUT/shipped
    measure "$OUTPUT/module" mtp "$SHIPPED"
fi

step "Prompts"
draftsmith data prompts --source "$SOURCE" --split "$SOURCE_SPLIT" --limit "$PROMPTS" --target "$TARGET" \
    --overlong drop --invalid drop --output "$OUTPUT/prompts"

step "Responses: what the changed target answers, greedily"
draftsmith data responses --data "$OUTPUT/prompts" --target "$TARGET" --temperature 0 \
    --max-new-tokens "$MAX_NEW_TOKENS" --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"

step "The old head on the changed target"
measure "$OUTPUT/old-head" "$KIND" "$OUTPUT/before"

step "The old head, trained on"
draftsmith train "$KIND" --config "$CONFIG" --init "$OUTPUT/old-head" --data "$OUTPUT/responses" --target "$TARGET" \
    --lr "$LR" --epochs "$EPOCHS" --num-threads "$NUM_THREADS" --loggers csv --output "$OUTPUT/head"
measure "$OUTPUT/head/best" "$KIND" "$OUTPUT/after" --card

step "The new head (B) against the old one (A)"
compare "$OUTPUT/before" "$OUTPUT/after"
if [ -n "$SHIPPED" ]; then
    step "The new head (B) against the MTP module that ships with the target (A)"
    compare "$SHIPPED" "$OUTPUT/after"
fi

step "The new head for a server, checked"
draftsmith export --format "$FORMAT" --head "$OUTPUT/head/best" --target "$TARGET" --output "$OUTPUT/$FORMAT"
