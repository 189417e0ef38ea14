#!/bin/sh
# An MTP module in its target's checkpoint, stale after a fine-tune, trained on, and made anew.
#
#     sh benchmarks/embedded/mtp.sh     # in a clone
set -eu

: "${TARGETS:=runs/families}"     # directory of the targets, which are trained where they are missing
: "${OUTPUT:=runs/mtp}"
: "${STEPS:=200}"                 # optimizer steps of the module of the first target
: "${MORE_STEPS:=150}"            # of the stale module, trained on
: "${FRESH_STEPS:=350}"           # of a new module for the fine-tune
: "${NUM_THREADS:=2}"
OLD=$TARGETS/qwen3_5 NEW=$TARGETS/qwen3_5-tuned

module() {   # OUTPUT DATA TARGET STEPS ...
    output=$1 data=$2 target=$3 steps=$4
    shift 4
    draftsmith train mtp --config mtp-embedded --data "$data" --target "$target" --max-steps "$steps" \
        --num-threads "$NUM_THREADS" --loggers csv --output "$output" "$@"
}

python3 benchmarks/embedded/families.py --families qwen3_5 --tuned --num-threads "$NUM_THREADS" --output "$TARGETS"

draftsmith data prompts --source embedded:prose/prompts --split train --limit 1000 --target "$OLD" \
    --output "$OUTPUT/prompts"
draftsmith data responses --data "$OUTPUT/prompts" --target "$OLD" --temperature 0 --max-new-tokens 48 \
    --batch-size 64 --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"
module "$OUTPUT/module" "$OUTPUT/responses" "$OLD" "$STEPS"
draftsmith export --format mtp --head "$OUTPUT/module/best" --target "$OLD" --output "$OUTPUT/target"

draftsmith data prompts --source embedded:prompts --split train --limit 600 --target "$NEW" --overlong drop \
    --output "$OUTPUT/tuned-prompts"
draftsmith data prompts --source embedded:prompts --split test --limit 24 --target "$NEW" --overlong drop \
    --output "$OUTPUT/questions"
draftsmith data responses --data "$OUTPUT/tuned-prompts" --target "$NEW" --temperature 0 --max-new-tokens 64 \
    --batch-size 64 --num-threads "$NUM_THREADS" --output "$OUTPUT/tuned-responses"
draftsmith import "$OUTPUT/module/best" --target "$NEW" --output "$OUTPUT/stale"
module "$OUTPUT/refreshed" "$OUTPUT/tuned-responses" "$NEW" "$MORE_STEPS" --init "$OUTPUT/module/best" --lr 2.5e-3
module "$OUTPUT/fresh" "$OUTPUT/tuned-responses" "$NEW" "$FRESH_STEPS"
draftsmith eval bench --target "$NEW" --head "$OUTPUT/stale,$OUTPUT/refreshed/best,$OUTPUT/fresh/best" \
    --methods ar,mtp:k=5 --data "$OUTPUT/questions" --split none --limit 16 --max-new-tokens 64 --repeats 1 \
    --temperature 0,1 --output "$OUTPUT/bench"
