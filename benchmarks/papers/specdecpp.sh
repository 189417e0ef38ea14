#!/bin/sh
# Labels of the embedded pair at T=1 and acceptance heads by w_rej and depth, for specdecpp.py. Run again, it continues.
set -e
out=${OUT:-runs/specdecpp} tasks=rename,add_docstring,remove_docstring,add_type_hints,remove_type_hints,wrap_in_try,sort_imports,explain
for set in "train train ${TRAIN_PROMPTS:-480}" "eval dev ${LABEL_PROMPTS:-60}"; do
    # shellcheck disable=SC2086
    set -- $set
    draftsmith data prompts --source embedded:prompts --split "$2" --limit "$3" --tasks $tasks --target embedded:target \
        --output "$out/data/$1/prompts"
    draftsmith data responses --data "$out/data/$1/prompts" --target embedded:target --temperature 1 --batch-size 128 \
        --max-new-tokens "${NEW_TOKENS:-256}" --num-threads 1 --output "$out/data/$1/responses"
    draftsmith data acceptance --data "$out/data/$1/responses" --target embedded:target --head embedded:draft \
        --temperature 1 --num-threads 1 --output "$out/data/$1/acceptance"
done
for weight in ${WEIGHTS:-1 3 6 12}; do
    for depth in ${DEPTHS:-0 1 2 3 4}; do
        draftsmith train acceptance --config acceptance-embedded --data "$out/data/train/acceptance" \
            --val "$out/data/eval/acceptance" --head embedded:draft --w-rej "$weight" --num-blocks "$depth" \
            --epochs "${EPOCHS:-4}" --batch-size 8 --num-threads 1 --loggers csv --output "$out/heads/w$weight-d$depth"
    done
done
