"""ZeRO by DeepSpeed, through Lightning, on GPUs and on CPU ranks; its checkpoints are those of every other strategy.

Rajbhandari et al. 2020, "ZeRO", section 5: stage 1 shards the optimizer state over the ranks, stage 2 also the
gradients, stage 3 also the weights.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from draftsmith.modules.types import InputError

# Elements that are reduced or gathered at once; a buffer of this size is allocated. Heads are small: DeepSpeed's
# default would take 2 GB.
BUCKET = 50_000_000
# Stage 3 keeps smaller tensors whole on every rank: gathering them costs more than it saves (DeepSpeed's default).
KEPT_WHOLE = 100_000


class _InOrder(torch.autograd.Function):
    """A loss whose gradients are computed already. They reach the weights in the weights' order."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: tuple[Tensor, ...], *weights: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        return None, None, *(grad * outer for grad in ctx.grads)


class ZeroPrecision(DeepSpeedPrecision):
    """Precision plugin: float32 weights, gradients, optimizer. bf16 is autocast in the training step, as under DDP."""

    def __init__(self) -> None:
        super().__init__("32-true")

    def convert_input(self, data: Any) -> Any:
        return data

    # The signatures of this and the next differ from the base class as Lightning's do.
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Let the engine see gradients in one order on all ranks: stages 1 and 2 sum them in that in which they come,
        and a part without a loss, or inside of a long text, has another graph."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not any(hasattr(weight, "ds_id") for weight in weights):
            grads = torch.autograd.grad(tensor, weights, allow_unused=True, materialize_grads=True)
            tensor = cast(Tensor, _InOrder.apply(tensor.detach(), grads, *weights))
        super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        # DeepSpeed skips a step by itself if the ranks' finite gradients have an infinite sum.
        if not model.skips_step and getattr(model.trainer.model.optimizer, "overflow", False):
            model.state.bad_steps.add_step(model.sample_name, everything=True)
        return result


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's strategy with three differences: it also runs on CPU ranks, over gloo; it steps torch's own
    optimizer, so that nothing is compiled; and it saves and loads whole tensors by parameter.

    stage: 1, 2 or 3. offload: optimizer state (and at stage 3 weights) stay in host memory. clip: largest gradient
    norm, 0 for none. kind: cpu or gpu.
    """

    def __init__(self, stage: int, offload: bool, clip: float, kind: str):
        self.kind, self.stage = kind, stage
        if kind == "cpu":
            # Else DeepSpeed would take a GPU that is not to be used.
            os.environ["DS_ACCELERATOR"] = "cpu"
        try:
            import deepspeed  # noqa: F401
        except ImportError as error:
            remedy = 'Run `pip install "draftsmith[deepspeed]"`, or pass --strategy ddp.'
            raise InputError("strategy", f"no DeepSpeed ({error})", "the extra `deepspeed`", remedy) from error
        super().__init__(
            stage=stage,
            offload_optimizer=offload,
            offload_parameters=offload and stage == 3,
            reduce_bucket_size=BUCKET,
            allgather_bucket_size=BUCKET,
            process_group_backend="gloo" if kind == "cpu" else "nccl",
            precision_plugin=ZeroPrecision(),
            logging_level=logging.ERROR,
        )
        # Settings that Lightning has no arguments for.
        assert isinstance(self.config, dict)
        self.config |= {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": clip}
        self.config |= {"steps_per_print": sys.maxsize, "train_micro_batch_size_per_gpu": 1}
        if stage == 3:
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = KEPT_WHOLE
        self._groups: list[list[nn.Parameter]] = []
        self._environment = dict(os.environ)

    @property
    def root_device(self) -> torch.device:
        # The engine compares the index, which a plain CPU device does not have.
        return torch.device("cpu", 0) if self.kind == "cpu" else super().root_device

    def setup_environment(self) -> None:
        if self.kind == "cpu":
            Strategy.setup_environment(self)
            self.setup_distributed()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self.kind != "cpu":
            super().setup_distributed()
            return
        # Switch off an all-reduce that needs a compiler. (`import deepspeed.comm.torch` would give torch.)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def teardown(self) -> None:
        """Restore the environment variables set for DeepSpeed: they would be mistaken for a launcher's."""
        super().teardown()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if name not in self._environment:
                os.environ.pop(name, None)

    # Weights are loaded into the module before it is partitioned, the optimizer state into the partitions afterwards.
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        # DeepSpeed replaces the parameters in the optimizer's groups by flat partitions.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        engine: Any
        zero: Any
        engine, zero = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        # AdamW makes its state in the first step; a checkpoint is loaded before that.
        for flat in self._flat_parts(zero):
            zero.optimizer.state[flat] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        module: Any = self.lightning_module
        _skip_bad_steps(zero.optimizer, lambda: module.skips_step)
        return engine, zero

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients within this context, and exchange them at the first backward outside of it."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.deepspeed_engine.set_gradient_accumulation_boundary(True)
            # The engine counts parts by its own forwards, and a step is one of them.
            self.deepspeed_engine.optimizer.clear_backward_seen_flag()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without the engine: `whole_head` has put a head in it that the engine does not know."""
        assert self.lightning_module is not None
        return self.lightning_module.validation_step(*args, **kwargs)

    def _flat_parts(self, zero: Any) -> list[Tensor]:
        """Return this rank's partitions, which the optimizer steps."""
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with whole tensors. All ranks must call it."""
        from deepspeed.utils import safe_get_full_fp32_param

        assert self.lightning_module is not None
        state = self.lightning_module.state_dict(keep_vars=True)
        return {
            name: safe_get_full_fp32_param(value) if hasattr(value, "ds_id") else value.detach()
            for name, value in state.items()
        }

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as torch's optimizer on one device would, empty on ranks above 0. All ranks must call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        base = self.deepspeed_engine.optimizer.optimizer
        # One count of steps for all parameters.
        step = next(iter(base.state.values()))["step"]
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for params, group in zip(self._groups, base.param_groups, strict=True):
            first = len(state)
            for param in params:
                entry = {name: safe_get_full_optimizer_state(param, name) for name in ("exp_avg", "exp_avg_sq")}
                state[len(state)] = {"step": step.clone()}
                if self.is_global_zero:
                    state[len(state) - 1] |= {name: value.cpu() for name, value in entry.items()}
            plain = {name: value for name, value in group.items() if name != "params"}
            groups.append({**plain, "params": list(range(first, len(state)))})
        return {"state": state, "param_groups": groups} if self.is_global_zero else {}

    # Files are those of every other strategy.
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of whole tensors."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        (saved,) = checkpoint["optimizer_states"]
        base = self.deepspeed_engine.optimizer.optimizer
        for params, group, saved_group in zip(self._groups, base.param_groups, saved["param_groups"], strict=True):
            group |= {name: value for name, value in saved_group.items() if name != "params"}
            for param, index in zip(params, saved_group["params"], strict=True):
                entry = saved["state"].get(index, {})
                for name in entry.keys() - {"step"}:
                    if self.stage < 3:
                        safe_set_full_optimizer_state(param, entry[name], name)
                        continue
                    # DeepSpeed's setter of whole tensors fails if the last rank's part is padded.
                    size = cast(Any, param).ds_tensor.numel()
                    part = entry[name].flatten()[size * self.global_rank : size * (self.global_rank + 1)]
                    part = nn.functional.pad(part, (0, size - len(part)))
                    safe_set_local_optimizer_state(param, part, name)
        for flat in self._flat_parts(self.deepspeed_engine.optimizer):
            base.state[flat]["step"].fill_(float(saved["state"].get(0, {}).get("step", 0)))


@contextmanager
def whole_head(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[Any]:
    """Gather ZeRO-3 weights into a full copy, so that ranks may call the head a different number of times. All ranks
    must enter together.

    At stage 3 the head is a copy; changes of its config (a fitted calibration) are copied back.
    """
    strategy, head = trainer.strategy, module.head
    assert isinstance(head, nn.Module)
    if not (isinstance(strategy, ZeroStrategy) and any(hasattr(p, "ds_id") for p in head.parameters())):
        yield head
        return
    devices = [strategy.root_device] if strategy.root_device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), strategy.root_device:
        whole = type(head)(head.config)
    # All ranks gather the weights together.
    state = strategy.lightning_module_state_dict()
    whole.load_state_dict({name.removeprefix("head."): value for name, value in state.items()})
    # Dropout and noise as in the head it stands for.
    whole.train(head.training)
    module.head = whole
    try:
        yield whole
    finally:
        module.head = head
        head.config = whole.config


def _skip_bad_steps(optimizer: torch.optim.Optimizer, skips: Callable[[], bool]) -> None:
    """Hide the gradients from the optimizer in a step that is skipped; DeepSpeed finds its buffers unchanged."""
    hidden: list[tuple[Tensor, Tensor | None]] = []

    def before(*_: Any) -> None:
        if skips():
            for group in optimizer.param_groups:
                hidden.extend((param, param.grad) for param in group["params"])
            for param, _grad in hidden:
                param.grad = None

    def after(*_: Any) -> None:
        for param, grad in hidden:
            param.grad = grad
        hidden.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
