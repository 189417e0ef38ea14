"""Compare the teacher that a head is trained on, speculators' and ours, with the server's own distributions:
`python benchmarks/teachers.py --targets DIR,DIR --output DIR`, in an environment with vLLM and Draftsmith.

One request gives a row's last hidden states, before the final norm as vLLM hands them out, and the log-probabilities of
the 20 likeliest tokens at each place. Both teachers are computed from these states: ours as a training does, with the
readout that the proof chose; speculators' by its own modules, `verifier_lm_head(verifier_norm(state))`, in its own
environment. The KL divergence is that of the listed tokens and of all others as one, so it is at most the whole one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PYTHON = Path(".engines/speculators/bin/python")
KINDS = ("eagle3", "dspark")


@dataclass(frozen=True)
class TeachersConfig:
    """Measures how far the teachers of two trainers are from the distributions of the server.

    Attributes:
        targets: Directories of targets, separated by commas.
        output: Directory that receives teachers.json and teachers.md.
        num_tokens: Tokens of the row, drawn at random.
        dtype: Of the weights at the server; Qwen3.5 and Qwen3-Next need bfloat16 on a CPU.
        speculators: The python of an environment with speculators, as `make engines` makes it.
    """

    targets: str
    output: Path = field(kw_only=True)
    num_tokens: int = 256
    dtype: str = "float32"
    speculators: Path = PYTHON


def run(config: TeachersConfig) -> Path:
    """Read the states of every target, compute both teachers and write the table."""
    from draftsmith.data.console import markdown_lines
    from draftsmith.modules.pretrained.files import make_directory, write_json, write_text

    make_directory(config.output)
    rows: list[dict[str, Any]] = []
    for target in map(Path, config.targets.split(",")):
        file = config.output / f"{target.name}.safetensors"
        if not file.exists():
            read_states(target, config, file)
        subprocess.run([str(config.speculators), __file__, "--theirs", str(target), str(file)], check=True)
        found = load_file(file.with_suffix(".theirs.safetensors"))
        ours = load_file(file)
        server = ours["server"]
        row: dict[str, Any] = {"target": target.name, "Draftsmith": kl(server, ours["ours"])}
        row |= {f"speculators, {kind}": kl(server, found[kind]) for kind in KINDS}
        rows.append(row)
        print(json.dumps(row), flush=True)
    write_json(config.output / "teachers.json", rows, indent=2)
    cells = [[row["target"], *(f"{row[key]:.2g}" for key in list(row)[1:])] for row in rows]
    write_text(config.output / "teachers.md", "\n".join(markdown_lines(list(rows[0]), cells)) + "\n")
    return config.output


def kl(server: Tensor, teacher: Tensor) -> float:
    """Compute the mean KL(server || teacher) in nat of log-probabilities [T, K] of listed tokens and, as one, of the
    others."""

    def with_others(listed: Tensor) -> Tensor:
        listed = listed.double()
        others = (1 - listed.exp().sum(-1, keepdim=True)).clamp(min=1e-9)
        return torch.cat([listed, others.log()], -1)  # [T, K+1]

    p, q = with_others(server), with_others(teacher)
    return float((p.exp() * (p - q)).sum(-1).mean())


def read_states(target: Path, config: TeachersConfig, file: Path) -> None:
    """Store the states [T, H] of a row, the tokens [T, K] that the server lists, and their log-probabilities by the
    server and by our teacher."""
    from draftsmith.data.engines.vllm_states import VllmStates, prove_teacher
    from draftsmith.data.store.feature_codec import decode
    from draftsmith.modules.pretrained.checkpoint import Checkpoint
    from draftsmith.modules.pretrained.models import load_outer
    from draftsmith.modules.targets.base import final_state

    checkpoint = Checkpoint(target)
    info = checkpoint.info
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(info.vocab_size, (config.num_tokens,), generator=generator).tolist()
    args = config.output / "vllm.json"
    args.write_text(json.dumps({"enforce_eager": True, "max_num_seqs": 4, "max_model_len": 2 * config.num_tokens}))
    outer = load_outer(str(target), "float32")
    with VllmStates(checkpoint, (final_state(info.num_layers),), config.dtype, "bf16", config.output, args) as source:
        stored, places = source.read_with_log_probs(row)
        readout = prove_teacher(source, outer, [row]).readout
    states = decode(stored)[:-1].float()  # [T, H], before the final norm
    # The tokens' number differs by one: the text's own is listed beside the 20 likeliest.
    width = min(map(len, places))
    tokens = torch.tensor([sorted(place, key=place.__getitem__)[-width:] for place in places])  # [T, K]
    server = torch.tensor(
        [[place[token] for token in listed] for place, listed in zip(places, tokens.tolist(), strict=True)]
    )
    weights = outer.weights
    logits = readout.logits(
        readout.normed(states, weights.norm, weights.norm_bias), weights.output.float(), weights.bias
    )
    ours = logits.log_softmax(-1).gather(-1, tokens)
    save_file({"states": states, "tokens": tokens, "server": server, "ours": ours.contiguous()}, file)


def theirs(target: str, file: Path) -> None:
    """Store log-probabilities of the same tokens by the teachers of speculators' EAGLE-3 and DSpark. Runs in its
    environment."""
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import AutoConfig, Qwen3Config

    config = AutoConfig.from_pretrained(target)
    read, found = load_file(file), {}
    for kind, model_class in (("eagle3", Eagle3DraftModel), ("dspark", DSparkDraftModel)):
        layer = Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            rms_norm_eps=config.rms_norm_eps,
        )
        options: dict[str, Any] = {
            "draft_attn_impl": "eager",
            "mask_token_id": 0,
            "norm_before_residual": False,
            "ttt_steps": 3,
        }
        options["target_layer_ids"] = [1]  # the teacher reads the last state only
        model = model_class.from_training_args(
            layer, verifier_name_or_path=target, draft_vocab_size=config.vocab_size, **options
        )
        with torch.no_grad():
            states = read["states"].to(model.verifier_lm_head.weight.dtype)
            logits = model.verifier_lm_head(model.verifier_norm(states)).float()
        found[kind] = logits.log_softmax(-1).gather(-1, read["tokens"]).contiguous()
    save_file(found, file.with_suffix(".theirs.safetensors"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--theirs"]:
        theirs(sys.argv[2], Path(sys.argv[3]))
    else:
        from draftsmith.launch.cli import main_of

        sys.exit(main_of(TeachersConfig, run))
