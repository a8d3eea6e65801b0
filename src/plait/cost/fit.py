"""Whether a stage's memory fits its devices, and what would have to change: tried, not guessed. Torch-free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from plait.cost.arithmetic import Number
from plait.cost.estimate import pass_cost
from plait.cost.estimate_generate import generate_memory, num_slots
from plait.cost.estimate_host import sync_memory
from plait.cost.residence import HOME_STAGE, resident_bytes
from plait.cost.setting import ROLE_OF_STAGE, TRAINED, Setting
from plait.cost.spec_tensors import SpecShape
from plait.cost.stage_times import memory_terms
from plait.cost.state import PrecisionRecipe
from plait.errors import Violation
from plait.parallel.degrees import Layout
from plait.parallel.layout_rules import layout_violations
from plait.parallel.layout_words import layout_words

GIB = 2**30
OTHER = "other_state"
"""What stays on the device beside the running stage: see `plait.cost.residence`."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that would need this many bytes per device. num_devices: of the pool, more than it has for some."""

    what: str
    num_bytes: float
    fits: bool
    num_devices: int


def stage_memory(setting: Setting, stage: str, stages: Iterable[str]) -> dict[str, Number]:
    """Bytes per device by term while a stage runs, with what stays beside it; {} for a stage on the host."""
    if stage not in ROLE_OF_STAGE:
        return {}
    resident = resident_bytes(setting, stage, stages)
    if stage == "generate":
        terms = generate_memory(setting, resident)
    elif stage == "sync_weights":
        terms = sync_memory(setting)
    else:
        terms = memory_terms(pass_cost(setting, stage).memory, setting.layout_of(stage).world_size)
    return terms | {OTHER: resident}


def total_bytes(memory: dict[str, Number]) -> float:
    """All terms."""
    return float(sum(memory.values(), start=0))


