#!/bin/sh
# Make smollm2:eagle3 again, its data and its training: sh benchmarks/embedded/smollm2.sh runs/smollm2 CHATS ARTICLES
#
# CHATS, ARTICLES: files of prompts (data prompts --source); benchmarks/README.md says which the shipped head had. The
# requests that the target writes itself are made here. Six CPU hours. Given again, it continues where it was ended.
# TARGET, CONFIG, ENGINE, OWN, MINUTES change what is below, to try it in a minute.
set -e
out=$1 chats=$2 articles=$3
target=${TARGET:-smollm2} config=${CONFIG:-smollm2-135m-eagle3} engine=${ENGINE:-own} minutes=${MINUTES:-26 44}

draftsmith() { python -m draftsmith "$@"; }
responses() { draftsmith data responses --target "$target" --engine "$engine" --dtype bfloat16 "$@"; }
states() { # of greedy answers. $1: name, $2: source, $3: longest prompt
    draftsmith data prompts --source "$2" --target "$target" --turns first --max-length "$3" --overlong drop --invalid drop \
        --output "$out/$1/prompts"
    responses --data "$out/$1/prompts" --temperature 0 --max-new-tokens 192 --output "$out/$1/responses"
    draftsmith data features --data "$out/$1/responses" --drafter eagle3 --target "$target" --dtype bfloat16 \
        --output "$out/$1/features"
}
train() {
    draftsmith train eagle3 --config "$config" --target "$target" --ttt-steps-after 0 --max-length 1024 --val-share 0.02 \
        --data "$out/chats/features" "$@"
}

draftsmith data prompts --source self --limit "${OWN:-1400}" --target "$target" --output "$out/begun"
responses --data "$out/begun" --temperature 0.8 --top-p 0.95 --max-new-tokens 64 --output "$out/turns"
states chats "$chats" 300
states articles "$articles" 800
states own "$out/turns" 300

train --schedule constant --minutes "${minutes% *}" --output "$out/first"
train --data "$out/articles/features" --data "$out/own/features" --init "$out/first/last" --minutes "${minutes#* }" \
    --output "$out/head"
echo "Ship it: python benchmarks/embedded/ship.py smollm2 $out/head/best"
