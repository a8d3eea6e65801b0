"""Memory that a run will take against what is available, said before it is taken. Torch-free."""

from plait.config import RunConfig
from plait.cost.model_shape import UnknownShapeError
from plait.cost.run_memory import PROCESS_BYTES, engine_kv_bytes, predict_run_memory
from plait.errors import ConfigError, Violation
from plait.models.folder import ModelFolderError
from plait.plan import is_on_ray

SLOTS = "rollout.num_slots"


def kv_bytes(config: RunConfig) -> int | None:
    """Of the engine's keys and values; None where the model's config.json does not say enough."""
    try:
        return engine_kv_bytes(config)
    except (UnknownShapeError, ModelFolderError, ValueError):
        return None


def room_violations(config: RunConfig, available_bytes: int | None) -> list[Violation]:
    """What does not fit into available_bytes (None: nobody knows): the KV slots alone, else the predicted peak."""
    keys, peak = kv_bytes(config), predict_run_memory(config).peak_bytes
    if available_bytes is None:
        return []
    if keys is not None and keys > available_bytes:
        fitting = config.rollout.num_slots * available_bytes // keys
        rule = f"the KV slots alone take {gib(keys)}, and {gib(available_bytes)} are available"
        return [Violation(SLOTS, rule, f"Set it to {fitting} or less, or lower rollout.max_completion_tokens")]
    # The process itself is there already when memory is looked at.
    if peak is not None and peak - PROCESS_BYTES > available_bytes:
        rule = f"the predicted peak is {gib(peak)}, and {gib(available_bytes)} are available"
        change = f"Lower batch.num_tokens_per_microbatch or {SLOTS}, or set recompute in plan.layout"
        return [Violation("memory", rule, change)]
    return []


def memory_notes(config: RunConfig, available_bytes: int | None) -> list[str]:
    """What the start of a run says of memory.

    Raises ConfigError where the KV slots alone do not fit: their size is exact, and the system would hand the pages
    out one by one and end the run in the middle. A predicted peak that does not fit is a note: it may be some 15 %
    too high.
    """
    if is_on_ray(config.plan):
        # What this process sees is not what ranks may take, which can be on other machines.
        keys = kv_bytes(config)
        return [] if keys is None else [f"memory: KV slots {gib(keys)} on each rank"]
    violations = room_violations(config, available_bytes)
    if any(violation.where == SLOTS for violation in violations):
        raise ConfigError(violations)
    keys, peak = kv_bytes(config), predict_run_memory(config).peak_bytes
    parts = []
    if keys is not None:
        parts.append(f"KV slots {gib(keys)}")
    if peak is not None:
        parts.append(f"predicted peak {gib(peak)}")
    if available_bytes is not None:
        parts.append(f"available {gib(available_bytes)}")
    return [f"memory: {', '.join(parts)}"] * bool(parts) + [str(violation) for violation in violations]


def gib(num_bytes: float) -> str:
    """For people, in GiB as `plait check` and the metrics show memory."""
    return f"{num_bytes / 2**30:.2f} GiB"
