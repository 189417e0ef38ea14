"""Training options shared by all heads, and those shared by all drafters."""

from __future__ import annotations

import dataclasses
import functools
import math
import netrc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from draftsmith.data.settings import FeatureDtype, StageTarget, volatile
from draftsmith.data.store.parts import Part, parts_of, words_of
from draftsmith.modules.drafters import HEADS, head_class
from draftsmith.modules.types import InputError, check_config

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead

Logger = Literal["csv", "wandb", "wandb-offline"]
MOST = 2**31 - 1
NO_DATA = "none"  # where a plan assumes its samples
# Smallest and largest values of the options that are numbers. Those of a head are in its Settings.
SHARE = (0, 1, "[)")
RANGES: dict[str, Any] = {
    **dict.fromkeys(("max_steps", "tokens_per_batch", "max_length", "num_workers", "num_threads"), (0, MOST)),
    "span_tokens": (0, MOST),
    **dict.fromkeys(("val_every", "save_every", "tau_prompts", "num_blocks", "width"), (0, MOST)),
    **dict.fromkeys(("epochs", "batch_size", "accumulate", "devices", "log_every", "keep"), (1, MOST)),
    **dict.fromkeys(("clip", "weight_decay", "minutes"), (0, math.inf)),
    **dict.fromkeys(("val_share", "warmup_share", "betas", "mix"), SHARE),
    **dict.fromkeys(("lr", "w_acc", "w_rej"), (0, math.inf, "(]")),
    **dict.fromkeys(("plan_gb", "plan_tflops"), (0, math.inf, "(]")),
    "seed": (0, 2**63 - 1),
}
# Shorter pieces of a sequence have too little context.
MIN_LENGTH = 16
Strategy = Literal[
    "auto",
    "ddp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
]


