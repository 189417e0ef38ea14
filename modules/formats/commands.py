"""Commands of servers for a head, and what holds for every head that they serve."""

from __future__ import annotations

import json
import shlex

from draftsmith.modules.formats import families
from draftsmith.modules.formats.base import Served

# Defaults of vLLM's options, and what they exclude (config/speculative.py, config/vllm.py).
DRAWN = (
    'For temperatures above 0 add "draft_sample_method": "probabilistic", as by default vLLM drafts the likeliest '
    'tokens, and where its V2 model runner runs, "rejection_sample_method": "block".'
)
V2 = "vLLM drafts with it in its V2 model runner alone, which needs Triton."
ADAPTIVE = 'Without full CUDA graphs, with LoRA or pipeline parallelism remove "enable_adaptive_verification".'
# arg_groups/speculative_hook.py and speculative/dspark_components/dspark_planner.py.
REQUESTS = "With a drafter SGLang answers 48 requests at once, unless --max-running-requests says more."
RAGGED = (
    "The confidences shorten drafts with SGLANG_RAGGED_VERIFY_MODE=compact before the command and "
    "--speculative-dspark-sps-table-path, a table by sglang.benchmark.dspark_sps_profiler; else all are verified."
)
TREE = "Its tree of total_token 60, depth {0} and top_k 10 counts the root: here it is {1}:nodes=59:depth={0}:topk=10."


def served_kind(kind: str) -> str:
    """Return the kind of a head in the options of servers, which tell DFlash2 from DFlash by the files."""
    return kind.replace("dflash2", "dflash")


def vllm_command(method: str, served: Served) -> str:
    """Return the command that serves a drafter by a method of vLLM's speculative config: a kind, or draft_model."""
    options = {"method": served_kind(method), "model": served.directory, "num_speculative_tokens": served.num_drafted}
    if served.confidence:
        options["enable_adaptive_verification"] = True  # else nothing reads the confidences (config/speculative.py)
    # Classes without the interface of EAGLE-3 give no states of their layers; transformers' models all do.
    others = method not in ("eagle", "draft_model") and served.family not in {"", *families.VLLM}
    backend = " --model-impl transformers" if others else ""
    return f"vllm serve {shlex.quote(served.model)}{backend} --speculative-config {shlex.quote(json.dumps(options))}"


def sglang_command(kind: str, served: Served) -> str:
    """Return the command that serves a drafter of a kind with SGLang."""
    # A chain; the target's own token counts among those that it verifies.
    drafts = f" --speculative-num-draft-tokens {served.num_drafted + 1}"
    if "eagle" in kind:
        drafts = f" --speculative-num-steps {served.num_drafted} --speculative-eagle-topk 1{drafts}"
    if kind == "eagle3" and served.window:
        # Of tokens before the one that attends (radix attention's window_left).
        drafts += f" --speculative-draft-window-size {served.window - 1}"
    if kind == "dspark":
        # Drafted tokens, whatever the file's block_size; any other count is refused (arg_groups/speculative_hook.py).
        drafts = f" --speculative-dspark-block-size {served.num_drafted}"
    algorithm = served_kind(kind).upper()
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.model)} --speculative-algorithm {algorithm}"
        f" --speculative-draft-model-path {shlex.quote(served.directory)}{drafts}"
    )


def llamacpp_command(kind: str, served: Served) -> str:
    """Return the command that serves a drafter, a kind or `simple`; model and directory are GGUF files."""
    drafts = f"--spec-type draft-{served_kind(kind)} --spec-draft-n-max {served.num_drafted}"
    return f"llama-server -m {shlex.quote(served.model)} -md {shlex.quote(served.directory)} {drafts}"


def safeailab_command(kind: str, served: Served) -> str:
    """Return the command that serves a drafter with SafeAILab/EAGLE; drafted tokens have no flag."""
    # It takes EAGLE-3 with --no-eagle3 (webui.py: use_eagle3=args.no_eagle3).
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(served.model)}"
        f" --ea-model-path {shlex.quote(served.directory)}{' --no-eagle3' if kind == 'eagle3' else ''}"
    )


# By the name of a format; others are only read.
COMMANDS = {
    "eagle": safeailab_command,
    "vllm": vllm_command,
    "speculators": vllm_command,
    "sglang": sglang_command,
    "llamacpp": llamacpp_command,
}
