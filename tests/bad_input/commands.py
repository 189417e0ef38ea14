"""What every command may be given that is not there, is of another kind, or has no use: paths, names, ranges."""

from __future__ import annotations

from bad_input.row import Row

TARGET = "--target {target} "
OUT = "--output {out} "
BENCH = f"eval bench {TARGET}--data {{chats}} --limit 1 --repeats 1 --max-new-tokens 4 {OUT}"
SERVE = f"{TARGET}--engine vllm --data {{chats}} "
TRAIN = "train eagle --data x --target y --output z"

ROWS = [
    # No command, or another one's words.
    Row("a misspelt command", "eval bnech", ("eval bnech", "eval bench")),
    Row("words without a name", "data prompts x y --source s --target t --output {out}", ("x", "--name value")),
    Row("no value", "decode Hi --target", ("--target", "found no --target")),
    Row("a fraction of a step", f"{TRAIN} --max-steps 1.5", ("--max-steps", "1.5", "int")),
    Row("no such config", "train eagle --config nosuch", ("nosuch", "eagle-embedded")),
    Row("doctor: a flag that is none", "doctor --json maybe", ("maybe",)),
    # decode.
    Row("decode: no such method", f"decode Hi {TARGET}--method nosuch", ("nosuch",)),
    Row("decode: a draft that is not there", f"decode Hi {TARGET}--head ./nosuch", ("./nosuch",)),
    Row("export: a training", f"export --format vllm --head {{eagle_run}} {OUT}", ("eagle-run", "Pass", "/best")),
    Row("export: a head of another kind", f"export --format llamacpp --head {{eagle}} {TARGET}{OUT}",
        ("an eagle head", "llamacpp")),
    # Stages on what is no artifact, or another one.
    Row("acceptance: no drafter", f"data acceptance --data {{responses}} {TARGET}{OUT}", ("--head",)),
    Row("train: a server and readers", f"{TRAIN} --server http://h --num-workers 2", ("num_workers", "with --server")),
    Row("launch vllm: no target", "launch vllm", ("target", "--target")),
    Row("features: no such drafter", f"data features --data {{responses}} {TARGET}{OUT}--drafter nosuch",
        ("drafter", "nosuch", "eagle")),
    Row("diagnose: no drafter", f"diagnose {{acceptance}} --data {{responses}} {TARGET}", ("acceptance", "a drafter")),
    # Training and its plan.
    Row("train eagle: no loss", f"train eagle --data {{features}} {TARGET}{OUT}--feature-weight 0 --token-weight 0",
        ("feature_weight, token_weight",)),
    Row("train acceptance: a head without its target", f"train acceptance --data {{labels}} --head {{eagle}} {OUT}",
        ("target", "eagle")),
    Row("train eagle3: a strategy that splits its lm_head",
        f"train eagle3 --data {{features}} {TARGET}{OUT}--strategy deepspeed_stage_3", ("strategy", "stage 1 or 2")),
    Row("train medusa: no heads", f"train medusa --data {{features}} {TARGET}{OUT}--num-heads 0", ("num_heads",)),
    Row("train eagle: no such file of a loss", f"train eagle --data {{features}} {TARGET}{OUT}--loss mine.py:focal",
        ("loss", "mine.py:focal", "FILE.py:FUNCTION")),
    Row("train hydra: no such loss", f"train hydra --data {{features}} {TARGET}{OUT}--loss mean", ("loss", "mean")),
    Row("train draft: a layer that is not there", f"train draft --data {{features}} {TARGET}{OUT}--keep-layers 0,99",
        ("keep_layers", "0 99", "from 0 to")),
    Row("train eagle3: a window that hides the draft's own tokens",
        f"train eagle3 --data {{features}} {TARGET}{OUT}--window 7 --ttt-steps 7",
        ("window", "more than the 7 tokens of a draft")),
    Row("train dspark: a block of no tokens", f"train dspark --data {{features}} {TARGET}{OUT}--block 0", ("block",)),
    Row("train dflash2: a selector among no tokens",
        f"train dflash2 --data {{features}} {TARGET}{OUT}--selector-top-k 0", ("selector_top_k",)),
    Row("train mtp: a target of a family without MTP modules",
        f"train mtp --data {{features}} {TARGET}{OUT}", ("target", "qwen3_next", "eagle3 head")),
    Row("train eagle: a plan for no target", "train eagle --plan --data x --output y --target ./nosuch", ("./nosuch",)),
    # Launchers check the command before anything starts.
    Row("torchrun: a command of one process", "launch torchrun --nproc-per-node 2 -- decode Hi", ("decode",)),
    Row("slurm: a name with a command in it", f"launch slurm --job-name x;id -- {TRAIN}", ("job_name",)),
    # The bench and what reads its runs.
    Row("bench: no such split", BENCH + "--methods ar --split nosuch", ("prompts", "--split")),
    Row("compare: no run", "eval compare {bench} {target}", ("target", "results.json")),
    # Heads elsewhere.
    Row("export: a head of another kind", f"export --format vllm --head {{acceptance}} {OUT}", ("vllm",)),
    Row("export: onto the head", "export --format vllm --head {eagle} --output {eagle}", ("eagle", "new directory")),
    Row("check: no target", "check {eagle} --format vllm", ("--target",)),
    Row("served: no GGUF files", "eval served --target {target} --head {exported} --data {chats} --output {out}",
        ("draft", "two GGUF files", "--format llamacpp")),
    Row("served: more requests than prompts",
        "eval served --target {target} --head b --data {chats} --output {out} --concurrency 999",
        ("concurrency", "999 requests at once", "--limit")),
    Row("check: an engine that is no python", f"check {{exported}} {SERVE}--engine-path /bin/false",
        ("engine", "exit status 1", ".log")),
    Row("import: a model", f"import {{target}} {OUT}", ("LlamaForCausalLM", "--head")),
    # Numbers of no use.
    Row("a negative seed", f"{TRAIN} --seed -1", ("--seed", "-1")),
    Row("a rate that is NaN", f"{TRAIN} --lr nan", ("--lr", "finite")),
    Row("threads without end", BENCH + "--num-threads 1000000000", ("--num-threads", "1024")),
    Row("watch: a head without a card", "watch --head {eagle} --server http://127.0.0.1:9 --once", ("card", "--card")),
    Row("certify: no answers", f"eval certify {TARGET}--data {{prompts}} {OUT}", ("prompts", "responses")),
    # Methods without their models, or with numbers that they do not take.
    Row("decode: no draft", f"decode Hi {TARGET}--method spec", ("--head",)),
    Row("bench: no model between", BENCH + "--head {draft} --methods hsddw", ("--mid",)),
    Row("decode: a chain of no tokens", f"decode Hi {TARGET}--method spec:k=0", ("k: found 0", "1 or more")),
    Row("bench: more nodes than levels hold", BENCH + "--head {eagle} --methods eagle-tree:nodes=40:depth=1:topk=5",
        ("nodes: found 40", "from 1 to 30")),
    Row("decode: a head that does not draft", f"decode Hi {TARGET}--head {{acceptance}} --method eagle",
        ("an acceptance head", "that drafts")),
    Row("bench: an acceptance head for two drafters",
        BENCH + "--head {draft} --head {eagle} --acceptance {acceptance} --methods specdec++,specdec++:drafter=eagle",
        ("one drafter for --acceptance",)),
    # Devices that are not there.
    Row("decode: no GPU", f"decode Hi {TARGET}--method ar --device cuda", ("device", "cuda")),
    Row("decode: no such device", f"decode Hi {TARGET}--method ar --device cpu:3", ("device", "cpu:3")),
    Row("train: no GPU", f"train eagle --data {{features}} {TARGET}{OUT}--device cuda", ("CUDA",)),
]  # fmt: skip
