"""The comparison with an engine, against a server that answers as vLLM does; the engine itself is in
`tests/engines/gate_test.py`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from servers import EngineLike
from worlds import quick_eagle3_head, quick_eagle_head

from draftsmith.data.engines.process import running
from draftsmith.eval.check.check import run
from draftsmith.eval.check.states import PROMPTS, answered_prompts
from draftsmith.eval.engines.vllm import server_words
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.commands import vllm_command
from draftsmith.modules.pretrained.heads import build_head, load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

TARGET, NEW_TOKENS = "embedded:target", 40


@pytest.fixture(scope="module")
def lm() -> Any:
    torch.set_num_threads(1)
    return load_lm(TARGET)


@pytest.fixture(scope="module")
def heads(lm, tmp_path_factory) -> Path:
    """KIND/head, and KIND/export for vLLM: of heads that know the answers to the prompts that are asked here."""
    root = tmp_path_factory.mktemp("heads")
    rows = [text["input_ids"] for text in answered_prompts(lm, lm.info.max_position)]
    llama = dataclasses.replace(lm.config, num_layers=1, rope_theta=300.0)
    made = {
        "eagle": quick_eagle_head(lm, rows, steps=100),
        "eagle3": quick_eagle3_head(
            lm, rows, 60, draft_vocab=1000, llama=llama, aux_layers=(1, 4, 11), norm_output=True
        ),
    }
    for kind, head in made.items():
        saved = save_head(root / kind / "head", head, {"target": lm.info.identity}, "card")
        config = ExportConfig(format="vllm", head=saved, target=TARGET, output=root / kind / "export")
        assert export(config) == 0
    return root


@pytest.fixture
def engine(lm, heads) -> Iterator[Callable[..., EngineLike]]:
    """A server over a head, of which fields of the config and tensors are others."""
    started = []

    def start(kind: str, state: dict[str, Any] | None = None, **fields: Any) -> EngineLike:
        head: Any = load_head(heads / kind / "head")
        config = dataclasses.replace(head.config, **fields)
        own = {**stored_tensors(head), **(state or {})}
        changed = build_head(kind, config, own).eval().requires_grad_(False)
        started.append(EngineLike(lm, TARGET, kind, changed))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def chats(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"p{number}", "messages": [{"role": "user", "content": text}]} for number, text in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def gate(heads, chats, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "400")

    def call(server: EngineLike, **settings: Any) -> tuple[int, str]:
        given = {"data": str(chats), "target": TARGET, "max_new_tokens": NEW_TOKENS, **settings}
        given = {"directory": heads / server.kind / "export", **given}
        capsys.readouterr()
        code = run(CheckConfig(engine="vllm", server=server.url, **given))
        return code, " ".join(capsys.readouterr().out.split())

    return call


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_server_with_the_same_head_is_equal(gate, engine, kind: str):
    server = engine(kind)
    code, shown = gate(server)
    assert (code, server.ended) == (0, len(PROMPTS))
    assert "equal: text, drafts and accepted tokens of all 3 prompts" in shown
    assert f"drafts {server.drafts} {server.drafts}" in shown
    accepted = sum(server.places)
    assert accepted > server.drafts, "the head knows nothing"
    assert f"accepted tokens {accepted} {accepted}" in shown
    tokens = int(re.search(r"tokens (\d+) (\d+) accepted", shown)[1])
    assert f"prompts, tau {tokens / max(len(PROMPTS) + server.drafts, tokens - accepted):.3f}" in shown


@pytest.mark.slow
def test_what_the_engine_takes_the_head_for_is_named(gate, engine):
    code, shown = gate(engine("eagle3", aux_layers=(0, 3, 10)))
    assert code == 1 and "drafts are exactly what our chain gives with layers 0, 3, 10 in place of 1, 4, 11" in shown
    assert "differs: text of 0 and drafts of" in shown


@pytest.mark.slow
def test_what_is_none_of_the_known_causes_is_said_with_what_was_tried(gate, engine, heads):
    noise = torch.randn(load_head(heads / "eagle3/head").fc.weight.shape, generator=torch.Generator().manual_seed(0))
    code, shown = gate(engine("eagle3", {"fc.weight": noise}))
    assert code == 1 and "drafts are not explained by any of: layers 0, 3, 10 in place of" in shown
    assert "rope of base" in shown and "the head of the directory by vLLM's rules" in shown


@pytest.mark.slow
def test_a_directory_that_is_another_head_than_the_trained_one_is_told(gate, engine, heads, chats, tmp_path):
    """The head was trained on layers 1, 4, 11 and says 0, 2, 3 in its directory, as the engine reads it."""
    directory = Path(shutil.copytree(heads / "eagle3/export", tmp_path / "export"))
    fields = json.loads((directory / "config.json").read_text())
    fields["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]
    (directory / "config.json").write_text(json.dumps(fields))
    server = engine("eagle3", aux_layers=(0, 2, 3))
    assert gate(server, directory=directory)[0] == 0  # without the trained head nobody knows
    code, shown = gate(server, directory=directory, head=heads / "eagle3/head")
    assert code == 1 and "exactly what our chain gives with the head of the directory by vLLM's rules" in shown
    assert "is another head for vLLM than ours: aux_layers: [0, 2, 3] in this system, exported with [1, 4, 11]" in shown


def test_another_text_is_located(gate, engine):
    server = engine("eagle")
    server.spoil = lambda ids: [*ids[:7], ids[7] + 1, *ids[8:]]
    code, shown = gate(server)
    assert code == 1 and "text of p0 from token 7 on" in shown
    assert "another target, type or kernel" in shown and "differs: text of 3 and drafts of 0 of 3 prompts" in shown


def test_another_chat_template_is_located(gate, engine):
    server = engine("eagle")
    server.template = lambda ids: [*ids[:2], 5, *ids[2:]]
    code, shown = gate(server)
    assert code == 1 and "the server's chat template makes other tokens of a question from place 2 on: [5," in shown
    assert "drafts of 0 of 3 prompts, the server's chat template," in shown


@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [
        ("more_requests", 1, "2 requests counted where one was sent"),
        ("returns_ids", False, "a reply without token ids"),
    ],
)
def test_a_server_that_cannot_be_compared_is_refused(gate, engine, fault, value, said):
    server = engine("eagle")
    setattr(server, fault, value)
    with pytest.raises(InputError, match=said):
        gate(server)


def test_the_engine_starts_as_the_printed_command_does():
    printed = vllm_command("eagle3", Served("/a b/target", "/heads/it's", 5))
    words = server_words(Path("/env/bin/python"), printed, "float32", 300)
    assert words[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/a b/target"]
    assert words[5] == "--speculative-config"
    assert json.loads(words[6]) == {"method": "eagle3", "model": "/heads/it's", "num_speculative_tokens": 5}
    assert words[words.index("--max-model-len") + 1] == "300"


SERVER = """
import sys, subprocess, http.server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def ended(pid: int) -> bool:
    """Gone, or only not yet reaped."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_an_engine_ends_when_the_check_is_stopped():
    code = (
        "import sys, time\n"
        "from draftsmith.data.engines.process import running\n"
        f"with running([sys.executable, '-c', {SERVER!r}], {{}}) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    check = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    assert check.stdout is not None
    with urlopen(f"{check.stdout.readline().strip()}/health") as reply:
        pid = int(reply.read())
    check.send_signal(signal.SIGTERM)
    assert check.wait(30) != 0
    assert ended(pid)


def test_an_engine_that_dies_is_shown_with_its_last_lines(capsys):
    words = [sys.executable, "-c", "print('loading'); raise ValueError('no such architecture')"]
    died = r"engine: found exit status 1, ValueError: no such architecture.*\.log"
    with pytest.raises(InputError, match=died), running(words, {}):
        pass
    assert "loading" in capsys.readouterr().err
