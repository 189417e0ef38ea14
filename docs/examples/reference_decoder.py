"""Speculative decoding with an EAGLE-3 head in plain torch: the algorithm without caches, batches or kernels.

    python reference_decoder.py TARGET HEAD "PROMPT" [TEMPERATURE]

TARGET is a directory that transformers loads, HEAD a directory that `draftsmith train eagle3` wrote. A round has four
parts: draft some tokens, score them with one call of the target, keep the ones that the target agrees with, and take
one more token from the target itself. The output follows the target's own distribution exactly, whatever was drafted
(Leviathan et al. 2023; Sun et al. 2024; Li et al. 2025). Draftsmith's decoder is tested against this file.
"""

import json
import math
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAIN = [[0], [0, 0], [0, 0, 0]]  # a static tree: each node as its path of ranks from the root
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


# -- the target: states of the layers that the head reads, and next-token logits, of every token in one call


def call_target(model, aux_layers, ids, positions, visible):
    """Return logits [T, V] and states [T, 3H]; token i attends to the tokens j with visible[i, j]."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    output = model(ids[None], attention_mask=mask[None, None], position_ids=positions[None], output_hidden_states=True)
    # hidden_states[k] is the residual state after k layers.
    return output.logits[0], torch.cat([output.hidden_states[layer][0] for layer in aux_layers], -1)


# -- the head: one transformer layer over pairs of a token's embedding and the state of the token before it
#
#     row of the head        0        1        2       ...  n-1
#     state of token         x0       x1       x2           x(n-1)     from the target; later in a draft, its own output
#     embedding of token     x1       x2       x3           xn         xn is known, but the target has not read it
#     predicts token         x2       x3       x4           x(n+1)     the first drafted token


class Eagle3:
    def __init__(self, directory, embedding):
        self.config = json.loads((Path(directory) / "config.json").read_text())["head"]
        assert self.config["llama"]["rope_scaling"]["kind"] == "default", "this example has plain rotary positions only"
        self.weights, self.embedding = load_file(Path(directory) / "model.safetensors"), embedding

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name, x):
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["llama"]["rms_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def rotate(self, x, positions):  # [T, heads, D]
        half = x.shape[-1] // 2
        frequencies = self.config["llama"]["rope_theta"] ** (-torch.arange(half) / half)
        angles = positions[:, None, None] * frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def join(self, states):
        """Map states of the target's layers [T, 3H] to the head's width [T, H]."""
        if self.config["fc_norm"]:
            parts = states.chunk(len(self.config["aux_layers"]), -1)
            states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", states)

    def __call__(self, ids, states, positions, visible):
        """Read tokens [T] and states [T, H]; return logits [T, V] of the target's tokens and new states [T, H]."""
        llama, count = self.config["llama"], len(ids)
        pair = torch.cat(
            [self.norm("layer.input_layernorm", self.embedding[ids]), self.norm("layer.hidden_norm", states)], -1
        )
        query, key, value = (
            self.linear(f"layer.self_attn.{name}_proj", pair).view(count, -1, llama["head_dim"]) for name in "qkv"
        )
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        key, value = (x.repeat_interleave(llama["num_heads"] // llama["num_kv_heads"], 1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(llama["head_dim"])  # [heads, T, T]
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -math.inf).softmax(-1), value)
        x = states + self.linear("layer.self_attn.o_proj", mixed.flatten(1))
        inner = self.norm("layer.post_attention_layernorm", x)
        gate, up = self.linear("layer.mlp.gate_proj", inner), self.linear("layer.mlp.up_proj", inner)
        x = x + self.linear("layer.mlp.down_proj", torch.nn.functional.silu(gate) * up)

        normed = self.norm("norm", x)
        logits = self.linear("lm_head", normed)
        if "d2t" in self.weights:  # the head drafts some of the target's tokens only
            whole = torch.full((count, len(self.embedding)), -math.inf)
            logits = whole.index_copy(1, self.weights["d2t"], logits)
        return logits, normed if self.config["norm_output"] else x


# -- sampling


