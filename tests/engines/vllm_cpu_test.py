"""Exported heads served by the whole vLLM engine on a CPU (`served.py`): its scheduler, target, proposer and
verification give the text and the accepted tokens of our own chain. Run by `make test-engines`."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import FIGURES, WORLD
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from w8a16 import patch_vllm

patch_vllm()

torch.set_num_threads(1)  # more wait for one another on a machine that does other things
SERVED = WORLD / "served"
# It drafts with DSpark heads on a GPU only.
DIRECTORIES = sorted(
    f"{path.parent.name}/{path.name}"
    for kind in ("vllm", "speculators")
    for path in SERVED.glob(f"*/{kind}")
    if not path.parent.name.startswith("dspark")
)
NEW_TOKENS = 96
COUNTERS = ("num_drafts", "num_accepted_tokens", "num_accepted_tokens_per_pos")


@contextmanager
def served(directory: Path, length: int, rows: int = 1, **more: Any) -> Iterator[LLM]:
    """The engine with that head, `rows` requests at a time. more: of its speculative config."""
    method = {"eagle": "eagle", "dflash": "dflash"}.get(directory.parent.name.split("-")[0], "eagle3")
    llm = LLM(
        model=str(SERVED / "target"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=rows,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"method": method, "model": str(directory), "num_speculative_tokens": length, **more},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def counts(llm: LLM) -> dict[str, Any]:
    """What the engine has counted so far."""
    found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return {name: getattr(found[name], "values", None) or found[name].value for name in COUNTERS}


def counted(rounds: list[list[int]], length: int) -> dict[str, Any]:
    """The same of our own rounds."""
    accepted = [count for one in rounds for count in one]
    by_place = [sum(count > place for count in accepted) for place in range(length)]
    return dict(zip(COUNTERS, (len(accepted), sum(accepted), by_place), strict=True))


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in made]


def ours_of(directory: str) -> dict[str, Any]:
    return json.loads((SERVED / directory).parent.joinpath("ours.json").read_text())


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_the_engine_gives_the_text_and_the_accepted_tokens_of_our_chain(directory: str):
    ours, length = ours_of(directory), 5
    with served(SERVED / directory, length) as llm:
        for number, prompt in enumerate(ours["prompts"]):
            assert answers(llm, [prompt]) == [ours["tokens"][number]], number
            assert counts(llm) == counted(ours[f"rounds.{length}"][: number + 1], length), number
        total = counts(llm)
    kept = total["num_accepted_tokens"] / total["num_drafts"]
    assert total["num_accepted_tokens_per_pos"][2] > 0, "the head knows nothing: no draft is followed far"
    FIGURES.append(f"vLLM serves {directory}: {kept:.3f} accepted tokens a draft, as here, {total}")


def test_requests_side_by_side_and_a_shorter_draft():
    ours = ours_of("reduced/vllm")
    with served(SERVED / "reduced/vllm", 3, rows=4) as llm:
        assert answers(llm, ours["prompts"]) == ours["tokens"]
        assert counts(llm) == counted(ours["rounds.3"], 3)


def test_a_schedule_is_followed():
    """One request drafts 5 tokens, two draft 3, four none. Requests are alike, so that all end together."""
    ours, found = ours_of("reduced/vllm"), {"num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 3], [4, 4, 0]]}
    with served(SERVED / "reduced/vllm", 5, rows=4, **found) as llm:
        rounds = list[list[int]]()
        for number, (count, length) in enumerate(((1, 5), (2, 3), (4, 0))):
            prompt, answer = ours["prompts"][number], ours["tokens"][number]
            assert answers(llm, [prompt] * count) == [answer] * count
            rounds += [ours[f"rounds.{length}"][number]] * count if length else []
            assert counts(llm) == counted(rounds, 5)
