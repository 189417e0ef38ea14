"""Heads that other trainers' own code writes, read by ours: `python tests/makers.py [WORD ...]` after
`make engines ENGINES=makers` prints a line for each case whose name has all of the words, and a table.

A case is a head of random weights for a tiny target, made by the trainer's class and saved by its own export. What
`import` makes of it is compared with what the trainer's class computes from the same files: EAGLE-3 and MTP along three
passes from every place of a text, blocks in all slots. Every case is float32.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers_code import BLOCK, LAYERS, LENGTH, MAKERS, WINDOW, Drafts, Text  # isort: skip (before the trainers)
import torch
import transformers
import yaml
from worlds import tiny_llama_dir

from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.drafters.branches import as_decoding
from draftsmith.modules.formats.base import largest
from draftsmith.modules.pretrained.heads import load_draft_head, load_head, original_of, save_head
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError

# Of logits up to 10: two float32 implementations; a wrong norm, order or mask changes them by tenths.
BAR = 1e-4


@dataclass(frozen=True)
class Case:
    """A head as a trainer writes it.

    write: makes the head for a target and saves it. drafts: loads it by the trainer's class. near: most tokens behind
    which rows are compared, where the trainer lays its window otherwise than servers do. apart: what else the trainer
    computes otherwise than every server.
    """

    maker: str
    kind: str
    name: str
    write: Callable[[Path, Path], None]
    drafts: Callable[[Path, Text], Drafts]
    family: str = "qwen3"
    near: int = 2**31
    apart: str = ""

    def __str__(self) -> str:
        return f"{self.maker} {self.kind} {self.name} ({self.family})"


# What a trainer computes otherwise than every server.
APART = {
    ("SpecForge", "norm_output"): "feeds states back unnormed",
    ("SpecForge", "no norm"): "norms no logits",
    ("ModelOpt", "default"): "norms the first layer's states twice",
    ("ModelOpt", "2 layers"): "norms the first layer's states twice",
}


def all_cases() -> Iterator[Case]:
    """Yield the cases of makers.yaml: maker -> kind -> name -> options of the trainer's `write`.

    `families` of a case are those of its targets.
    """
    for maker, kinds in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).items():
        write, drafts = MAKERS[maker]
        for kind, names in kinds.items():
            for name, given in names.items():
                options = dict(given or {})
                families = options.pop("families", ["qwen3"])
                # Of a block that is not causal no slot may see less, so that every one shows in all.
                near = WINDOW - BLOCK if maker == "speculators" and "window" in options else 2**31
                read = functools.partial(drafts, kind, *([options] if maker == "ModelOpt" else []))
                apart = APART.get((maker, name), "") if kind == "eagle3" else ""
                exports = ["hf", "sglang"] if (maker, kind) == ("SpecForge", "eagle3") else [""]
                for saved, family in itertools.product(exports, families):
                    own = {**options, "export": saved} if saved else options
                    label = f"{name}, {saved}" if saved else name
                    made = functools.partial(write, kind, **own)
                    yield Case(maker, kind, label, made, read, family, near, apart)


# -- ours


@torch.no_grad()
def our_drafts(path: Path, text: Text, depth: int, count: int) -> Drafts:
    """Draft along the text's own tokens from `count` places behind its second token, as the decoder does."""
    head = load_draft_head(path, text.lm)
    net, starts = head.net(text.lm), torch.arange(2, 2 + count)
    features = text.lm.features(text.ids[None], aux_layers=head.aux_layers)[0]
    with as_decoding(net.device):
        net.open(text.ids.tolist(), features, depth)
        drafts = [net.logits(net.branch(starts))]
        for level in range(1, depth):
            read = text.ids[(starts + level - 1).clamp_max(LENGTH - 1)]
            drafts.append(net.logits(net.read(read, level)))
    return drafts


def difference(ours: Drafts, theirs: Drafts, near: int) -> float:
    """Return the largest difference of logits; infinity where one of them drafts what the other cannot."""
    worst = 0.0
    for depth, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        count = max(0, min(len(other), near - depth - 2))
        own, other = own[:count], other[:count]
        worst = max(worst, largest(torch.where(own == other, 0.0, own - other)))
    return worst


def compare_with_maker(case: Case, text: Text, folder: Path) -> tuple[str, str]:
    """Return a verdict and why."""
    theirs, ours = folder / "theirs", folder / "ours"
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        case.write(text.path, theirs)
        try:
            import_head(ImportConfig(str(theirs), ours, str(text.path)))
            with torch.no_grad():
                expected = case.drafts(theirs, text)
            drafts = our_drafts(ours, text, len(expected), len(expected[0]))
        except InputError as error:
            return "refused", str(error)
        worst, back = difference(drafts, expected, case.near), written_back(case, text, folder)
    imported = read_object(ours / "manifest.json", {})["imported"]
    said = "".join(f"; reported: {problem}" for problem in imported["problems"])
    same = worst <= BAR and (isinstance(back, str) or back <= BAR)
    verdict = "right" if same else "apart" if case.apart else "WRONG"
    said += f"; {case.apart}" * (verdict == "apart")
    return (
        verdict,
        f"{worst:.1e} as {imported['producer']}, {back if isinstance(back, str) else f'{back:.1e}'} back{said}",
    )


def written_back(case: Case, text: Text, folder: Path) -> float | str:
    """Change every weight, write the head as it came, and compare with the trainer's class; or say why not."""
    ours, changed, back = folder / "ours", folder / "changed", folder / "back"
    head = load_head(ours)
    for weight in head.parameters():
        weight.data.add_(0.05 * torch.randn_like(weight))
    save_head(changed, head, read_object(ours / "manifest.json", {}), "", original_of(ours))
    try:
        code = export(ExportConfig(output=back, head=changed, target=str(text.path)))
    except InputError as error:
        return f"refused ({error})"
    if code:
        return "the check differs"
    with torch.no_grad():
        expected = case.drafts(back, text)
    return difference(our_drafts(changed, text, len(expected), len(expected[0])), expected, case.near)


def main(words: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        texts = {}
        for family in ("qwen3", "llama", "qwen2"):
            path = tiny_llama_dir(Path(scratch) / family, layers=LAYERS, family=family)
            texts[family] = Text.of(path)
        for number, case in enumerate(all_cases()):
            if not all(word in str(case).split(maxsplit=2) or word in str(case) for word in words):
                continue
            verdict, why = compare_with_maker(case, texts[case.family], Path(scratch) / str(number))
            counts[case.maker, verdict] += 1
            sys.stdout.write(f"{verdict:13} {case}: {why}\n")
            sys.stdout.flush()
    for maker in dict.fromkeys(maker for maker, _ in counts):
        found = ", ".join(f"{count} {verdict}" for (own, verdict), count in counts.items() if own == maker)
        sys.stdout.write(f"{maker}: {found}\n")
    total = Counter[str]()
    for (_, verdict), count in counts.items():
        total[verdict] += count
    sys.stdout.write(f"{sum(total.values())} cases: {', '.join(f'{n} {v}' for v, n in total.items())}\n")
    sys.exit(int(total["WRONG"] > 0))


if __name__ == "__main__":
    main(sys.argv[1:])
