"""Settings of `draftsmith eval policies`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.settings import comma_numbers
from draftsmith.eval.bench.load import trained_for
from draftsmith.eval.studies.common import StudyConfig, head_directories
from draftsmith.eval.studies.policies.comparison import PolicyGrid
from draftsmith.modules.drafters.chains import chain_methods
from draftsmith.modules.types import InputError, at_least, between


@dataclass(frozen=True, kw_only=True)
class PoliciesConfig(StudyConfig):
    """Compares stop policies of draft chains on the same text and the same accept draws: fixed lengths, thresholds,
    learning while decoding, acceptance heads, and what a policy that knew more would gain. Settings are chosen on dev
    prompts. Run again, it goes on from the rounds that are recorded.

    Attributes:
        draft: what drafts chains: a draft model, a trained head, or several of them.
        heads: folders of acceptance heads by name, head directories or trainings' outputs. Each is used with the
            drafter that it was trained for, at the temperatures of its labels' mode: greedy, or sampling.
        draft_heads: deprecated, the same as --heads.
        eagle_heads: deprecated, the same as --heads.
        split: prompts that are reported; none takes all.
        dev_prompts: a source of prompts that settings are chosen on, where they are in another than `prompts`.
        dev_split: split of the prompts that settings are chosen on. Where it is the reported one, or the rows name no
            split, the last quarter of the prompts is for choosing and the others are reported.
        train_split: prompts whose text heads were trained on, where train_text names none.
        train_text: directories of artefacts that heads were trained on, for the overlap of answers with them.
        ngram: tokens of the n-grams that the overlap counts.
        limit: report on the first so many prompts; 0 takes all.
        dev_limit: choose on the first so many prompts of dev_split; 0 takes all.
        max_drafted: longest draft.
        cs: costs of a drafted token by that of a round without a draft, separated by commas; this machine's own is
            added.
        hs: thresholds on the probability that some drafted token is rejected.
        ts: thresholds on q of each drafted token.
        bench_limit: decode so many prompts with the chosen settings for real, on the clock; 0 leaves it out.
    """

    split: str | None = "test"
    limit: int = 120
    max_new_tokens: int = 128
    heads: tuple[Path, ...] = ()
    draft_heads: Path | None = None
    eagle_heads: Path | None = None
    dev_prompts: str | None = None
    dev_split: str | None = "dev"
    train_split: str = "train"
    train_text: tuple[Path, ...] = ()
    ngram: int = 8
    dev_limit: int = 40
    max_drafted: int = 16
    cs: str = "0.05,0.1,0.2,0.35"
    hs: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.98,0.99"
    ts: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
    bench_limit: int = 40

    @property
    def chain_drafters(self) -> list[str]:
        return [name for name in chain_methods() if name in self.drafters]

    @property
    def grid(self) -> PolicyGrid:
        deepest = self.max_drafted
        return PolicyGrid(
            tuple(range(1, deepest + 1)),
            tuple(comma_numbers("ts", self.ts, float)),
            tuple(comma_numbers("hs", self.hs, float)),
            tuple(sorted({max(1, deepest // 2), deepest})),
        )

    @property
    def head_places(self) -> dict[str, dict[str, Path]]:
        """Drafter -> directories of the acceptance heads that were trained for it, by name.

        Raises:
            InputError: a folder without heads, a head for a drafter that is not given, or two of one name.
        """
        found: dict[str, dict[str, Path]] = {drafter: {} for drafter in self.chain_drafters}
        for folder in filter(None, (*self.heads, self.draft_heads, self.eagle_heads)):
            for name, place in head_directories(folder).items():
                drafter = trained_for(str(place))
                if drafter not in found:
                    told = f"{place}, for what {drafter} drafts, which is not given"
                    raise InputError("heads", told, "--draft with it", "Pass --draft DIR too.")
                if name in found[drafter]:
                    told = f"{place} and {found[drafter][name]}"
                    raise InputError("heads", told, "one head of a name", "Rename one of them.")
                found[drafter][name] = place
        return found

    def check(self) -> None:
        """
        Raises:
            InputError: settings that make no sense.
        """
        for name in ("max_drafted", "ngram"):
            at_least(name, getattr(self, name), 1)
        for name in ("dev_limit", "bench_limit"):
            at_least(name, getattr(self, name), 0)
        for name in ("hs", "ts", "cs"):
            for value in comma_numbers(name, getattr(self, name), float):
                between(name, value, 0, 10 if name == "cs" else 1)
        if not self.chain_drafters:
            raise InputError("draft", "nothing", "a drafter", "Pass --draft: a draft model, a head, or several.")
        _ = self.head_places