def has_wandb_key() -> bool:
    """Return whether there is a key in the environment or in the netrc file of `wandb login`; the key is not read."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return path.exists() and host in netrc.netrc(str(path)).hosts
    except (netrc.NetrcParseError, OSError):
        return False


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Options of the optimizer and its batches.

    Attributes:
        epochs: Passes over the data; not used when max_steps or minutes are given.
        max_steps: Optimizer steps in all; 0 leaves it to epochs.
        minutes: As many steps as fit in so many minutes, counted from the command's start over all runs of it, with the
            last validation and saves in them; the learning rate follows the clock. 0 leaves it to the others.
        batch_size: Sequences in one optimizer step, over all devices and accumulated parts together.
        tokens_per_batch: Tokens in one optimizer step, over all devices and accumulated parts, instead of batch_size;
            steps hold whole sequences. A drafter's are packed end to end, without padding. 0 counts sequences.
        accumulate: Parts that a step's batch is computed in, one after the other, to save memory.
        optimizer: adamw, or muon for matrices and AdamW for the rest: vectors, embeddings, lm_heads.
        lr: Peak learning rate.
        schedule: How the learning rate falls after warm-up; hold stays at its peak for half of the steps.
        warmup_share: Share of all steps in which the learning rate rises linearly from 0.
        weight_decay: Decay of matrices, with muon of those that it moves; vectors (norms, biases) have none.
        betas: AdamW's averaging factors.
        clip: Largest gradient norm; 0 switches clipping off.
        precision: float32 throughout, or bf16 autocast over float32 weights; auto takes bf16 on a GPU that has it.
            float32 products are TF32 on a GPU.
    """

    help_group: ClassVar[str] = "Optimization"
    help_rarely: ClassVar[tuple[str, ...]] = ("warmup_share", "weight_decay", "betas", "clip")

    epochs: int = 3
    max_steps: int = 0
    minutes: float = 0.0
    batch_size: int = 32
    tokens_per_batch: int = 0
    accumulate: int = volatile(1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 5e-5
    schedule: Literal["cosine", "linear", "hold", "constant"] = "cosine"
    warmup_share: float = 0.03
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    precision: Literal["auto", "32", "bf16"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Hardware(StageTarget):
    """Options of where and how a training runs.

    Attributes:
        devices: Devices of this machine to use; under torchrun it is what torchrun started.
        strategy: How several devices work together; auto takes ddp when there are several. The DeepSpeed stages
            partition the optimizer state, then the gradients, then the weights; offload keeps the parts in host memory.
        num_workers: Processes that read data; 0 reads in the training process.
    """

    help_group: ClassVar[str] = "Hardware"
    help_rarely: ClassVar[tuple[str, ...]] = ("num_workers",)

    devices: int = volatile(1)
    strategy: Strategy = volatile("auto")
    num_workers: int = volatile(0)


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Options of what is measured, logged and saved.

    Attributes:
        val_every: Optimizer steps between validations; 0 validates at the end of each epoch. The last step always does.
        log_every: Optimizer steps between logged losses.
        save_every: Optimizer steps between checkpoints, from which the same command continues; 0 saves at validations.
        keep: Checkpoints to keep, the newest ones.
        loggers: csv (always written), wandb (Weights & Biases, if `wandb login` has left a key), wandb-offline (into
            files, for `wandb sync`).
    """

    help_group: ClassVar[str] = "Validation and tracking"
    help_rarely: ClassVar[tuple[str, ...]] = ("save_every", "keep")

    val_every: int = volatile(0)
    log_every: int = volatile(20)
    save_every: int = volatile(0)
    keep: int = volatile(2)
    loggers: tuple[Logger, ...] = volatile(("csv", "wandb"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Optimization, Hardware, Tracking):
    """Options shared by all heads.

    Attributes:
        data: The artifact to train on, a directory. Several are joined: --data A --data 'B*2' has B's rows twice in an
            epoch, 'B*0.5' half of its conversations.
        output: Directory that receives best/, last/, checkpoints/, metrics.csv and config.yaml. If it holds a training
            with the same settings, that continues from its newest intact checkpoint.
        val: Another artifact to validate on; without it a share of `data` is held out.
        val_share: Share of the prompts of `data` that is held out, chosen by a hash of their token ids.
        max_length: Longer sequences are split into pieces of so many tokens; 0 splits at the frozen model's context.
        seed: Of initial weights, order of samples and noise.
    """

    help_group: ClassVar[str] = "Data"
    help_command: ClassVar[str] = "draftsmith train"

    data: tuple[str, ...] | str | Path = volatile()
    output: Path = volatile()
    val: Path | None = volatile(None)
    val_share: float = 0.05
    max_length: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", words_of(self.data))
        _ = self.parts
        check_config(self, **RANGES)
        for name, known in {"device": ("auto", "cpu", "cuda"), "dtype": ("auto", "float32", "bfloat16")}.items():
            if getattr(self, name) not in known:
                raise InputError(name, getattr(self, name), f"one of {', '.join(known)}", "Change it.")
        if self.minutes and self.max_steps:
            found, remedy = f"{self.minutes:g} with max_steps {self.max_steps}", "Set one of them to 0."
            raise InputError("minutes", found, "one of the two", remedy)
        if 0 < self.max_length < MIN_LENGTH:
            raise InputError("max_length", self.max_length, f"0 or at least {MIN_LENGTH}", "Change it.")

    @property
    def parts(self) -> tuple[Part, ...]:
        """The artifacts of `data`, and how often an epoch has each."""
        return parts_of(self.data)

    @property
    def most_at_once(self) -> int:
        """Most tokens of packed sequences whose loss is computed at once; 0: all of a micro-batch."""
        return 0

    @property
    def starting_head(self) -> str | None:
        """Directory of the trained head that the training starts from; None without one."""
        return None

    def num_steps(self, per_epoch: int) -> int:
        """Return the number of steps, of which an epoch has `per_epoch`; MOST if the clock decides."""
        if self.minutes:
            return MOST
        return self.max_steps or self.epochs * per_epoch


@dataclass(frozen=True, kw_only=True)
class AcceptanceLength:
    """Options of the acceptance length (tau) that every validation measures, and by which best/ is chosen.

    Attributes:
        tau_prompts: Prompts to measure it on; 0 switches it off.
        tau_data: Output of `data prompts`, of prompts like those that will be served. Default: held-out samples, each
            up to one of its answers; beside it, as tau_general, general prompts that ship.
    """

    help_group: ClassVar[str] = "Acceptance length while training"

    tau_prompts: int = volatile(16)
    tau_data: Path | None = volatile(None)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Options of planning a training.

    Attributes:
        plan: Print what the training takes on --devices (memory by part and strategy, disk, steps, FLOPs, hours), and
            train nothing. --data need not exist yet.
        plan_gb: Memory of a device, GB (1e9 bytes), that a rank has to fit into. Default: this machine's GPU or memory.
        plan_tflops: TFLOP/s that a device reaches while it trains, for the hours.
    """

    help_group: ClassVar[str] = "Planning"
    help_rarely: ClassVar[tuple[str, ...]] = ("plan_gb", "plan_tflops")

    plan: bool = volatile(False)
    plan_gb: float | None = volatile(None)
    plan_tflops: float | None = volatile(None)


@dataclass(frozen=True, kw_only=True)
class TrainDrafterConfig(Planning, AcceptanceLength, TrainConfig):
    """`data` is the output of `data responses` or `data prompts --supervised`, which the target reads in the training
    process; or of `data features`, with its states.

    Attributes:
        target: The target model, frozen: the one the data was made with. The head uses its embedding and lm_head.
        server: Address of a vLLM server that `draftsmith launch vllm` has started. It computes the features of
            responses in every epoch, and only the target's embeddings are loaded here. To compute them once and store
            them: data features.
        feature_dtype: What the server sends: bf16, or fp8 with a scale for each token, half the bytes.
        span_tokens: With --tokens-per-batch an EAGLE-3, MTP, DSpark or DFlash head learns so many tokens of a part at
            once, whole sequences or a piece of a longer one, which still reads all before it: memory stays the same for
            rows of any length. The gradients are those of the whole; 0 learns a part at once.
        init: random, or a head to fine-tune, whose shape it keeps: ours, or the directory or hub id of any that
            `import` reads. Only its width and vocabulary have to be this target's. For a draft model: any model of the
            target's tokenizer.
    """

    kind: ClassVar[str]
    help_group: ClassVar[str] = "Data"
    help_command: ClassVar[str] = "draftsmith train"
    help_rarely: ClassVar[tuple[str, ...]] = ("feature_dtype",)

    target: str
    server: str | None = volatile(None, presence=True)
    feature_dtype: FeatureDtype = "bf16"
    span_tokens: int = volatile(16_384)
    init: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is not None and self.num_workers:
            raise InputError("num_workers", self.num_workers, "0 with --server: one process reads", "Leave it out.")

    @property
    def drafter(self) -> type[DraftHead]:
        return head_class(self.kind)

    @property
    def starting_head(self) -> str | None:
        return None if self.init == "random" or self.drafter.saved_as_model else self.init

    def by_start(self, trained: bool) -> TrainDrafterConfig:
        """Fill in the options whose default depends on whether the head was trained before."""
        own: Any = self
        return dataclasses.replace(self, **own.defaults_by_start(trained))

    @property
    def most_at_once(self) -> int:
        return self.span_tokens if self.tokens_per_batch and self.drafter.takes_spans else 0


@functools.cache
def drafter_config(kind: str) -> type[TrainDrafterConfig]:
    """Return the config class of `train KIND`: options of every drafter's training and of this head, flat."""
    own = HEADS[kind].settings
    common = {field.name: field for field in dataclasses.fields(TrainDrafterConfig)}
    types = get_type_hints(TrainDrafterConfig)
    defaults = [
        (
            name,
            types[name] if value is not None else types[name] | None,
            dataclasses.field(default=value, metadata=common[name].metadata),
        )
        for name, value in own.defaults.items()
    ]

    def check(self: Any) -> None:
        TrainDrafterConfig.__post_init__(self)
        own.__post_init__(self)
        if head_class(kind).needs_gathered_weights(self) and "stage_3" in self.strategy:
            expected = f"ddp, or stage 1 or 2: {kind} heads are not trained in parts"
            raise InputError("strategy", self.strategy, expected, "Choose another --strategy.")

    about = " ".join((part.__doc__ or "").split("\n\n")[0] for part in (own, TrainDrafterConfig))
    return dataclasses.make_dataclass(
        f"Train{kind.title()}Config",
        defaults,
        bases=(own, TrainDrafterConfig),
        namespace={"kind": kind, "__post_init__": check, "__doc__": " ".join(about.split()), "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainAcceptanceConfig(TrainConfig):
    """Train an acceptance head (SpecDec++) on the labels of `data acceptance`, with the paper's settings for 7B drafts.
    A 128-wide draft wants lr 1e-3.

    Attributes:
        head: The draft model, or the trained drafter's head, whose drafts were labeled; frozen.
        target: The target model, if the draft is a head: it makes what the head reads.
        init: Directory of an acceptance head to fine-tune, in place of random weights. It keeps its blocks; the loss
            weights are those given here.
        num_blocks: Residual blocks of the head. Default: 3, or those of init.
        tied: Apply one block num_blocks times, as the paper's published code does. Default: off, or as in init.
        w_acc: Loss weight of accepted tokens.
        w_rej: Loss weight of rejected tokens.
        mix: Probability that a draft model reads the target's token instead of its own. Default: 0.15.
    """

    head: str
    target: str | None = None
    init: Path | None = volatile(None)
    num_blocks: int | None = None
    tied: bool | None = None
    w_acc: float = 1.0
    w_rej: float = 6.0
    mix: float | None = None

    @property
    def starting_head(self) -> str | None:
        return None if self.init is None else str(self.init)
