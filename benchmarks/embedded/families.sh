#!/bin/sh
# A small trained target of another family, an EAGLE-3 and a DSpark head for it, and what they give.
#
#     FAMILY=gpt_oss sh benchmarks/embedded/families.sh     # or qwen3_5, gemma4; in a clone
set -eu

: "${FAMILY:=gemma4}"
: "${TARGETS:=runs/families}"     # directory of the targets, which are trained where they are missing
: "${OUTPUT:=runs/$FAMILY}"
: "${PROMPTS:=500}"               # number of prompts to train on
: "${STEPS:=200}"                 # optimizer steps of a head
: "${NUM_THREADS:=2}"
TARGET=$TARGETS/$FAMILY

python3 benchmarks/embedded/families.py --families "$FAMILY" --num-threads "$NUM_THREADS" --output "$TARGETS"
draftsmith data prompts --source embedded:prose/prompts --split train --limit "$PROMPTS" --target "$TARGET" \
    --output "$OUTPUT/prompts"
draftsmith data prompts --source embedded:prose/prompts --split test --limit 24 --target "$TARGET" \
    --output "$OUTPUT/questions"
draftsmith data responses --data "$OUTPUT/prompts" --target "$TARGET" --temperature 0 --max-new-tokens 48 \
    --batch-size 64 --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"
draftsmith train eagle3 --config eagle3-embedded --version 3-norm --data "$OUTPUT/responses" --target "$TARGET" \
    --max-steps "$STEPS" --tau-prompts 0 --num-threads "$NUM_THREADS" --loggers csv --output "$OUTPUT/eagle3"
draftsmith train dspark --config dspark-embedded --data "$OUTPUT/responses" --target "$TARGET" --num-layers 1 \
    --max-steps "$STEPS" --tau-prompts 0 --num-threads "$NUM_THREADS" --loggers csv --output "$OUTPUT/dspark"
draftsmith eval bench --target "$TARGET" --head "$OUTPUT/eagle3/best,$OUTPUT/dspark/best" \
    --methods ar,eagle3:k=3,eagle3:k=5,dspark --data "$OUTPUT/questions" --split none --limit 24 \
    --max-new-tokens 48 --repeats 1 --output "$OUTPUT/bench"
