"""Configs of Llama-family layers and of heads made of them, and their reader of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from draftsmith.modules.types import InputError, check_config

# Far beyond every published model (the largest: 262,144 tokens, 53,248 wide, 126 layers, a context of 10 million), and
# small enough that a model of them is built on the meta device in seconds and its parameters fit 64 bits.
MOST_SIZE, MOST_LAYERS, MOST_HEADS, MOST_POSITIONS = 2**24, 1024, 2**16, 2**24
# Scalings that `rope_frequencies` computes.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Keys that a kind of scaling needs.
REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
BASE = 10000.0  # the default of all systems
PARTIAL = "partial_rotary_factor"
YARN_SCALES = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling as in transformers' `rope_parameters`: default, linear, llama3 (NTK by parts), or yarn.

    partial_rotary_factor: share of each head that is rotated, its first dimensions, with any kind. beta_fast to
    truncate: YaRN's (Peng et al. 2023).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial_rotary_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_config(
            self,
            factor=(1e-6, 1e6),
            low_freq_factor=(1e-6, 1e6),
            high_freq_factor=(1e-6, 1e6),
            original_max_position=(1, MOST_POSITIONS),
            partial_rotary_factor=(0, 1, "(]"),
            beta_fast=(1e-6, 1e6),
            beta_slow=(1e-6, 1e6),
            attention_factor=(1e-6, 1e6),
            mscale=(0, 1e6),
            mscale_all_dim=(0, 1e6),
        )


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a Llama-family stack. Sizes are numbers of elements; `rope_theta` is the rotary base."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-6
    rope_theta: float = BASE
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    # Of a target, as `targets.shape.TargetShape` has them.
    full_layers: ClassVar[tuple[int, ...]] = ()
    reasons: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_config(
            self,
            vocab_size=(1, MOST_SIZE),
            hidden_size=(1, MOST_SIZE),
            intermediate_size=(1, MOST_SIZE),
            # Heads without attention have none.
            num_layers=(0, MOST_LAYERS),
            num_heads=(1, MOST_HEADS),
            num_kv_heads=(1, MOST_HEADS),
            head_dim=(1, MOST_HEADS),
            max_position=(2, MOST_POSITIONS),
            rms_eps=(1e-12, 1),
            rope_theta=(1, 1e15),
            sliding_window=(1, MOST_POSITIONS),
        )
        if self.num_heads % self.num_kv_heads:
            expected = f"a divisor of num_heads, {self.num_heads}"
            # As transformers calls it.
            raise InputError("num_key_value_heads", self.num_kv_heads, expected, "Correct it.")
        if self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "an even number: rotary positions turn pairs", "Correct it.")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated, the first ones."""
        return int(self.head_dim * self.rope_scaling.partial_rotary_factor) // 2 * 2


# Switches of layers that every server has: no biases, no norms of queries and keys, attention to the whole text.
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_embeddings"), False),
    "sliding_window": None,
}


@dataclass(frozen=True)
class LlamaHeadConfig:
    """Config of a head with decoder layers. llama: their sizes; vocabulary and width are the target's."""

    llama: LlamaConfig
    # It is trained with the layers' sliding window.
    windowed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # A target's shape says more than its layers.
        if isinstance(self.llama, LlamaConfig) and type(self.llama) is not LlamaConfig:
            object.__setattr__(self, "llama", layers_of(self.llama))
        check_config(self)
        kind = self.llama.rope_scaling.kind
        if kind not in ROPE_KINDS:
            raise InputError("rope_scaling.kind", kind, " or ".join(ROPE_KINDS), "Such heads are not supported.")
        window = self.llama.sliding_window
        if window is not None and not self.windowed:
            raise InputError("sliding_window", window, "none: the head is trained on the whole text", "Correct it.")

    def with_window(self, window: int | None) -> Self:
        """Return the config with another sliding window, on which no weight depends."""
        return replace(self, llama=replace(self.llama, sliding_window=window))

    @property
    def hidden_size(self) -> int:
        return self.llama.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.llama.vocab_size

    @property
    def max_position(self) -> int:
        return self.llama.max_position


@dataclass(frozen=True)
class CaptureConfig(LlamaHeadConfig):
    """Config of a head that reads the inputs of some of the target's layers.

    aux_layers: these layers, ascending; number k is the residual state after k layers, never normed.
    """

    aux_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        # A list comes from JSON.
        if isinstance(self.aux_layers, list):
            object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        super().__post_init__()
        check_config(self, aux_layers=(0, MOST_LAYERS))
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)):
            expected = "some layers of the target, each once, ascending"
            raise InputError("aux_layers", list(self.aux_layers), expected, "Correct it.")


def layers_of(target: LlamaConfig, **changes: Any) -> LlamaConfig:
    """Return the config of a head's layers: a target's, with these changes."""
    return LlamaConfig(**{spec.name: getattr(target, spec.name) for spec in fields(LlamaConfig)} | changes)


