"""The peak memory of a training run, predicted from its recipe and the model's config.json. Torch-free.

The numbers are for one process on a CPU, verifier workers not counted. How well they hold is measured by
`benchmarks/memory.py`.
"""

from dataclasses import dataclass
from typing import Literal

from plait.config import RunConfig
from plait.cost import memory
from plait.cost.model_shape import ModelShape, UnknownShapeError, read_kv_sizes, read_model_shape
from plait.models.cpu_features import faster_cpu_dtype
from plait.models.folder import ModelFolderError
from plait.plan import BatchCounts, Plan

Phase = Literal["always", "generate", "update_policy"]

PROCESS_BYTES = 400 * 2**20
"""Resident memory of the process without a model: Python, torch, transformers, the tokenizer and the tasks. Measured by
`benchmarks/memory.py` ("base_rss_bytes": 396 MiB) with torch 2.13.0+cpu and transformers 5.24.0 on x86-64 Linux."""

KERNEL_BYTES = {"bfloat16": 140 * 2**20, "float32": 40 * 2**20}
"""What a running process holds beyond its tensors: scratch memory, records of samples and metrics, and in bfloat16 the
products that oneDNN compiled and keeps (few, see `plait.jobs.machine`). Fitted, as the next one, to the runs of
`benchmarks/memory.py` that are not marked as held out."""

ALLOCATOR_LAYERS = 2.0
"""Memory that the C library's allocator neither returns nor can use again, in units of what one layer makes: its
activations and what its backward pass needs for a moment. Tensors below 32 MiB come from its heap, and microbatches of
other lengths leave holes of other sizes. Asking the system for each of them (MALLOC_MMAP_THRESHOLD_ of 1 MiB) takes a
fifth to a third off the peak and makes updates take twice as long, so the holes are predicted, not avoided."""

LENGTH_SHARE = 0.5
"""Longest sequence of a microbatch as a share of the limit (max_prompt_tokens + max_completion_tokens): an assumption.
Below 256 tokens attention keeps its weights, which grow with the length."""

MAX_LOGITS_PER_CHUNK = 2**24
"""As in `plait.roles.model`, which imports torch; a test compares the two."""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """num_bytes: at the peak of `phase`. formula: in words."""

    name: str
    num_bytes: int
    phase: Phase
    formula: str


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """peak_bytes: the terms that are always held, and those of the phase that needs most.

    Without a prediction there are no terms, and not_predicted says why.
    """

    terms: tuple[MemoryTerm, ...]
    peak_bytes: int | None
    peak_phase: str
    not_predicted: str = ""


def predict_run_memory(config: RunConfig) -> MemoryPrediction:
    """Predict the peak of a run. Raises nothing: what cannot be predicted is said."""
    if config.model.device == "cuda":
        return _none("memory is predicted for runs on a CPU")
    try:
        shape = read_model_shape(config.model.path)
    except (UnknownShapeError, ModelFolderError) as error:
        return _none(str(error))
    try:
        plan = Plan.from_config(config)
    except ValueError:
        return _none("the plan cannot be read")
    if plan.is_on_ray:
        return _none("the peak is predicted for runs of one process; plait explain estimates what ranks hold")
    try:
        held = _held(config, plan, shape)
    except (UnknownShapeError, ModelFolderError) as error:
        return _none(f"critic or reward model: {error}")
    terms = (*held, *_generating(config, shape), *_updating(config, plan, shape))
    totals = {
        phase: sum(term.num_bytes for term in terms if term.phase in ("always", phase))
        for phase in ("generate", "update_policy")
    }
    phase = max(totals, key=lambda name: totals[name])
    return MemoryPrediction(terms, totals[phase], phase)


def _none(reason: str) -> MemoryPrediction:
    return MemoryPrediction((), None, "", reason)


def engine_kv_bytes(config: RunConfig) -> int:
    """Of the engine's keys and values, which are taken when it is made: what `Engine.num_kv_bytes` will say.

    Raises UnknownShapeError or ModelFolderError where config.json does not say enough, ValueError for a wrong plan.
    """
    sizes, engine = read_kv_sizes(config.model.path), Plan.from_config(config).engine
    size = memory.kv_slot_bytes(sizes, engine.num_slots, engine.max_sequence_tokens, number_bytes(config))
    return round(size)


def compute_dtype(config: RunConfig) -> str:
    """The type that computes; "auto" as the processor's flags decide it."""
    return faster_cpu_dtype() if config.model.compute_dtype == "auto" else config.model.compute_dtype


def number_bytes(config: RunConfig) -> int:
    """b: bytes of a number in the compute dtype."""
    return {"bfloat16": 2, "float32": 4}[compute_dtype(config)]


