"""vLLM's server of hidden states, with what the target's family needs; `draftsmith launch vllm` starts it.

It runs in vLLM's own environment, whose classes tell what that is.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.targets.shape import text_config
from draftsmith.modules.types import InputError


def family_arguments(target: Checkpoint) -> dict[str, Any]:
    """Return the arguments of vLLM by which it hands out states of this target's family, as vLLM's own classes tell.

    Raises:
        InputError: vLLM has no class that gives hidden states of this family.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import is_hybrid, supports_eagle3
    from vllm.platforms import current_platform

    config, arguments = target.config, dict[str, Any]()
    native = next((name for name in config.get("architectures") or () if name in ModelRegistry.models), None)
    if native is None:
        # vLLM then runs transformers' class by itself.
        return arguments
    model = ModelRegistry.models[native].load_model_cls()
    if not supports_eagle3(model):
        if is_hybrid(model) or not native.endswith("ForCausalLM"):
            remedy = "Read its states with --loader hf."
            raise InputError("engine", f"vLLM's {native}, which gives no hidden states", "a class that does", remedy)
        # vLLM's option --model-impl would also hold for the model that stands for the states, which has one only.
        experts = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        arguments["hf_overrides"] = {"architectures": [f"Transformers{'MoE' * experts}ForCausalLM"]}
    if is_hybrid(model) and current_platform.is_cpu():
        # Cached prefixes of recurrent states ask for chunked prefill, whose kernels need a GPU.
        arguments["enable_prefix_caching"] = False
        if "linear_key_head_dim" in text_config(config):
            arguments["dtype"] = "bfloat16"
    return arguments


def main() -> None:
    """Add the family's options in front of the given ones, of which the last one counts, and run the server."""
    words = sys.argv[1:]
    try:
        family = family_arguments(Checkpoint(words[words.index("--model") + 1]))
    except InputError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    options = []
    for name, value in family.items():
        flag = name.replace("_", "-")
        text = value if isinstance(value, str) else json.dumps(value)
        options += [f"--no-{flag}"] if value is False else [f"--{flag}", text]
    if options:
        print(f"draftsmith: this target needs {' '.join(options)}", file=sys.stderr, flush=True)
    sys.argv[1:] = [*options, *words]
    # `vllm serve` without its command line, which some builds lack.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
