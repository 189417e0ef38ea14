"""Log-probabilities of a server: what it leaves out or spells otherwise is said, and is no sign against its answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states_server import StatesServer
from worlds import tiny_llama_dir

from draftsmith.data.engines.served_target import load_target
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams

TEXT, VOCAB = [5, 9, 30, 7, 7, 12], 60
Reply = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("target"), vocab=VOCAB))


class Edited(StatesServer):
    """A server whose log-probabilities pass through `edit`, which gets the reply, its text and how many are asked for.

    models: of its list.
    """

    edit: Callable[[Reply, list[int], int], None]
    models = ("served",)

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.models]}
        reply = super().reply(path, body)
        if "prompt_logprobs" in body:
            self.edit(reply, body["prompt"], body["prompt_logprobs"])
        return reply


def asked(target: str, tmp_path: Path, edit: Callable[[Reply, list[int], int], None], text: list[int]) -> Any:
    """Return the log-probabilities of the last tokens, and which are known."""
    with Edited(load_lm(target), (), tmp_path / "states", connector=False) as server:
        server.edit = edit
        served: Any = load_target(target, server.url, dtype="float32", device="cpu")
        return served.log_probs(text, 2, SamplingParams(1.0))


def places(change: Callable[[Any, int], Any], first: int = 1) -> Callable[[Reply, list[int], int], None]:
    """Change every place from `first` on; given with its text's own token."""

    def edit(reply: Reply, text: list[int], top: int) -> None:
        own = reply["choices"][0]["prompt_logprobs"]
        own[first:] = [change(place, token) for place, token in zip(own[first:], text[first:], strict=True)]

    return edit


def shifted(place: Any, nats: float) -> Any:
    return {token: {"logprob": value["logprob"] + nats} for token, value in place.items()}


def whole(change: Callable[[Reply], Any]) -> Callable[[Reply, list[int], int], None]:
    """Change the reply."""
    return lambda reply, text, top: change(reply)


UNREADABLE: dict[str, tuple[Callable[[Reply, list[int], int], None], str]] = {
    "null": (whole(lambda reply: reply["choices"][0].update(prompt_logprobs=None)), "token 1 of 6"),
    "cut at its end": (whole(lambda reply: reply["choices"][0]["prompt_logprobs"].pop()), "token 5 of 6"),
    "a hole": (places(lambda place, own: None, first=3), "token 3 of 6"),
    "ids with a word": (places(lambda place, own: {f"token_id:{key}": place[key] for key in place}), "token 1 of 6"),
    "NaN": (places(lambda place, own: {**place, str(own): {"logprob": math.nan}}, first=5), "token 6 of 6"),
    # Of 60 tokens: more than 1 in all, and so little that the 20 likeliest are not the likeliest.
    "above their sum": (places(lambda place, own: shifted(place, 0.05)), "with a sum of 1.05, expected log-prob"),
    "logits": (places(lambda place, own: shifted(place, -2.0)), "with a sum of 0.135, expected log-prob"),
    "another token": (places(lambda place, own: {"2": {"logprob": -1.0}}, first=5), "token 6 of 6"),
    "beyond the vocabulary": (places(lambda place, own: {**place, "60": {"logprob": -9.0}}), "to 60, expected 0 to 59"),
    "fewer": (places(lambda place, own: {str(own): place[str(own)], "3": {"logprob": -9.0}}), "expected 20, as asked"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_reply_without_readable_log_probabilities_is_one_line(name, target, tmp_path):
    edit, expected = UNREADABLE[name]
    with pytest.raises(InputError) as error:
        asked(target, tmp_path, edit, TEXT)
    assert expected in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["beyond the vocabulary", "a hole"])
def test_so_is_one_that_is_to_prove_states(name, target, tmp_path):
    with Edited(load_lm(target), (), tmp_path / "states") as server:
        server.edit = UNREADABLE[name][0]
        served: Any = load_target(target, server.url, dtype="float32", device="cpu")
        with pytest.raises(InputError, match="server: found") as error:
            served.logits(torch.tensor(TEXT), keep=1)
    assert UNREADABLE[name][1] in str(error.value)


@pytest.mark.parametrize("models", [(), None])
def test_a_server_without_a_model_or_with_another_reply_is_one_line(models, target, tmp_path):
    """None: replies to rows are a list."""
    with Edited(load_lm(target), (), tmp_path / "states") as server, pytest.raises(InputError, match="without"):
        if models is None:
            server.edit = whole(lambda reply: None)
            server.reply = lambda path, body: [] if "prompt" in body else Edited.reply(server, path, body)
        else:
            server.models = models
        served: Any = load_target(target, server.url, dtype="float32", device="cpu")
        served.logits(torch.tensor(TEXT), keep=1)


def likelier(more: int) -> Callable[[Reply, list[int], int], None]:
    """Give so many more log-probabilities than are asked for, the own token's beside them."""

    def edit(reply: Reply, text: list[int], top: int) -> None:
        for place, token in zip(reply["choices"][0]["prompt_logprobs"][1:], text[1:], strict=True):
            own = {str(token): place[str(token)]}
            kept = sorted(place, key=lambda key: -place[key]["logprob"])[: 20 + more]
            others = {key: place[key] for key in kept}
            place.clear()
            place.update({**own, **others})

    return edit


@pytest.mark.parametrize("more", [0, 7])
def test_which_probabilities_are_known_does_not_depend_on_the_token_that_stands_there(more, target, tmp_path):
    """Else a token that is not among the likeliest would be one of them whenever it is sampled. The server does not
    say that it gives fewer than 60."""
    known = set[tuple[int, ...]]()
    for last in range(2, VOCAB, 6):
        log_probs, last_known = asked(target, tmp_path, likelier(more), [*TEXT, last])
        known.add(tuple(last_known[-1].nonzero()[:, 0].tolist()))
        assert math.isfinite(log_probs[-1, last])
    (tokens,) = known
    assert len(tokens) == 20
