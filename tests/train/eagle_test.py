"""`train eagle`: what is trained, what is reported, what is saved."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_llama_dir
from trained_runs import fake_trainer, newest_state

from draftsmith.data.heads.directory import load_head, save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import FeatureDataset, collate_features, pack_features
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
from draftsmith.modules.drafters.eagle.head import EagleHead, eagle_loss, noise_like, shift
from draftsmith.modules.flops import eagle_training, layers_forward
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train import fit
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data_module import Key, Part, Samples, held_out
from draftsmith.train.drafter import drafter_config, feature_std, make_head, prepare
from draftsmith.train.drafter_objective import DrafterObjective
from draftsmith.train.lit_head import LitHead
from draftsmith.train.run import run
from draftsmith.train.tau import TauProbe, held_out_prompts, probe_prompts

QUICK = {
    "lr": 3e-3,
    "max_steps": 12,
    "batch_size": 8,
    "val_share": 0.25,
    "val_every": 6,
    "log_every": 3,
    "wandb": "off",
}
QUICK |= {"token_weight": 1.0, "tau_prompts": 3, "tau_max_new_tokens": 8}


def config(artefacts, output: Path, **changes) -> TrainDrafterConfig:
    settings = {"data": artefacts.features, "target": str(artefacts.target), "output": output, **QUICK, **changes}
    return drafter_config("eagle")(**settings)


@pytest.fixture(scope="module")
def trained(artefacts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("eagle") / "run"
    run(config(artefacts, output, tau_every=12))
    return output


def test_a_run_goes_on_with_its_own_target_only(artefacts, tmp_path, capsys):
    """Supervised prompts are of a tokenizer, not of a target: the run itself remembers what it read."""
    settings = config(artefacts, tmp_path, resume=True)
    identity = load_lm(str(artefacts.target)).info.identity
    texts = {"tokenizer": identity["tokenizer"]}
    begun = fit._state(settings, fit.Provenance("eagle", {}, identity, texts))
    (tmp_path / fit.STARTED).write_text(json.dumps(begun))
    tuned = fit.Provenance("eagle", {}, {**identity, "weights": "other"}, texts)
    with pytest.raises(InputError, match=r"resume: found another read_model\.weights: other"):
        fit._checkpoint(settings, tuned)
    earlier = {key: value for key, value in begun.items() if not key.startswith("read_model")}
    (tmp_path / fit.STARTED).write_text(json.dumps(earlier))
    assert fit._checkpoint(settings, tuned) is None
    assert "read_model" in capsys.readouterr().err


def a_module(artefacts, tmp_path, **changes) -> LitHead:
    settings, target = config(artefacts, tmp_path, **changes), load_lm(str(artefacts.target))
    objective = DrafterObjective(EagleHead, settings, target, feature_std=2.0)
    module = LitHead(make_head(settings, target), objective, settings, 12)
    module.trainer = fake_trainer(FeatureDataset(artefacts.features))
    return module


def change(module: LitHead, **settings) -> None:
    """Go on with other settings."""
    module.objective.settings = dataclasses.replace(module.objective.settings, **settings)


def a_part(artefacts, indices, collate=collate_features) -> Part:
    data = FeatureDataset(artefacts.features)
    batch = collate([data[i] for i in indices])
    tokens = EagleHead.num_loss_tokens(batch)
    return Part(batch, tuple(Key(0, i) for i in indices), tokens, tokens, True, True)


def test_training_reports_both_losses_agreement_and_tau(trained):
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    reported = [row for row in rows if row["val/loss"]]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("feature_loss", "token_loss", "top1", "top3"):
        assert all(float(row[f"val/{name}"]) >= 0 for row in reported), name
    assert [bool(row["val/tau"]) for row in reported] == [False, True]  # every 12 steps
    assert float(reported[-1]["val/tau"]) >= 1.0
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_best_and_last_are_heads_that_decode(trained, artefacts):
    target = load_lm(str(artefacts.target))
    for name in ("best", "last"):
        head = load_head(trained / name, target, kind="eagle")
        drafter = EagleDrafter(head, target, [FixedLength(4)], 64)
        prompt, params = [5, 6, 7, 8], SamplingParams()
        drafted = generate_one(target, drafter, prompt, params, 12, TorchSource(0)).tokens
        assert drafted == generate_one(target, None, prompt, params, 12, TorchSource(0)).tokens
        assert "emitted tokens per target call" in (trained / "last" / "README.md").read_text()
    manifest = json.loads((trained / "best" / "manifest.json").read_text())
    assert manifest["models"]["target"] == target.info.identity == manifest["target"]


@pytest.mark.parametrize("init", ["random", "target-last-layer"])
def test_the_gradient_reaches_every_weight_of_the_head_and_none_of_the_target(artefacts, tmp_path, init):
    module = a_module(artefacts, tmp_path, init=init)
    module.loss(a_part(artefacts, range(6))).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in module.head.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in module.objective.target.model.parameters())


def test_the_target_is_no_part_of_module_or_checkpoint(artefacts, tmp_path, trained):
    module = a_module(artefacts, tmp_path)
    ours = {f"head.{name}" for name in module.head.state_dict()}
    assert set(module.state_dict()) == ours == {name for name, _ in module.named_parameters()}
    assert set(newest_state(trained)["state_dict"]) == ours


def test_a_head_can_start_from_the_targets_last_layer(artefacts, tmp_path):
    target = load_lm(str(artefacts.target))
    head, other = (
        make_head(config(artefacts, tmp_path, init=init), target) for init in ("target-last-layer", "random")
    )
    last = target.model.layers[-1].mlp.up_proj.weight
    assert torch.equal(head.layers[0].mlp.up_proj.weight, last) and not torch.equal(
        other.layers[0].mlp.up_proj.weight, last
    )


def test_initial_weights_depend_on_the_seed_alone(artefacts, tmp_path):
    target = load_lm(str(artefacts.target))

    def weight(seed: int) -> torch.Tensor:
        state = torch.random.get_rng_state()
        head: EagleHead = make_head(config(artefacts, tmp_path, seed=seed, init="random"), target)
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.rand(3)
        return head.fc.weight

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))


def test_noise_belongs_to_the_sample_not_to_its_batch(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.1)
    alone, together = a_part(artefacts, [3]), a_part(artefacts, range(8))
    length = len(FeatureDataset(artefacts.features)[3]["input_ids"]) - 2

    def noise(part: Part) -> torch.Tensor:
        size, step = part.data.features.shape, module._step(part.keys)
        return noise_like(torch.zeros(size[0], size[1] - 2, size[2]), step, 0.2, flat=False)

    assert torch.equal(noise(alone)[0, :length], noise(together)[3, :length])
    assert 0.15 < noise(together).abs().max() <= 0.2
    later = Part(together.data, tuple(Key(1, key.index) for key in together.keys), 1, 1, True, True)
    assert not torch.equal(noise(later), noise(together))
    plain, pair = shift(together.data), module.head.unroll
    read = []
    module.head.unroll = lambda embeds, features, *rest: read.append(features) or pair(embeds, features, *rest)
    module.loss(together)  # 0.1 of the features' standard deviation, 2
    assert torch.equal(read[0], plain.features.float() + noise(together))


def test_unrolled_training_is_the_weighted_mean_of_the_drafts_steps_and_reports_the_first(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.0)
    part = a_part(artefacts, [0, 1])
    first = module.loss(part)
    change(module, unroll=2, unroll_decay=0.5)
    both = module.loss(part)
    pair, target, settings = shift(part.data), module.objective.target, module.objective.settings
    hidden = module.head.unroll(target.embed(pair.next_ids), pair.features.float(), 2)[1:]
    second = eagle_loss(
        hidden, pair.target_features, [pair.loss_mask], target.lm_head, settings.feature_weight, settings.token_weight
    )  # no loss before the second row: prompts are longer
    torch.testing.assert_close(both.loss, (first.loss + 0.5 * second.loss) / 1.5)
    assert both.sums["loss"] == first.sums["loss"]
    change(module, unroll_after=1 / 12)  # after the first of 12 steps
    torch.testing.assert_close(module.loss(part).loss, first.loss)
    module.trainer.global_step = 1
    torch.testing.assert_close(module.loss(part).loss, both.loss)


def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_padded_one(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path, noise=0.1)
    change(module, unroll=2)
    found = {}
    for collate in (collate_features, pack_features):
        module.zero_grad()
        output = module.loss(a_part(artefacts, range(9), collate))
        output.loss.backward()
        found[collate] = output, [p.grad.clone() for p in module.head.parameters()]
    (padded, grads), (packed, packed_grads) = found.values()
    # The bar is 1e-5; what differs is the order of float32 sums.
    assert packed.loss.item() == pytest.approx(padded.loss.item(), rel=1e-5)
    assert {k: v.item() for k, v in packed.sums.items()} == pytest.approx(
        {k: v.item() for k, v in padded.sums.items()}, rel=1e-5
    )
    for ours, theirs in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def test_training_on_packed_steps_with_split_sequences_runs_and_says_so(artefacts, tmp_path, capsys):
    lengths = FeatureDataset(artefacts.features).lengths
    limit = sorted(lengths)[-6]
    output = run(config(artefacts, tmp_path / "run", tokens_per_batch=200, max_length=limit, accumulate=2)).parent
    longer = sum(length > limit for length in lengths)
    assert f"{longer} of {len(lengths)} sequences are longer than {limit} tokens: split" in capsys.readouterr().out
    with (output / "metrics.csv").open() as file:
        found = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(found) == 4 and found[-1] < found[0]


def test_validation_is_the_mean_over_tokens_and_without_noise(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path)
    whole = module.validate([a_part(artefacts, range(7))])
    pieces = module.validate([a_part(artefacts, [0]), a_part(artefacts, range(1, 7))])
    assert pieces == pytest.approx(whole, rel=1e-5)  # float32 sums in another order


def test_the_noise_unit_is_the_features_standard_deviation(artefacts):
    data = FeatureDataset(artefacts.features)
    samples = Samples(data, range(5))
    everything = torch.cat([data[i]["features"].double().flatten() for i in range(5)])
    assert feature_std(samples, load_lm(str(artefacts.target))) == pytest.approx(
        float(everything.std(correction=0)), rel=1e-9
    )


def test_tau_is_emitted_tokens_by_target_calls_of_real_decoding(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path)
    prompts = list(held_out_prompts(Samples(FeatureDataset(artefacts.features), range(3))))
    assert len(prompts) == 3
    target, tokens, calls, behind = module.objective.target, 0, 0, 0
    plain = generate_one(target, None, prompts[0], SamplingParams(), 10, TorchSource(0))
    ends = plain.tokens[3:4]  # as if it ended there
    target.info = dataclasses.replace(target.info, eos_ids=tuple(ends))
    for prompt in prompts:
        drafter = EagleDrafter(module.head, target, [FixedLength(2)], 128)
        generation = generate_one(target, drafter, prompt, SamplingParams(), 10, TorchSource(0), eos_ids=())
        tokens, calls = tokens + len(generation.tokens), calls + 1 + len(generation.trace.steps)
        first = generation.tokens.index(ends[0]) if ends[0] in generation.tokens else 9
        behind += 9 - first
    assert tokens == 30 and behind > 0
    probe = TauProbe(module, target, prompts, config(artefacts, tmp_path, tau_k=2, tau_max_new_tokens=10), 1)
    assert probe() == {"tau": tokens / calls, "tau_behind_end": behind / tokens}
    assert probe.measured.endswith("tokens, 10 each, end tokens ignored, chains of 2")
    until_end = config(artefacts, tmp_path, tau_k=2, tau_max_new_tokens=10, tau_ignore_eos=False)
    short = TauProbe(module, target, prompts[:1], until_end, 1)()
    drafter = EagleDrafter(module.head, target, [FixedLength(2)], 128)
    shorter = generate_one(target, drafter, prompts[0], SamplingParams(), 10, TorchSource(0))
    assert len(shorter.tokens) < 10 and short == {"tau": len(shorter.tokens) / (1 + len(shorter.trace.steps))}


class Conversations:
    """Samples of 20 tokens with answers at these places."""

    def __init__(self, *answers: list[tuple[int, int]]):
        self.answers, self.lengths = answers, [20] * len(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def item(self, row: int, epoch: int) -> dict[str, torch.Tensor]:
        mask = torch.zeros(20, dtype=torch.bool)
        for start, end in self.answers[row]:
            mask[start:end] = True
        return {"input_ids": torch.arange(20), "loss_mask": mask}


def test_tau_is_measured_on_prompts_as_long_as_conversations_get(artefacts, tmp_path):
    rows = Conversations([(3, 5), (8, 9)], [(2, 4), (10, 12)], [(0, 4)], [(7, 20)], [(4, 6), (9, 10), (15, 20)])
    samples = Samples(rows, range(5))
    # The first answer of the first, the second of the second, and so on; then those that are left.
    assert [len(prompt) for prompt in held_out_prompts(samples)] == [3, 10, 7, 9, 8, 2, 15, 4]
    settings = config(artefacts, tmp_path, tau_prompts=3, tau_max_new_tokens=8)
    assert [len(prompt) for prompt in probe_prompts(settings, samples, 256)] == [3, 10, 7]
    # An answer of the stated length has room behind each, where there are such.
    assert [len(prompt) for prompt in probe_prompts(settings, samples, 16)] == [3, 7, 8]
    assert [len(prompt) for prompt in probe_prompts(settings, samples, 9)] == [3, 7, 8]
    served = artefacts.responses.with_name("prompts")
    ids = [row["prompt_ids"] for row in Rows(served, Manifest.read(served)).read(0, 3)]
    assert probe_prompts(dataclasses.replace(settings, tau_data=served), samples, 256) == ids
    with pytest.raises(InputError, match="an artefact of kind features, expected kind prompts"):
        probe_prompts(dataclasses.replace(settings, tau_data=artefacts.features), samples, 256)


def test_what_will_be_learned_is_said_and_recorded(artefacts, trained, tmp_path, capsys):
    recorded = json.loads((trained / "best" / "manifest.json").read_text())["samples"]["training"]
    data = FeatureDataset(artefacts.features)
    train, _ = held_out(len(data), QUICK["val_share"])
    lengths = [int(data[i]["loss_mask"].sum()) for i in train]
    assert (recorded["answers"], recorded["answer_tokens"]) == (len(lengths), sum(lengths))
    assert recorded["tokens_p50"] == pytest.approx(float(np.median(lengths)))
    assert recorded["early_share"] == pytest.approx(sum(min(5, n) for n in lengths) / sum(lengths), abs=1e-4)
    assert f"{len(lengths)} answers of {sum(lengths)} tokens" in (trained / "best" / "README.md").read_text()
    run(config(artefacts, tmp_path / "run", max_steps=1, val_every=1))
    shown = capsys.readouterr().out
    assert f"data: {len(lengths)} answers with {sum(lengths)} tokens to learn from" in shown
    assert shown.count("fewer than 60,000") == 1
    assert "(tau on 3 prompt(s) of " in shown and "8 each, end tokens ignored, chains of 5)" in shown


def test_bf16_trains_float32_weights(artefacts, tmp_path):
    run(config(artefacts, tmp_path / "run", precision="bf16", max_steps=4, tau_prompts=0))
    state = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_features_of_another_target_are_refused(artefacts, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5)
    with pytest.raises(InputError, match="made with another target"):
        run(config(artefacts, tmp_path / "run", target=str(other)))


def test_a_damaged_shard_is_named(artefacts, tmp_path):
    copy = shutil.copytree(artefacts.features, tmp_path / "features")
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match=f"{shard.name}.*sha256"):
        run(config(artefacts, tmp_path / "run", data=copy))


def test_a_family_whose_layers_the_head_cannot_take_is_refused(artefacts, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300, eos_token_id=3)
    GPT2LMHeadModel(sizes).save_pretrained(tmp_path / "gpt2")
    target = load_lm(str(tmp_path / "gpt2"))
    with pytest.raises(InputError, match="layers are those of llama, mistral, qwen2, qwen3"):
        make_head(config(artefacts, tmp_path / "run", target=str(tmp_path / "gpt2")), target)


@pytest.mark.parametrize("init", ["random", "target-last-layer"])
def test_a_head_takes_its_shape_and_weights_from_a_target_on_either_engine(artefacts, tmp_path, init):
    settings = config(artefacts, tmp_path, init=init)
    lean, universal = (make_head(settings, load_lm(str(artefacts.target), engine=e)) for e in ("lean", "hf"))
    assert lean.config == universal.config
    assert all(torch.equal(a, b) for a, b in zip(lean.parameters(), universal.parameters(), strict=True))


def test_flops_are_those_of_the_real_tokens_and_of_the_draft_steps_trained(artefacts, tmp_path):
    module, part = a_module(artefacts, tmp_path), a_part(artefacts, [0, 1, 5])
    filler = Part(part.data, (*part.keys[:2], Key(0, 5, filler=True)), part.tokens, part.tokens, True, True)
    config = module.head.config.llama
    lengths = [len(FeatureDataset(artefacts.features)[i]["input_ids"]) - 2 for i in (0, 1, 5)]
    assert module.flops(part) == eagle_training(config, lengths, part.tokens)
    assert module.flops(filler) == eagle_training(config, lengths[:2], part.tokens)
    change(module, unroll=3)
    assert module.flops(part) == eagle_training(config, lengths, part.tokens, passes=3)
    online = Part(dataclasses.replace(part.data, features=None), part.keys, part.tokens, part.tokens, True, True)
    target = layers_forward(module.objective.target.config, [length + 2 for length in lengths])
    assert module.flops(online) - module.flops(part) == pytest.approx(target)


def drafted_by_hand(module: LitHead, item: dict[str, torch.Tensor], steps: int) -> list[list[bool]]:
    """For every draft of a text, whether each of its steps was right: drafted greedily from each response token on,
    the head reading all rows anew for every token. A draft ends at its first wrong step, at `steps`, or with the text.
    """
    head, target = module.head, module.objective.target
    ids, features, is_response = item["input_ids"], item["features"].float(), item["loss_mask"].tolist()
    wanted = target.lm_head(features).argmax(-1)  # [T], what the target says after token t
    drafts = []
    for start in range(len(ids) - 2):  # the target's last true feature is f_start; x_{start+1} is known
        known, states, right = ids[1 : start + 2].tolist(), features[: start + 1], []
        while len(right) < steps and start + len(right) + 2 < len(ids) and is_response[start + len(right) + 2]:
            hidden = head(target.embed(torch.tensor([known])), states[None])[0, -1]
            drafted = int(target.lm_head(hidden).argmax())
            right.append(drafted == int(wanted[len(known)]))
            if not right[-1] or drafted != int(ids[len(known) + 1]):
                break
            known, states = known + [drafted], torch.cat([states, hidden[None]])
        drafts.append(right)
    return drafts


def greedy_items(target, number: int) -> list[dict[str, torch.Tensor]]:
    """Texts that the target has written greedily after random prompts, with its features."""
    items, generator = [], torch.Generator().manual_seed(3)
    for i in range(number):
        prompt = torch.randint(target.info.vocab_size, (4 + i % 3,), generator=generator).tolist()
        ids = prompt + generate_one(target, None, prompt, SamplingParams(), 30, TorchSource(0)).tokens
        row = torch.tensor(ids)
        items.append(
            {
                "input_ids": row,
                "features": target.features(row[None])[0],
                "loss_mask": torch.arange(len(ids)) >= len(prompt),
                "position_ids": torch.arange(len(ids)),
            }
        )
    return items


def part_of(items: list[dict[str, torch.Tensor]], packed: bool = False) -> Part:
    batch = (pack_features if packed else collate_features)(items)
    tokens = EagleHead.num_loss_tokens(batch)
    return Part(batch, tuple(Key(0, i) for i in range(len(items))), tokens, tokens, True, True)


def test_agreement_by_draft_step_is_that_of_drafting_greedily_from_everywhere(artefacts, tmp_path):
    module = a_module(artefacts, tmp_path)
    greedy, data = greedy_items(module.objective.target, 12), FeatureDataset(artefacts.features)
    learn = torch.optim.AdamW(module.head.parameters(), lr=1e-2)
    change(module, noise=0.0, unroll=4)
    for _ in range(30):  # until drafts go on for some steps
        module.loss(part_of(greedy)).loss.backward()
        learn.step()
        learn.zero_grad()
    change(module, agreement_steps=4)
    for items in (greedy, greedy[:5] + [data[i] for i in range(7)]):  # and sampled text, which leaves the greedy path
        metrics = module.validate([part_of(items[:7]), part_of(items[7:])])
        with torch.no_grad():
            drafts = [draft for item in items for draft in drafted_by_hand(module, item, 4)]
        assert metrics["agreement_1"] == metrics["top1"]
        for j in range(4):
            reached = [draft[j] for draft in drafts if len(draft) > j]
            assert len(reached) > 20 and 0.1 < sum(reached) / len(reached) < 0.95, j  # else it would say nothing
            assert metrics[f"agreement_{j + 1}"] == sum(reached) / len(reached), j
    packed = module.validate([part_of(items, packed=True)])
    assert {k: v for k, v in packed.items() if "agree" in k} == {k: v for k, v in metrics.items() if "agree" in k}


def test_a_draft_ends_with_its_document(artefacts, tmp_path, monkeypatch):
    module = a_module(artefacts, tmp_path)
    right = lambda target, hidden, rows: torch.where(rows, batch.input_ids[:, 2:], -1)  # noqa: E731
    monkeypatch.setattr("draftsmith.modules.drafters.eagle.head.choices", right)
    target = module.objective.target
    first, second = greedy_items(target, 2)
    items = [{k: v[-8:] for k, v in item.items()} for item in (first, second)]  # responses from their first token on
    joined = {k: torch.cat([item[k] for item in items]) for k in items[0]}
    batch = collate_features([{**joined, "position_ids": torch.arange(8).repeat(2)}])
    sums, counts = module.head.agreement(batch, target, 2)
    assert sums == counts
    # 14 rows of the pairing; the second document's first one continues no draft.
    assert [int(count) for count in counts.values()] == [14, 12]


def test_fine_tuning_starts_at_the_heads_own_loss(artefacts, tmp_path, trained):
    """Of a target that is not the recorded one, too: a head is fine-tuned for a changed model."""
    other = tmp_path / "head"
    shutil.copytree(trained / "best", other)
    config_file = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config_file, "target": {"config": "another"}}))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["sha256"]["config.json"] = hashlib.sha256((other / "config.json").read_bytes()).hexdigest()
    (other / "manifest.json").write_text(json.dumps(manifest))
    module, data, *_ = prepare(config(artefacts, tmp_path / "run", init=str(other)))
    part = a_part(artefacts, data.val.indices)
    loaded = a_module(artefacts, tmp_path)
    loaded.head = load_head(trained / "best")
    fresh = a_module(artefacts, tmp_path)
    found, wanted = module.validate([part]), loaded.validate([part])
    assert {name: found[name] for name in wanted} == wanted and found["loss"] < fresh.validate([part])["loss"]
    assert all(p.requires_grad for p in module.head.parameters())


def test_a_fine_tuned_head_goes_on_only_from_the_same_start(artefacts, tmp_path, trained):
    start = shutil.copytree(trained / "best", tmp_path / "start")
    settings = config(artefacts, tmp_path / "run", init=str(start), max_steps=2, tau_prompts=0)
    run(settings)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    sha256 = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads((tmp_path / "run" / "last" / "manifest.json").read_text())["inputs"]["init"] == sha256
    (tmp_path / "run" / "training.json").unlink()  # as if it had been interrupted
    shutil.rmtree(start)
    save_head(start, a_module(artefacts, tmp_path).head, {}, "card")  # another head of the same shape at the same path
    with pytest.raises(InputError, match=r"another inputs\.init"):
        run(dataclasses.replace(settings, resume=True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_layers": 2}, r"num_layers: found 2, expected 1, as the head of --init has"),
        ({"init": "target-first-layer"}, "init: found target-first-layer"),
        ({"target": "NARROW"}, "init: found .* of width 32, expected width 16"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(artefacts, tmp_path, trained, changes, expected):
    settings = config(artefacts, tmp_path / "run", **{"init": str(trained / "best"), **changes})
    if settings.target == "NARROW":
        settings = dataclasses.replace(settings, target=str(tiny_llama_dir(tmp_path / "narrow", hidden=16)))
    with pytest.raises(InputError, match=expected):
        make_head(settings, load_lm(settings.target))


def test_a_head_with_plain_positions_leaves_the_targets_scaling_out(artefacts, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
    path = str(tiny_llama_dir(tmp_path / "scaled", rope_parameters=scaling))
    heads = [make_head(config(artefacts, tmp_path, target=path, rope=r), load_lm(path)) for r in ("target", "plain")]
    assert [head.config.llama.rope_scaling.kind for head in heads] == ["llama3", "default"]
    saved = save_head(tmp_path / "head", heads[0], {}, "card")
    with pytest.raises(InputError, match="rope: found plain, expected target"):
        make_head(config(artefacts, tmp_path, target=path, rope="plain", init=str(saved)), load_lm(path))
