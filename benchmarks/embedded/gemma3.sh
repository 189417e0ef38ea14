#!/bin/sh
# Make gemma3:eagle3 again, its data and its training: sh benchmarks/embedded/gemma3.sh runs/gemma3 TEXTS
#
# TEXTS: a file of prompts that a base model continues; benchmarks/README.md says which the shipped head had. Half an
# hour. Given again, it continues where it was ended. MINUTES and LIMIT change what is below, to try it in a minute.
set -e
out=$1 texts=$2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

draftsmith() { python -m draftsmith "$@"; }

draftsmith data prompts --source "$texts" --target gemma3 --chat-template none --max-length 400 --overlong drop \
    --invalid drop --output "$out/prompts"
draftsmith data responses --data "$out/prompts" --target gemma3 --temperature 0 --max-new-tokens 96 --batch-size 64 \
    --dtype float32 --limit "${LIMIT:-512}" --output "$out/responses"
draftsmith data features --data "$out/responses" --target gemma3 --drafter eagle3 --dtype float32 --output "$out/states"
draftsmith train eagle3 --config smollm2-135m-eagle3 --target gemma3 --data "$out/states" --draft-vocab 6144 \
    --ttt-steps-after 0 --val-share 0.04 --epochs 100 --minutes "${MINUTES:-12}" --tau-prompts 0 --output "$out/head"
echo "Ship it: python benchmarks/embedded/ship.py gemma3 $out/head/best"