def _held(config: RunConfig, plan: Plan, shape: ModelShape) -> list[MemoryTerm]:
    b, engine, optimizer = number_bytes(config), plan.engine, config.optimizer
    other = shape.num_parameters - shape.num_hidden_matrix_parameters
    moments = memory.moment_bytes(optimizer.name, shape.num_hidden_matrix_parameters, other, optimizer.betas[0])
    slots = memory.kv_slot_bytes(shape, engine.num_slots, engine.max_sequence_tokens, b)
    records = memory.slot_record_bytes(engine.num_slots, engine.max_sequence_tokens)
    terms = [
        ("process", PROCESS_BYTES, "Python with torch and transformers (measured)"),
        (
            "kernels",
            KERNEL_BYTES[compute_dtype(config)],
            "compiled products, scratch memory, records (fitted)",
        ),
        ("parameters", memory.parameter_bytes(shape.num_parameters, b), f"{shape.num_parameters:,} x {b} bytes"),
        ("fp32 masters", memory.master_bytes(shape.num_parameters, b), "4 bytes per parameter beside a bf16 copy"),
        (
            "engine's fused copies",
            memory.fused_copy_bytes(shape, b),
            "of the weights of q, k, v and of gate, up",
        ),
        ("optimiser moments", moments, f"{optimizer.name}, fp32"),
        (
            "KV slots",
            slots + records,
            f"{engine.num_slots} slots x {engine.max_sequence_tokens} tokens x (2 x layers x KV width x {b} + 20)",
        ),
    ]
    if config.algorithm.needs_reference:
        terms.append(("reference", memory.parameter_bytes(shape.num_parameters, b), "a second copy of the parameters"))
    if config.algorithm.critic.kind == "independent":
        terms += _critic(config, shape, b)
    for one in config.reward_models:
        size = memory.parameter_bytes(read_model_shape(one.path).num_parameters, b)
        terms.append(("reward model", size, f"parameters of {one.name or one.path}"))
    return [MemoryTerm(name, round(size), "always", formula) for name, size, formula in terms if size]


def _critic(config: RunConfig, policy: ModelShape, b: int) -> list[tuple[str, float, str]]:
    """What a critic of its own holds: its trunk is a model like the policy (a head of its own is a thousandth)."""
    path, optimizer = config.algorithm.critic.path, config.optimizer
    shape = read_model_shape(path) if path else policy
    other = shape.num_parameters - shape.num_hidden_matrix_parameters
    moments = memory.moment_bytes(optimizer.name, shape.num_hidden_matrix_parameters, other, optimizer.betas[0])
    return [
        ("critic parameters", memory.parameter_bytes(shape.num_parameters, b), f"{shape.num_parameters:,} x {b} bytes"),
        ("critic masters", memory.master_bytes(shape.num_parameters, b), "4 bytes per parameter beside a bf16 copy"),
        ("critic moments", moments, f"{optimizer.name}, fp32"),
    ]


def _generating(config: RunConfig, shape: ModelShape) -> list[MemoryTerm]:
    slots = config.rollout.num_slots
    size = memory.sampler_bytes(shape, slots, number_bytes(config))
    return [MemoryTerm("sampling", round(size), "generate", f"logits and probabilities of {slots} samples")]


def _updating(config: RunConfig, plan: Plan, shape: ModelShape) -> list[MemoryTerm]:
    b, counts, rollout = number_bytes(config), BatchCounts.from_config(config), config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    num_tokens = min(counts.num_tokens_per_microbatch, counts.num_sequences_per_minibatch * longest)
    num_rows = min(num_tokens, MAX_LOGITS_PER_CHUNK // shape.vocab_size)
    is_recomputed = plan.layout_of("update_policy", ("policy",)).recompute == "full"
    held = memory.recomputed_activation_bytes if is_recomputed else memory.activation_bytes
    # Sequences are packed by falling length, so that a row holds similar ones and hardly any padding.
    typical = max(round(LENGTH_SHARE * longest), 1)
    activations = held(shape, num_tokens, b, 1.0, typical)
    one_layer = num_tokens * memory.layer_activation_bytes_per_token(shape, b, 1.0, typical)
    holes = ALLOCATOR_LAYERS * (one_layer + memory.layer_working_bytes(shape, num_tokens, b))
    copies = memory.copy_gradient_bytes(shape.num_parameters, b)
    working = max(memory.logits_bytes(shape, num_rows, b), memory.layer_working_bytes(shape, num_tokens, b))
    terms = [
        ("gradients", memory.gradient_bytes(shape.num_parameters), "4 bytes per parameter"),
        (
            "activations",
            max(activations, copies),
            f"{num_tokens:,} tokens in sequences of {typical}; the copy's gradients take their place",
        ),
        ("allocator", holes, f"holes of freed memory: {ALLOCATOR_LAYERS:g} x what one layer makes (fitted)"),
        ("logits and working memory", working, f"of {num_rows:,} loss tokens at a time, or of one layer"),
    ]
    return [MemoryTerm(name, round(size), "update_policy", formula) for name, size, formula in terms]