def distribution(logits, temperature):
    """Return [V] or [T, V]: the softmax, or all mass on the best token if greedy."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.float() / temperature).softmax(-1)


def sample(probs, uniform):
    """Draw a token from [V] by the inverse of its cumulative distribution."""
    sums = probs.double().cumsum(-1)
    return int(torch.searchsorted(sums, sums[-1] * uniform(), right=True))


# -- one round


def draft(head, tree, ids, states, temperature, uniform):
    """Draft a token for every node of a tree; return tokens, parents, and the distributions they were sampled from.

    A chain is sampled from the head's distribution q. Nodes of a tree are the head's best tokens, by rank.
    """
    known = len(states)  # tokens that the target has read; ids has one more
    sampled = temperature > 0 and all(set(path) == {0} for path in tree)
    parents = [tree.index(path[:-1]) if len(path) > 1 else -1 for path in tree]
    rows, positions = head.join(states), torch.arange(known)
    read, visible = ids[1:], torch.ones(known, known, dtype=torch.bool).tril()
    tokens, probs = [], []
    for node, path in enumerate(tree):
        # Row of the head that predicts this node: the last known token's, or the parent's.
        logits, outputs = head(read, rows, positions, visible)
        row = known - 1 if parents[node] < 0 else known + parents[node]
        if sampled:
            probs.append(distribution(logits[row], temperature))
            tokens.append(sample(probs[-1], uniform))
        else:
            tokens.append(int(logits[row].topk(path[-1] + 1).indices[-1]))
        # The node becomes a row: its token, its parent's output in place of a target state, seen by its descendants.
        read = torch.cat([read, torch.tensor([tokens[-1]])])
        rows = torch.cat([rows, outputs[row][None]])
        positions = torch.cat([positions, torch.tensor([known - 1 + len(path)])])
        above = torch.cat([visible[row], torch.tensor([True])])
        visible = torch.cat([torch.nn.functional.pad(visible, (0, 1)), above[None]])
    return tokens, parents, torch.stack(probs) if probs else None


def verify(tokens, parents, draft_probs, logits, temperature, uniform):
    """Walk from the root and return the accepted nodes and the target's own token.

    logits: [1 + nodes, V], of the last known token and of every node.
    """
    if draft_probs is not None:
        return verify_block(tokens, draft_probs, distribution(logits, temperature), uniform)
    path, node = [], -1
    while True:
        p = distribution(logits[node + 1], temperature)
        # Draw from p: if the token was drafted, it is accepted, else it is the target's own.
        token = sample(p, uniform) if temperature > 0 else int(p.argmax())
        child = next((i for i, parent in enumerate(parents) if parent == node and tokens[i] == token), None)
        if child is None:
            return path, token
        path.append(child)
        node = child


def verify_block(tokens, q, p, uniform):
    """Verify a chain that was sampled from q [K, V], with p [K + 1, V] (block verification, Sun et al. 2024)."""
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * float(p[i, token]) / float(q[i, token])))
    # Each length has a chance; the longest one that is drawn is accepted.
    for i in range(len(tokens), 0, -1):
        chance = weights[i]
        if i < len(tokens) and chance < 1:
            excess = float((chance * p[i] - q[i]).clamp_min(0).sum())
            chance = excess / (excess + 1 - chance)
        if uniform() < chance:
            break
    else:
        i = 0
    own = (weights[i] * p[i] - q[i]).clamp_min(0) if i < len(tokens) else p[i]
    return list(range(i)), sample(own / own.sum() if own.sum() > 0 else p[i], uniform)


@torch.inference_mode()
def generate(model, head, prompt, max_new_tokens, tree=TREE, temperature=0.0, uniform=random.random, ends=()):
    """Decode token ids; return the new tokens, and the number of accepted tokens of every round."""

    def causal(count):
        return torch.ones(count, count, dtype=torch.bool).tril()

    aux_layers, ids = head.config["aux_layers"], torch.tensor(prompt)
    logits, states = call_target(model, aux_layers, ids, torch.arange(len(ids)), causal(len(ids)))
    probs = distribution(logits[-1], temperature)
    new, accepted = [sample(probs, uniform) if temperature > 0 else int(probs.argmax())], []
    while len(new) < max_new_tokens and new[-1] not in ends:
        ids = torch.tensor([*prompt, *new])
        # A draft never goes beyond the tokens that may still come, one of which is the target's own.
        room = max_new_tokens - len(new) - 1
        nodes = [path for path in tree if len(path) <= room]
        tokens, parents, draft_probs = (
            draft(head, nodes, ids, states, temperature, uniform) if nodes else ([], [], None)
        )

        # One call scores all nodes: each sees the known tokens, its ancestors and itself.
        known, visible = len(ids), causal(len(ids) + len(tokens))
        visible[known:, known:] = torch.eye(len(tokens), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                visible[known + node] |= visible[known + parent]
        depths = torch.tensor([len(path) for path in nodes], dtype=torch.long)
        positions = torch.cat([torch.arange(known), known - 1 + depths])
        read = torch.cat([ids, torch.tensor(tokens, dtype=torch.long)])
        logits, states = call_target(model, aux_layers, read, positions, visible)

        path, token = verify(tokens, parents, draft_probs, logits[known - 1 :], temperature, uniform)
        accepted.append(len(path))
        states = torch.cat([states[:known], states[[known + node for node in path]]])
        for emitted in [*(tokens[node] for node in path), token]:
            new.append(emitted)
            if emitted in ends:
                break
    return new[:max_new_tokens], accepted


def main(target, directory, prompt, temperature=0.0):
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    head = Eagle3(directory, model.get_input_embeddings().weight)
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ends = model.generation_config.eos_token_id or ()
    ends = (ends,) if isinstance(ends, int) else tuple(ends)
    new, accepted = generate(model, head, ids, 128, temperature=temperature, ends=ends)
    print(tokenizer.decode(new))
    print(f"{len(new) / (1 + len(accepted)):.2f} tokens per target call", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:4], temperature=float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
