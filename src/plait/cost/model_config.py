"""Reads a ModelSpec from a transformers config.json. Torch-free.

What each architecture consists of is a row of `ARCHITECTURES`; the values are transformers' own (5.24), which the tests
compare with the parameters of its modules.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from plait.cost.model_spec import Experts, FeedForward, GroupedAttention, LatentAttention, LayerRun, ModelSpec
from plait.errors import ConfigError, Violation

Switch = bool | tuple[str, bool]
"""A fact of the architecture, or the key that decides it with transformers' default where the key is missing."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What config.json does not say. head_size: the default where no head_dim is given, None for D / N.

    windows: which layers slide where no layer_types are listed: "none", "all" (if sliding_window is a number), "upper"
    (from max_window_layers on), "odd" (first, third, ...), "lower_odd" (of those, up to max_window_layers).
    kv_heads: whether num_key_value_heads must be given, may miss, or does not exist (as many as query heads).
    experts: how the mixture is written, None for a dense model.
    """

    qkv_bias: Switch = False
    output_bias: Switch = False
    mlp_bias: Switch = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    is_gated: bool = True
    norm_has_bias: bool = False
    is_tied: bool = False
    head_size: int | None = None
    kv_heads: Literal["required", "optional", "all"] = "required"
    windows: str = "none"
    experts: str | None = None
    is_latent: bool = False
    keys: tuple[tuple[str, str], ...] = ()


_BIAS: Switch = ("attention_bias", False)
_GPT2_KEYS = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(qkv_bias=_BIAS, output_bias=_BIAS, mlp_bias=("mlp_bias", False), kv_heads="optional"),
    "mistral": Architecture(windows="all"),
    "qwen2": Architecture(qkv_bias=True, windows="upper"),
    "qwen3": Architecture(qkv_bias=_BIAS, output_bias=_BIAS, has_qk_norm=True, head_size=128, windows="upper"),
    "mixtral": Architecture(windows="all", experts="mixtral"),
    "qwen2_moe": Architecture(qkv_bias=("qkv_bias", True), windows="lower_odd", experts="qwen"),
    "qwen3_moe": Architecture(qkv_bias=_BIAS, output_bias=_BIAS, has_qk_norm=True, windows="all", experts="qwen"),
    "deepseek_v3": Architecture(qkv_bias=_BIAS, is_latent=True, experts="deepseek"),
    "gpt_oss": Architecture(
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        has_sinks=True,
        head_size=64,
        windows="odd",
        experts="gpt_oss",
    ),
    "starcoder2": Architecture(
        qkv_bias=("use_bias", True),
        output_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        is_gated=False,
        norm_has_bias=True,
        is_tied=True,
        windows="all",
    ),
    "gpt2": Architecture(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        is_gated=False,
        norm_has_bias=True,
        is_tied=True,
        kv_heads="all",
        keys=_GPT2_KEYS,
    ),
}


class _Reader:
    """Reads fields of one config and gathers what is wrong with them."""

    def __init__(self, config: dict[str, Any], keys: tuple[tuple[str, str], ...]):
        self.config, self.keys, self.violations = config, dict(keys), list[Violation]()

    def has(self, name: str) -> bool:
        key = self.keys.get(name, name)
        return key in self.config and self.config[key] is not None

    def size(self, name: str, least: int = 1) -> int:
        """A whole number; 1 stands in for a wrong one, whose violation is kept."""
        key = self.keys.get(name, name)
        value = self.config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        shown = f"is {value!r}" if key in self.config else "is missing"
        rule = f"{key} {shown}, expected a whole number of at least {least}"
        self.violations.append(Violation(f"model.{key}", rule, f"Write {key} into the model's config.json"))
        return max(least, 1)

    def is_on(self, switch: Switch) -> bool:
        if isinstance(switch, bool):
            return switch
        key, default = switch
        if key not in self.config:
            return default
        if not isinstance(self.config[key], bool):
            rule = f"{key} is {self.config[key]!r}, expected true or false"
            self.violations.append(Violation(f"model.{key}", rule, f"Correct {key} in the model's config.json"))
        return self.config[key] is True

    def divides(self, part: str, small: int, whole: str, large: int) -> None:
        if large % small:
            rule = f"{part} {small} does not divide {whole} {large}"
            self.violations.append(Violation(f"model.{part}", rule, f"Correct {part} or {whole} in config.json"))


def model_spec(config: dict[str, Any], name: str = "model") -> ModelSpec:
    """The spec that a config.json describes. Raises ConfigError with everything that is missing or wrong."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    kind = text.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        shown = f'"{kind}"' if kind else "missing"
        raise ConfigError([Violation("model.model_type", f"model_type is {shown}", f"Known architectures: {known}")])
    architecture = ARCHITECTURES[kind]
    read = _Reader(text, architecture.keys)
    width, num_layers = read.size("hidden_size"), read.size("num_hidden_layers")
    is_rotary = kind != "gpt2"
    positions = read.size("max_position_embeddings")
    spec = ModelSpec(
        name=name,
        vocab_size=read.size("vocab_size"),
        hidden_size=width,
        layers=_layer_runs(read, architecture, num_layers),
        attention=_latent(read, architecture) if architecture.is_latent else _grouped(read, architecture, width),
        feed_forward=_feed_forward(read, architecture, width, kind),
        experts=_experts(read, architecture),
        is_tied=read.is_on(("tie_word_embeddings", architecture.is_tied)),
        max_positions=positions,
        norm_has_bias=architecture.norm_has_bias,
        num_learned_positions=0 if is_rotary else positions,
    )
    if not is_rotary and isinstance(spec.attention, GroupedAttention):
        spec = replace(spec, attention=replace(spec.attention, rope_size=0))
    if read.violations:
        raise ConfigError(read.violations)
    return spec