def captured_layers(asked: Sequence[int], default: Sequence[int], target: LlamaConfig) -> tuple[int, ...]:
    """Return the layers whose inputs a new head reads: those asked for, or the default ones.

    Of a target with recurrent layers the default ones move to the nearest states after its full-attention layers, as
    published heads take them (Qwen3.5, Qwen3.8).

    Raises:
        InputError: they are not distinct layers of the target.
    """
    num_layers, free = target.num_layers, [layer for layer in target.full_layers if layer < target.num_layers]
    layers = tuple(asked or default)
    if not asked and len(free) >= len(layers):
        moved: set[int] = set()
        for layer in layers:
            moved.add(min((k for k in free if k not in moved), key=lambda k: abs(k - layer)))
        layers = tuple(sorted(moved))
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        shown = " ".join(map(str, layers)) + ("" if asked else ", the default")
        expected = f"distinct ones from 0 to {num_layers}, the target's layers, ascending"
        raise InputError("layers", shown, expected, "Pass --layers with such.")
    return layers


@dataclass(frozen=True)
class RotarySettings:
    """Rotary base and scaling. The kind may be one that `rope_frequencies` does not compute."""

    theta: float
    scaling: RopeScaling

    @staticmethod
    def of(llama: LlamaConfig) -> RotarySettings:
        return RotarySettings(llama.rope_theta, llama.rope_scaling)

    @property
    def kind(self) -> str:
        return self.scaling.kind

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f", {self.kind} scaling by {self.scaling.factor:g}"
        part = self.scaling.partial_rotary_factor
        return f"base {self.theta:g}{scaled}" + ("" if part == 1 else f", {part:g} of each head")


# Defaults of transformers' LlamaConfig and of SafeAILab's EConfig alike.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def llama_sizes(raw: Mapping[str, object]) -> LlamaConfig:
    """Read the sizes and rotary settings of a `config.json`, without switches.

    Raises:
        InputError: a size is no positive integer, or eps no number.
    """
    size = {name: positive(raw, name, default) for name, default in DEFAULTS.items()}
    hidden, heads, rope = size["hidden_size"], size["num_attention_heads"], rope_settings(raw)
    kv_heads, head_dim, eps = raw.get("num_key_value_heads"), raw.get("head_dim"), raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool):
        raise InputError("config.json, rms_norm_eps", repr(eps), "a number", "Correct config.json.")
    return LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=hidden,
        intermediate_size=size["intermediate_size"],
        num_layers=size["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else positive(raw, "num_key_value_heads", heads),
        head_dim=max(hidden // heads, 1) if head_dim is None else positive(raw, "head_dim", 1),
        max_position=size["max_position_embeddings"],
        rms_eps=float(eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
    )


def positive(raw: Mapping[str, object], key: str, default: int) -> int:
    """Return a positive integer of a `config.json`, or the default if the field is absent."""
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json, {key}", repr(value), "a positive integer", "Correct config.json.")
    return value


def rope_settings(raw: Mapping[str, object]) -> RotarySettings:
    """Read rotary settings of a `config.json` as transformers 5, vLLM 0.33.0 and SGLang 0.5.23 do.

    `rope_scaling` counts before `rope_parameters`, a base inside them before the one outside (modeling_rope_utils.py).

    Raises:
        InputError: a setting of another type, or one that its kind of scaling needs is missing.
    """
    rope = config_object(raw, "rope_scaling") or config_object(raw, "rope_parameters")
    # One for each kind of layer (Gemma 3): that of the layers that read the whole text.
    rope = config_object(rope, "full_attention") or rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # the same for text: its positions are alike in all sections
    if not isinstance(kind, str):
        raise InputError("config.json, rope_type", repr(kind)[:80], "a name", "Correct config.json.")
    if missing := [key for key in REQUIRED.get(kind, ()) if rope.get(key) is None]:
        raise InputError("rope_scaling", f"no {', '.join(missing)}", "all that its kind needs", "Complete config.json.")
    inside, outside = rope.get("rope_theta"), raw.get("rope_theta")
    trained = "original_max_position_embeddings"
    own = next((part for part in (raw, rope) if part.get(trained)), None)
    original = positive(raw, "max_position_embeddings", 2048) if own is None else positive(own, trained, 0)
    scaling = RopeScaling(
        kind=kind,
        factor=rope_number("factor", rope.get("factor"), 1.0),
        low_freq_factor=rope_number("low_freq_factor", rope.get("low_freq_factor"), 1.0),
        high_freq_factor=rope_number("high_freq_factor", rope.get("high_freq_factor"), 4.0),
        original_max_position=original,
        partial_rotary_factor=rope_number(PARTIAL, rope.get(PARTIAL) or raw.get(PARTIAL), 1.0),
        beta_fast=rope_number("beta_fast", rope.get("beta_fast") or None, 32.0),
        beta_slow=rope_number("beta_slow", rope.get("beta_slow") or None, 1.0),
        truncate=rope.get("truncate") is not False,
        **{name: None if rope.get(name) is None else rope_number(name, rope[name], 1.0) for name in YARN_SCALES},
    )
    return RotarySettings(rope_number("rope_theta", outside if inside is None else inside, BASE), scaling)


def config_object(raw: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return an object of a `config.json`, {} for none."""
    block = raw.get(key) or {}
    if not isinstance(block, Mapping):
        raise InputError(key, repr(block), "an object or null", "Correct config.json.")
    return block


def rope_number(name: str, value: object, default: float) -> float:
    """Return a number of the rotary settings, or the default if there is none."""
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"config.json, {name}", repr(value)[:80], "a number", "Correct config.json.")
    return float(value)