def states_violation(
    stage: str, num_parameters: float, recipe: PrecisionRecipe, num_devices: int, device_bytes: float
) -> Violation | None:
    """Parameters, gradients and optimiser alone against the memory of all devices that share them; None if they fit."""
    each = recipe.kept_b + recipe.gradient_b + recipe.optimizer_b
    needed = num_parameters * each
    if needed <= num_devices * device_bytes:
        return None
    cards = "one card" if num_devices == 1 else f"{num_devices} cards"
    least = int(-(-needed // device_bytes))
    rule = (
        f"states alone need {needed / 1e9:.1f}e9 bytes ({num_parameters / 1e9:.2f}e9 parameters x {each:g}), "
        f"more than {cards} of {device_bytes / 1e9:.0f}e9"
    )
    moved = needed - num_parameters * recipe.optimizer_b
    change = (
        f"Shard over {least} cards (fsdp{least}: {needed / least / 1e9:.1f}e9 each before activations), "
        f"offload the optimizer (offload_optimizer: {moved / 1e9:.1f}e9 stay), "
        "or train fewer parameters (LoRA, which Plait does not run)"
    )
    return Violation(f"memory.{stage}", rule, change)


def changes(setting: Setting, stage: str, stages: Iterable[str], *, most: int = 6) -> list[Change]:
    """What would make a stage fit: single changes first, then on top of full recompute and the smallest microbatch.

    Each is tried: its bytes are those of the changed setting. If none fits, the smallest that was found.
    """
    names = tuple(stages)
    tried = [_try(changed, what, stage, names) for what, changed in _single(setting, stage)]
    fitting = [change for change in tried if change.fits]
    if not fitting and stage not in ("generate", "sync_weights"):
        lean, said = _lean(setting, stage)
        pairs = [_try(changed, f"{said}; {what}", stage, names) for what, changed in _single(lean, stage)]
        tried += [_try(lean, said, stage, names), *pairs]
        fitting = [change for change in tried if change.fits]
    if not fitting:
        return sorted(tried, key=lambda change: change.num_bytes)[:1]
    # With the devices that are there before with more of them.
    return sorted(fitting, key=lambda change: change.num_devices)[:most]


def _try(setting: Setting, what: str, stage: str, stages: tuple[str, ...]) -> Change:
    needed = total_bytes(stage_memory(setting, stage, stages))
    if stage == "generate":
        slots = num_slots(setting, resident_bytes(setting, stage, stages))
        what += f", {slots:.0f} at once per replica"
    runs = "generate" if stage == "sync_weights" else stage
    return Change(what, needed, needed <= setting.usable_bytes(stage), setting.layout_of(runs).world_size)


def _with_layout(setting: Setting, stage: str, layout: Layout) -> Setting:
    """The layout of a stage; of a model's passes all together, as they work on the same parameters."""
    role = ROLE_OF_STAGE[stage]
    same = [s for s in setting.layouts if s != "generate" and ROLE_OF_STAGE.get(s) == role and stage != "generate"]
    return replace(setting, layouts={**setting.layouts, **dict.fromkeys(same, layout), stage: layout})


def _single(setting: Setting, stage: str) -> Iterator[tuple[str, Setting]]:
    """(in words, the changed setting) of every single change."""
    layout, names = setting.layout_of(stage), layout_words
    if stage in ("generate", "sync_weights"):
        for other in _other_engines(setting):
            yield f"generate as {names(other)}", _with_layout(setting, "generate", other)
        yield from _smaller_homes(setting, stage)
        return
    is_training = stage in ("update_policy", "update_critic")
    for recompute in ("selective", "full") if is_training and layout.recompute != "full" else ():
        if recompute != layout.recompute:
            other = replace(layout, recompute=recompute)
            yield f"recompute {recompute}", _with_layout(setting, stage, other)
    for num_tokens in _smaller_microbatches(setting):
        batch = replace(setting.batch, num_tokens_per_microbatch=num_tokens)
        yield f"microbatches of {num_tokens:,} tokens", replace(setting, batch=batch)
    for other in _other_layouts(setting, stage, layout):
        yield f"{ROLE_OF_STAGE[stage]} as {names(other)}", _with_layout(setting, stage, other)
    if is_training:
        for offload in ("optimizer", "all"):
            if layout.offload == "none" or offload == "all" != layout.offload:
                yield f"offload {offload}", _with_layout(setting, stage, replace(layout, offload=offload))
    yield from _smaller_homes(setting, stage)


def _smaller_homes(setting: Setting, stage: str) -> Iterator[tuple[str, Setting]]:
    """Other models' state moved to host memory while this stage runs."""
    for role, home in HOME_STAGE.items():
        if home == stage or role not in setting.models or role not in TRAINED:
            continue
        if setting.pool_of(home) == setting.pool_of(stage) and setting.layout_of(home).offload == "none":
            for offload in ("optimizer", "all"):
                other = replace(setting.layout_of(home), offload=offload)
                yield f"offload the {role}'s {offload}", _with_layout(setting, home, other)


def _lean(setting: Setting, stage: str) -> tuple[Setting, str]:
    layout = setting.layout_of(stage)
    said = []
    if stage in ("update_policy", "update_critic") and layout.recompute != "full":
        setting, said = _with_layout(setting, stage, replace(layout, recompute="full")), ["recompute full"]
    smaller = _smaller_microbatches(setting)
    if smaller:
        setting = replace(setting, batch=replace(setting.batch, num_tokens_per_microbatch=smaller[-1]))
        said.append(f"microbatches of {smaller[-1]:,} tokens")
    return setting, "; ".join(said) or "as it is"


def _smaller_microbatches(setting: Setting) -> list[int]:
    """Halves, down to what still holds the longest sequence."""
    longest = int(setting.batch.prompt_tokens + setting.batch.lengths.cap)
    found, size = [], setting.batch.num_tokens_per_microbatch // 2
    while size >= longest:
        found.append(size)
        size //= 2
    return found


def _other_layouts(setting: Setting, stage: str, layout: Layout) -> Iterator[Layout]:
    """Everything sharded; more tensor or pipeline parallelism on the same devices; then more devices."""
    shape, pool = SpecShape(setting.spec_of(stage)), setting.cluster_of(stage).num_devices
    if layout.dp_replicate > 1 or layout.zero < 3:
        shard = layout.dp_shard * layout.dp_replicate
        yield from _possible(shape, pool, layout, dp_replicate=1, dp_shard=shard, zero=3)
    for axis in ("tp", "pp"):
        for factor in (2, 4, 8):
            if layout.dp_shard % factor == 0:
                degrees = {axis: factor * (layout.tp if axis == "tp" else layout.pp)}
                sp = {"sp": True} if axis == "tp" else {}
                yield from _possible(shape, pool, layout, **degrees, **sp, dp_shard=layout.dp_shard // factor)
    for factor in (2, 4, 8, 16):
        yield from _possible(shape, pool * factor, layout, dp_shard=layout.dp_shard * factor)


def _possible(shape: SpecShape, num_devices: int, layout: Layout, **fields: Any) -> Iterator[Layout]:
    written = {name: getattr(layout, name) for name in Layout.__dataclass_fields__} | fields
    if not layout_violations(written, shape, num_devices):
        yield Layout(**written)


def _other_engines(setting: Setting) -> Iterator[Layout]:
    """More tensor parallelism, or experts spread over the replicas, on the same devices."""
    shape, pool = SpecShape(setting.models["policy"]), setting.cluster_of("generate").num_devices
    yield from engine_layouts(shape, pool, above=setting.layout_of("generate").tp)


def training_layouts(shape: SpecShape, num_devices: int) -> Iterator[Layout]:
    """Layouts that a model may be trained under, the simplest first: fsdp over all; with full recompute; with experts
    spread; with tensor parallelism; with the optimiser offloaded.
    """
    whole = Layout(dp_shard=num_devices)
    full = replace(whole, recompute="full")
    yield from (whole, full)
    for ep in (8, 16, 32, 64):
        if shape.num_experts:
            yield from _possible(shape, num_devices, full, ep=ep)
    for tp in (2, 4, 8):
        if num_devices % tp == 0:
            yield from _possible(shape, num_devices, full, dp_shard=num_devices // tp, tp=tp, sp=True)
    yield replace(full, offload="optimizer")
    yield replace(full, offload="all")


def engine_layouts(shape: SpecShape, num_devices: int, *, above: int = 0) -> Iterator[Layout]:
    """Layouts of an engine on so many devices, replicas first: tp 1, 2, 4 ..., then experts spread over all of them."""
    tp = 1
    while tp <= min(num_devices, shape.num_heads):
        if tp > above and num_devices % tp == 0:
            written: dict[str, Any] = {"dp_replicate": num_devices // tp, "tp": tp}
            if not layout_violations(written, shape, num_devices, can_replicate_kv_heads=True):
                yield Layout(**written)
        tp *= 2
    for ep in (8, 16, 32, 64, 128, 256):
        if shape.num_experts and num_devices % ep == 0:
            written = {"dp_replicate": num_devices // ep, "dp_shard": ep, "ep": ep}
            if not layout_violations(written, shape, num_devices, can_replicate_kv_heads=True):
                yield Layout(**written)