def _grouped(read: _Reader, architecture: Architecture, width: int) -> GroupedAttention:
    heads = read.size("num_attention_heads")
    is_all = architecture.kv_heads == "optional" and not read.has("num_key_value_heads")
    kv_heads = heads if is_all or architecture.kv_heads == "all" else read.size("num_key_value_heads")
    read.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if read.has("head_dim"):
        head = read.size("head_dim")
    elif architecture.head_size is not None:
        head = architecture.head_size
    else:
        read.divides("num_attention_heads", heads, "hidden_size", width)
        head = width // heads
    return GroupedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        rope_size=head,
        has_qkv_bias=read.is_on(architecture.qkv_bias),
        has_output_bias=read.is_on(architecture.output_bias),
        has_qk_norm=architecture.has_qk_norm,
        has_sinks=architecture.has_sinks,
    )


def _latent(read: _Reader, architecture: Architecture) -> LatentAttention:
    return LatentAttention(
        num_heads=read.size("num_attention_heads"),
        # A null rank means one full matrix; a missing one is an error, because the default is a rank.
        query_rank=None if "q_lora_rank" in read.config and not read.has("q_lora_rank") else read.size("q_lora_rank"),
        kv_rank=read.size("kv_lora_rank"),
        nope_size=read.size("qk_nope_head_dim"),
        rope_size=read.size("qk_rope_head_dim"),
        value_size=read.size("v_head_dim"),
        has_bias=read.is_on(architecture.qkv_bias),
    )


def _feed_forward(read: _Reader, architecture: Architecture, width: int, kind: str) -> FeedForward:
    if kind == "gpt2":
        size = read.size("n_inner") if read.has("n_inner") else 4 * width
    else:
        size = read.size("intermediate_size")
    return FeedForward(size, architecture.is_gated, read.is_on(architecture.mlp_bias))


def _experts(read: _Reader, architecture: Architecture) -> Experts | None:
    kind = architecture.experts
    if kind is None:
        return None
    active = read.size("num_experts_per_tok")
    if kind in ("mixtral", "gpt_oss"):
        is_biased = kind == "gpt_oss"
        expert = FeedForward(read.size("intermediate_size"), has_bias=is_biased)
        return Experts(read.size("num_local_experts"), active, expert, has_router_bias=is_biased)
    width = read.size("moe_intermediate_size")
    if kind == "qwen":
        # Qwen2-MoE has a gated shared part, Qwen3-MoE none.
        has_shared = "shared_expert_intermediate_size" in read.config
        shared = FeedForward(read.size("shared_expert_intermediate_size")) if has_shared else None
        key = "num_experts" if read.has("num_experts") else "num_local_experts"
        key = key if read.has(key) else "num_experts"
        return Experts(read.size(key), active, FeedForward(width), shared, has_shared_gate=has_shared)
    shared = FeedForward(width * read.size("n_shared_experts"))
    return Experts(read.size("n_routed_experts"), active, FeedForward(width), shared, has_routing_bias=True)


def _layer_runs(read: _Reader, architecture: Architecture, num_layers: int) -> tuple[LayerRun, ...]:
    sparse = _sparse_layers(read, architecture, num_layers)
    windows = _windows(read, architecture, num_layers)
    runs: list[LayerRun] = []
    for is_sparse, window in zip(sparse, windows, strict=True):
        if runs and (runs[-1].window, runs[-1].is_sparse) == (window, is_sparse):
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(1, window, is_sparse))
    return tuple(runs)


def _sparse_layers(read: _Reader, architecture: Architecture, num_layers: int) -> list[bool]:
    if architecture.experts is None:
        return [False] * num_layers
    if architecture.experts == "deepseek":
        first = read.size("first_k_dense_replace", least=0)
        return [index >= first for index in range(num_layers)]
    if architecture.experts == "qwen":
        step = read.size("decoder_sparse_step") if read.has("decoder_sparse_step") else 1
        dense = read.config["mlp_only_layers"] if read.has("mlp_only_layers") else []
        return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]
    return [True] * num_layers


def _windows(read: _Reader, architecture: Architecture, num_layers: int) -> list[int | None]:
    is_off = architecture.windows in ("upper", "lower_odd") or "use_sliding_window" in read.config
    if architecture.windows == "none" or (is_off and not read.is_on(("use_sliding_window", False))):
        return [None] * num_layers
    if architecture.windows == "all" and not read.has("sliding_window"):
        return [None] * num_layers
    window = read.size("sliding_window")
    if read.has("layer_types"):
        kinds = read.config["layer_types"]
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != num_layers:
            rule = f"layer_types names {len(kinds)} layers of {num_layers}" if not unknown else f"layers are {unknown}"
            change = "Only full_attention and sliding_attention are known, one entry per layer"
            read.violations.append(Violation("model.layer_types", rule, change))
        return [window if kind == "sliding_attention" else None for kind in kinds[:num_layers]] + [None] * max(
            0, num_layers - len(kinds)
        )
    upper = read.size("max_window_layers", least=0) if architecture.windows in ("upper", "lower_odd") else 0
    slides = {
        "all": lambda index: True,
        "upper": lambda index: index >= upper,
        "odd": lambda index: index % 2 == 0,
        "lower_odd": lambda index: index % 2 == 0 and index < upper,
    }[architecture.windows]
    return [window if slides(index) else None for index in range(num_layers)]
