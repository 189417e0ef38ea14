#!/bin/sh
# Train an old head on: for a changed target (a fine-tune, a merge, a quantization), or for a slice of the traffic that it
# drafts badly. Measure both heads there and elsewhere, and export the new one.
#
#     HEAD=runs/head/best TARGET=runs/my-finetune SLICE=chats.jsonl sh examples/refresh.sh
#     HEAD=runs/head/best TARGET=MODEL SLICE=requests.jsonl WHERE=language=de OLD_DATA=runs/responses \
#         SERVER=http://localhost:8000 BENCH=traffic.jsonl SPLIT=none sh examples/refresh.sh
#
# Repeated, it continues: finished commands say so and do nothing.
set -euf   # no *: OLD_DATA may have DIR*0.1

: "${HEAD:?a head: what a training or draftsmith import wrote, or as another trainer published it}"
: "${TARGET:?the target: changed, or the one that the slice is asked of}"
: "${SLICE:?prompts to train on, as for data prompts --source; not those of BENCH}"
: "${SLICE_SPLIT:=none}"          # of these prompts; none takes all
: "${WHERE:=}"                    # NAME=VALUE of these prompts, such as language=de; several are separated by spaces
: "${PROMPTS:=1000}"              # number of prompts of the slice; one in twenty is measured on, the others are trained on
: "${OLD_DATA:=}"                 # responses that the head was trained on, separated by spaces; DIR*0.1 takes a tenth
: "${WEIGHT:=3}"                  # how often an epoch has the slice, beside OLD_DATA
: "${SERVER:=}"                   # a server of the target that answers the prompts; without one this process does
: "${SERVER_MODEL:=$TARGET}"      # its name there
: "${BENCH:=embedded:prompts}"    # prompts to measure on, elsewhere than the slice
: "${SPLIT:=test}"                # of these prompts; none takes all
: "${LIMIT:=48}"                  # so many of them, and of the slice's
: "${BY:=task}"                   # what the verdicts are divided by
: "${MAX_NEW_TOKENS:=256}"        # of an answer
: "${CONFIG:=eagle3-embedded}"    # options of the training: a YAML file, or a shipped one
: "${EPOCHS:=$([ -n "$OLD_DATA" ] && echo 1 || echo 4)}"
: "${LR:=$([ -n "$OLD_DATA" ] && echo 1.8e-3 || echo 2.5e-3)}"   # a third, or half, of the rate that trained the head
: "${DRAFTED:=5}"                 # tokens that a round drafts
: "${FORMAT:=vllm}"               # of the export
: "${ENGINE:=}"                   # vllm or llamacpp, which then serves the export and is compared with us
: "${NUM_THREADS:=2}"
: "${OUTPUT:=runs/refresh}"

step() { printf '\n== %s\n' "$*" >&2; }

measure() {   # HEAD METHOD OUTPUT DATA SPLIT [--card]
    head=$1 method=$2 output=$3 data=$4 split=$5
    shift 5
    draftsmith eval bench --target "$TARGET" --head "$head" --methods "$method:k=$DRAFTED" --data "$data" \
        --split "$split" --limit "$LIMIT" --by "$BY" --max-new-tokens "$MAX_NEW_TOKENS" --repeats 1 --temperature 0,1 \
        --output "$output" "$@"
}

compare() { draftsmith eval compare "$@" || [ $? -ne 2 ]; }   # 1 and 3: worse somewhere, or not shown

step "The old head, as a head of the target"
draftsmith import "$HEAD" --target "$TARGET" --output "$OUTPUT/old-head"
# eagle3, dspark, mtp, ...
KIND=$(sed -n 's/^  "kind": "\(.*\)",*$/\1/p' "$OUTPUT/old-head/config.json")

# A target may ship a drafter of its own, an MTP module, which a new head has to beat.
step "The MTP module that ships with the target; an error says that it ships none"
SHIPPED=
if draftsmith import "$TARGET" --format mtp --target "$TARGET" --output "$OUTPUT/module"; then
    SHIPPED=$OUTPUT/shipped
    measure "$OUTPUT/module" mtp "$SHIPPED" "$BENCH" "$SPLIT"
fi

step "Prompts of the slice"
set --
for one in $WHERE; do set -- "$@" --where "$one"; done
draftsmith data prompts --source "$SLICE" --split "$SLICE_SPLIT" "$@" --limit "$PROMPTS" --target "$TARGET" \
    --overlong drop --invalid drop --output "$OUTPUT/prompts"

step "Responses: what the target answers, greedily"
set -- --num-threads "$NUM_THREADS"
[ -z "$SERVER" ] || set -- --engine openai --server "$SERVER" --server-model "$SERVER_MODEL"
draftsmith data responses --data "$OUTPUT/prompts" --target "$TARGET" --temperature 0 \
    --max-new-tokens "$MAX_NEW_TOKENS" "$@" --output "$OUTPUT/responses"

step "The old head, elsewhere and on the prompts of the slice that the training holds out"
measure "$OUTPUT/old-head" "$KIND" "$OUTPUT/before" "$BENCH" "$SPLIT"
measure "$OUTPUT/old-head" "$KIND" "$OUTPUT/before-slice" "$OUTPUT/prompts" val

step "The old head, trained on"
set -- --data "$OUTPUT/responses"
if [ -n "$OLD_DATA" ]; then
    set -- --data "$OUTPUT/responses*$WEIGHT"
    for one in $OLD_DATA; do set -- "$@" --data "$one"; done
else
    echo "Without OLD_DATA it learns from the slice alone, and may get worse elsewhere." >&2
fi
draftsmith train "$KIND" --config "$CONFIG" --init "$OUTPUT/old-head" "$@" --target "$TARGET" --val-share 0.05 \
    --lr "$LR" --epochs "$EPOCHS" --num-threads "$NUM_THREADS" --loggers csv --output "$OUTPUT/head"
measure "$OUTPUT/head/best" "$KIND" "$OUTPUT/after-slice" "$OUTPUT/prompts" val
measure "$OUTPUT/head/best" "$KIND" "$OUTPUT/after" "$BENCH" "$SPLIT" --card

step "The new head (B) against the old one (A), on the slice"
compare "$OUTPUT/before-slice" "$OUTPUT/after-slice"
step "The new head (B) against the old one (A), elsewhere"
compare "$OUTPUT/before" "$OUTPUT/after"
if [ -n "$SHIPPED" ]; then
    step "The new head (B) against the MTP module that ships with the target (A)"
    compare "$SHIPPED" "$OUTPUT/after"
fi

step "The new head for a server, checked"
draftsmith export --format "$FORMAT" --head "$OUTPUT/head/best" --target "$TARGET" --output "$OUTPUT/$FORMAT"
[ -z "$ENGINE" ] || draftsmith check "$OUTPUT/$FORMAT" --target "$TARGET" --head "$OUTPUT/head/best" \
    --engine "$ENGINE" --data "$OUTPUT/prompts"
