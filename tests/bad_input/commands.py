"""What every command may be given that is not there, is of another kind, or has no use: paths, names, ranges."""

from __future__ import annotations

from bad_input.row import Row

TARGET = "--target {target} "
OUT = "--output {out} "
BENCH = f"eval bench {TARGET}--prompts {{chats}} --limit 1 --repeats 1 --max-new-tokens 4 {OUT}"
STUDY = f"{TARGET}--prompts {{chats}} {OUT}"
TRAIN = "train eagle --data x --target y --output z"

ROWS = [
    # No command, or another one's words.
    Row("no such command", "evaluate bench", ("evaluate bench",)),
    Row("a misspelt command", "eval bnech", ("eval bnech", "eval bench")),
    Row("a group with a setting", "data --target x", ("data",)),
    Row("words without a name", "data prompts x y --source s --target t --output {out}", ("x", "--name value")),
    Row("no value", "decode Hi --target", ("--target", "requires an argument")),
    Row("no such config", "train eagle --config nosuch", ("nosuch", "eagle-small")),
    Row("a config that is a directory", "train eagle --config {target}", ("--config", "directory")),
    # The demo.
    Row("demo: output is a file", "demo --output {chats}", ("prompts.jsonl", "File exists")),
    Row("demo: a flag that is none", "demo --full maybe", ("maybe",)),
    Row("completion: no such shell", "completion csh", ("csh", "zsh")),
    # decode.
    Row("decode: no such method", f"decode Hi {TARGET}--method nosuch", ("nosuch",)),
    Row("decode: two methods", f"decode Hi {TARGET}--method ar,pld", ("ar,pld",)),
    Row("decode: k is no number", f"decode Hi {TARGET}--draft {{draft}} --method spec:k=abc", ("k", "abc")),
    Row("decode: k is 0", f"decode Hi {TARGET}--draft {{draft}} --method spec:k=0", ("k", "0", "1 or more")),
    Row("decode: no such setting", f"decode Hi {TARGET}--draft {{draft}} --method spec:n=5", ("n", "spec")),
    Row("decode: no draft", f"decode Hi {TARGET}--method spec:k=5", ("--draft",)),
    Row("decode: no head", f"decode Hi {TARGET}--method eagle:k=5", ("kind eagle", "--draft HEAD")),
    Row("decode: t is not finite", f"decode Hi {TARGET}--draft {{draft}} --method confidence:t=nan", ("t", "nan")),
    Row("decode: a draft that is a head", f"decode Hi {TARGET}--draft {{eagle}} --method spec", ("a draft model",)),
    Row("decode: a head that is a model", f"decode Hi {TARGET}--eagle {{draft}} --method eagle", ("draft",)),
    Row("decode: another kind of head", f"decode Hi {TARGET}--eagle {{acceptance}} --method eagle", ("eagle",)),
    Row("decode: no tree there", f"decode Hi {TARGET}--eagle {{eagle}} --method eagle-tree:tree=x.yaml", ("x.yaml",)),
    Row("decode: no tokens wanted", f"decode Hi {TARGET}--method ar --max-new-tokens 0", ("max_new_tokens", "0")),
    Row("decode: top-k", f"decode Hi {TARGET}--method ar --top-k -1", ("top_k", "-1")),
    Row("decode: top-p", f"decode Hi {TARGET}--method ar --top-p 0", ("top_p", "0")),
    Row("decode: trace is a directory", f"decode Hi {TARGET}--method ar --trace {{target}}", ("target",)),
    # Stages on what is no artefact, or another one.
    Row("responses: prompts of another kind", f"data responses --prompts {{features}} {TARGET}{OUT}", ("features",)),
    Row("responses: a file", f"data responses --prompts {{chats}} {TARGET}{OUT}", ("prompts.jsonl",)),
    Row("features: prompts", f"data features --responses {{prompts}} {TARGET}{OUT}", ("prompts", "responses")),
    Row("features: nothing there", f"data features --responses x/y {TARGET}{OUT}", ("x/y",)),
    Row("acceptance: no drafter", f"data acceptance --responses {{responses}} {TARGET}{OUT}", ("draft, eagle",)),
    Row("acceptance: features", f"data acceptance --responses {{features}} {TARGET}--draft {{draft}} {OUT}",
        ("features",)),
    Row("acceptance: a head for labels of mixed text",
        f"data acceptance --responses {{responses}} {TARGET}--draft {{eagle}} {OUT}", ("draft", "--labels rollout")),
    Row("features: no such drafter", f"data features --responses {{responses}} {TARGET}{OUT}--drafter nosuch",
        ("drafter", "nosuch", "eagle")),
    Row("diagnose: a model", f"diagnose {{draft}} --data {{responses}} {TARGET}", ("head", "a head directory")),
    Row("diagnose: no drafter", f"diagnose {{acceptance}} --data {{responses}} {TARGET}", ("acceptance", "a drafter")),
    Row("diagnose: no answers", f"diagnose {{eagle}} --data {{prompts}} {TARGET}", ("prompts without answers",)),
    Row("diagnose: nothing to read", f"diagnose {{eagle}} --data {{responses}} --limit 0 {TARGET}", ("limit", "0")),
    Row("inspect: a model", "data inspect {target}", ("manifest.json",)),
    Row("inspect: a row before the first", "data inspect {prompts} --row -1", ("row", "-1")),
    Row("inspect: a row past the last", "data inspect {prompts} --row 999", ("row", "999")),
    # Training and its plan.
    Row("train eagle: prompts", f"train eagle --data {{prompts}} {TARGET}{OUT}", ("prompts",)),
    Row("train eagle: no such optimiser", f"train eagle --data {{features}} {TARGET}{OUT}--optimizer sgdd", ("sgdd",)),
    Row("train eagle: no such strategy", f"train eagle --data {{features}} {TARGET}{OUT}--strategy zero9", ("zero9",)),
    Row("train eagle: no loss", f"train eagle --data {{features}} {TARGET}{OUT}--feature-weight 0 --token-weight 0",
        ("feature_weight, token_weight",)),
    Row("train eagle: no layers", f"train eagle --data {{features}} {TARGET}{OUT}--num-layers 0", ("num_layers",)),
    Row("train acceptance: features", f"train acceptance --data {{features}} --draft {{draft}} {OUT}", ("features",)),
    Row("train acceptance: a head without its target", f"train acceptance --data {{labels}} --draft {{eagle}} {OUT}",
        ("target", "eagle")),
    Row("train acceptance: no weight", f"train acceptance --data {{labels}} --draft {{draft}} {OUT}--w-acc -1",
        ("w_acc",)),
    Row("train medusa: no heads", f"train medusa --data {{features}} {TARGET}{OUT}--num-heads 0", ("num_heads",)),
    Row("train medusa: no weight", f"train medusa --data {{features}} {TARGET}{OUT}--head-decay 0", ("head_decay",)),
    Row("plan medusa: no such target", "plan medusa --target ./nosuch", ("./nosuch",)),
    Row("plan eagle: no such target", "plan eagle --target ./nosuch", ("./nosuch",)),
    Row("plan eagle: ranks", f"plan eagle {TARGET}--world -1", ("world", "-1")),
    Row("plan eagle: short samples", f"plan eagle {TARGET}--assume-length 0", ("assume_length", "0")),
    Row("plan acceptance: a head alone", "plan acceptance --draft {eagle}", ("target", "--target")),
    # Launchers check the command before anything starts.
    Row("torchrun: nothing to run", "launch torchrun", ("command",)),
    Row("torchrun: no such command", "launch torchrun -- nosuch", ("nosuch",)),
    Row("torchrun: a command of one process", "launch torchrun --nproc-per-node 2 -- decode Hi", ("decode",)),
    Row("torchrun: no process", f"launch torchrun --nproc-per-node 0 -- {TRAIN}", ("nproc_per_node", "0")),
    Row("torchrun: a million", f"launch torchrun --nproc-per-node 1000000 -- {TRAIN}", ("nproc_per_node", "1000000")),
    Row("torchrun: nowhere to meet", f"launch torchrun --nnodes 2 -- {TRAIN}", ("rdzv_endpoint",)),
    Row("torchrun: no port", f"launch torchrun --rdzv-endpoint host:99999 -- {TRAIN}", ("rdzv_endpoint", "99999")),
    Row("slurm: no machine", f"launch slurm --nodes 0 -- {TRAIN}", ("nodes", "0")),
    Row("slurm: no time", f"launch slurm --time forever -- {TRAIN}", ("time", "forever")),
    Row("slurm: a name with a command in it", f"launch slurm --job-name x;id -- {TRAIN}", ("job_name",)),
    Row("deepspeed: no hostfile", f"launch deepspeed --hostfile nosuch -- {TRAIN}", ("nosuch",)),
    Row("deepspeed: no port", f"launch deepspeed --hostfile {{chats}} --master-port 99999 -- {TRAIN}",
        ("master_port",)),
    Row("deepspeed: a hostfile that is none", f"launch deepspeed --hostfile {{chats}} -- {TRAIN}", ("prompts.jsonl",)),
    # The bench and what reads its runs.
    Row("bench: no such prompts", f"eval bench {TARGET}--methods ar --prompts ./nosuch.jsonl {OUT}", ("nosuch.jsonl",)),
    Row("bench: no such split", BENCH + "--methods ar --split nosuch", ("prompts", "--split")),
    Row("bench: no methods", BENCH + "--methods ,", ("methods",)),
    Row("bench: two runs, one temperature", BENCH + "--methods ar --temperatures 0,0", ("temperatures",)),
    Row("compare: one run", "eval compare {bench}", ("runs",)),
    Row("compare: no run", "eval compare {bench} {target}", ("target", "results.json")),
    Row("report: no run", "eval report {target} --output {out}/r.html", ("target", "results.json")),
    Row("report: nothing", "eval report --output {out}/r.html", ("runs",)),
    Row("tune: no such head", f"eval tune {STUDY}--eagle ./nosuch", ("nosuch",)),
    Row("tune: prompts too long", f"eval tune {TARGET}--eagle {{eagle}} {OUT}", ("prompt", "context")),
    Row("lossless: a greedy certificate of samples", f"eval lossless {STUDY}--draft {{draft}} --temperature 0",
        ("temperature",)),
    Row("lossless: transformers' own", f"eval lossless {STUDY}--methods hf", ("hf",)),
    # Studies.
    Row("eagle2: a model for a head", f"eval eagle2 {STUDY}--eagle {{draft}}", ("draft",)),
    Row("hsddw: no mid", f"eval hsddw {STUDY}--draft {{draft}} --mid ./nosuch", ("nosuch",)),
    Row("calibration: a drafting head", f"eval calibration {STUDY}--fit-split test --draft {{draft}} "
        "--acceptance {eagle}",
        ("eagle",)),
    Row("policies: nobody drafts", f"eval policies {STUDY}", ("draft",)),
    Row("specdecpp: no such heads", f"eval specdecpp {STUDY}--train-split dev --dev-split train --draft {{draft}} "
        "--heads ./nosuch", ("nosuch",)),
    # Heads elsewhere.
    Row("export: a model", f"export --format vllm --head {{draft}} {OUT}", ("draft",)),
    Row("export: no such format", f"export --format gguf --head {{eagle}} {OUT}", ("gguf",)),
    Row("export: a head of another kind", f"export --format vllm --head {{acceptance}} {OUT}", ("vllm",)),
    Row("export: onto the head", "export --format vllm --head {eagle} --output {eagle}", ("eagle", "new directory")),
    Row("check: no target", "check {eagle} --format vllm", ("--target",)),
    Row("import: nothing there", f"import ./nosuch {OUT}", ("nosuch",)),
    Row("import: a model", f"import {{target}} {OUT}", ("LlamaForCausalLM", "--draft")),
]  # fmt: skip
