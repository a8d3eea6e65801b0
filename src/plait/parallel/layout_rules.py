"""A layout against the model it splits, the devices it is given and the batch it works on. Torch-free.

Every broken rule is returned, not only the first: with its numbers, and the nearest values that keep it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from plait.errors import Violation
from plait.parallel.degrees import Layout, default_virtual, divisors, nearest, own_violations, with_defaults


class SplittableShape(Protocol):
    """The sizes of a model that a layout must divide; num_experts is 0 for a dense one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_intermediate_size(self) -> int: ...


def layout_violations(
    layout: Layout | Mapping[str, Any],
    shape: SplittableShape | None = None,
    num_devices: int | None = None,
    *,
    num_microbatches: int | None = None,
    num_tokens_per_microbatch: int | None = None,
    can_replicate_kv_heads: bool = False,
) -> list[Violation]:
    """Every structural rule that a layout breaks.

    layout: a Layout, or the fields of one that may not be possible (`parse_degrees` and settings).
    shape, num_devices, num_microbatches (of one training pass), num_tokens_per_microbatch (of one data-parallel rank):
    what is left out is not checked. can_replicate_kv_heads: whether whoever runs it copies key/value heads where tp is
    above their number.
    """
    written = asdict(layout) if isinstance(layout, Layout) else dict(layout)
    found = own_violations(written)
    degrees = with_defaults(written)
    if any(value < 1 for value in (degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)):
        return found  # nothing can be divided by them
    if num_devices is not None:
        found += _devices(degrees, num_devices)
    if shape is not None:
        found += _heads(degrees, shape, can_replicate_kv_heads)
        found += [*_layers(degrees, shape), *_experts(degrees, shape)]
    if num_microbatches is not None and degrees.pp > 1:
        found += _microbatches(degrees, num_microbatches)
    if num_tokens_per_microbatch is not None:
        found += _tokens(degrees, num_tokens_per_microbatch)
    return found


def _stages_per_rank(degrees: Any) -> int:
    return degrees.num_virtual if degrees.num_virtual is not None else default_virtual(degrees.pp_schedule)


def _devices(d: Any, num_devices: int) -> list[Violation]:
    size = d.pp * d.dp_replicate * d.dp_shard * d.cp * d.tp
    if size == num_devices:
        return []
    product = f"pp {d.pp} x dp_replicate {d.dp_replicate} x dp_shard {d.dp_shard} x cp {d.cp} x tp {d.tp}"
    others = size // d.dp_shard
    if num_devices % others == 0:
        change = f"Set dp_shard to {num_devices // others}, or use {size} devices"
    else:
        without_data = d.pp * d.cp * d.tp
        change = (
            f"Use {nearest([k * others for k in range(1, num_devices // others + 2)], num_devices)} devices, "
            f"or choose pp x cp x tp (now {without_data}) as {nearest(divisors(num_devices), without_data)}"
        )
    return [Violation("world_size", f"{product} = {size} devices, and the pool has {num_devices}", change)]


def _tp_options(d: Any, shape: SplittableShape, can_replicate: bool) -> list[int]:
    """Values of tp that keep all rules of this model at once."""

    def is_valid(tp: int) -> bool:
        heads = shape.num_kv_heads % tp == 0 or (can_replicate and tp % shape.num_kv_heads == 0)
        experts = not shape.num_experts or d.ep > 1 or shape.expert_intermediate_size % tp == 0
        return heads and experts and shape.intermediate_size % tp == 0

    return [tp for tp in divisors(shape.num_heads) if is_valid(tp)]


def _heads(d: Any, shape: SplittableShape, can_replicate: bool) -> list[Violation]:
    found = []
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    change = f"Set tp to {nearest(_tp_options(d, shape, can_replicate), d.tp)}"
    if heads % d.tp:
        found.append(Violation("tp", f"tp {d.tp} does not divide the {heads} attention heads", change))
    if d.tp > kv_heads and not (can_replicate and d.tp % kv_heads == 0):
        rule = f"tp {d.tp} is above the {kv_heads} key/value heads, so each would need copies"
        equal = f", in equal numbers: tp must be a multiple of {kv_heads}" if can_replicate else ""
        found.append(Violation("tp", rule + equal, change))
    elif d.tp <= kv_heads and kv_heads % d.tp:
        found.append(Violation("tp", f"tp {d.tp} does not divide the {kv_heads} key/value heads", change))
    if shape.intermediate_size % d.tp:
        rule = f"tp {d.tp} does not divide the feed-forward width {shape.intermediate_size}"
        found.append(Violation("tp", rule, change))
    if shape.num_experts and d.ep == 1 and shape.expert_intermediate_size % d.tp:
        rule = f"tp {d.tp} does not divide the expert width {shape.expert_intermediate_size}, and ep is 1"
        found.append(Violation("tp", rule, f"{change}, or ep to {d.tp}"))
    if d.cp_kind == "ulysses" and d.cp > 1:
        found += _ulysses_heads(d, heads, kv_heads, can_replicate)
    return found


def _ulysses_heads(d: Any, heads: int, kv_heads: int, can_replicate: bool) -> list[Violation]:
    """Ulysses gives each of its ranks some heads of the whole sequence, after tp took its part of them.

    Fewer key/value heads than ranks are copied, in equal numbers.
    """

    def is_even(cp: int) -> bool:
        divides = kv_heads % (cp * d.tp) == 0 or (kv_heads % d.tp == 0 and cp % (kv_heads // d.tp) == 0)
        return divides or (can_replicate and (cp * d.tp) % kv_heads == 0)

    options = [cp for cp in range(1, heads + 1) if heads % (cp * d.tp) == 0 and is_even(cp)]
    change = f"Set cp to {nearest(options or [1], d.cp)}, or cp_kind to ring"
    product = f"cp {d.cp} (ulysses) x tp {d.tp} = {d.cp * d.tp}"
    found = []
    if heads % (d.cp * d.tp):
        found.append(Violation("cp", f"{product} does not divide the {heads} attention heads", change))
    if not is_even(d.cp):
        rule = f"{product} does not divide the {kv_heads} key/value heads, nor is cp a multiple of them to copy them to"
        found.append(Violation("cp", rule, change))
    return found


def _layers(d: Any, shape: SplittableShape) -> list[Violation]:
    if d.pp == 1:
        return []
    chunks = _stages_per_rank(d)
    stages = d.pp * chunks
    if stages <= shape.num_layers:
        return []
    rule = f"pp {d.pp} x {chunks} stages per rank = {stages} stages, and the model has {shape.num_layers} layers"
    fitting = shape.num_layers // chunks
    change = f"Set pp to {fitting} or less" if fitting > 1 else "Leave pp out"
    return [Violation("pp", rule, change + (", or num_virtual lower" if chunks > 2 else ""))]


def _experts(d: Any, shape: SplittableShape) -> list[Violation]:
    if d.ep <= 1:
        return []
    if not shape.num_experts:
        return [Violation("ep", f"ep {d.ep} spreads experts, and the model has none", "Leave ep out")]
    if shape.num_experts % d.ep == 0:
        return []
    spread = d.dp_shard * d.cp * d.tp
    both = [e for e in divisors(shape.num_experts) if spread % e == 0 and (e == 1 or e % d.tp == 0)]
    rule = f"ep {d.ep} does not divide the {shape.num_experts} experts"
    return [Violation("ep", rule, f"Set ep to {nearest(both, d.ep)}")]


def _microbatches(d: Any, count: int) -> list[Violation]:
    """What torch's schedules of the same names ask for."""
    stages = d.pp * _stages_per_rank(d)
    where = "num_microbatches"
    if d.pp_schedule == "1f1b" and count < stages:
        rule = f"1f1b over {stages} stages needs as many microbatches, and there are {count}"
        return [Violation(where, rule, f"Use {stages} microbatches or more, or pp_schedule gpipe")]
    if d.pp_schedule == "dual_pipe_v" and count < stages:
        rule = f"dual_pipe_v over {stages} stages needs as many microbatches, and there are {count}"
        return [Violation(where, rule, f"Use {stages} microbatches or more, or pp_schedule zero_bubble_v")]
    if d.pp_schedule == "interleaved_1f1b":
        rounds = max(1, count // d.pp)
        if count % rounds:
            valid = [m for m in range(1, count + d.pp + 1) if m % max(1, m // d.pp) == 0]
            rule = f"interleaved_1f1b runs {count} microbatches in {count} // pp {d.pp} = {rounds} equal rounds"
            return [Violation(where, rule, f"Use {nearest(valid, count)} microbatches")]
    return []


def _tokens(d: Any, num_tokens: int) -> list[Violation]:
    """Ring attention cuts 2 cp pieces, so that each rank has an early and a late one: causal work in equal parts."""
    pieces = d.cp * (2 if d.cp_kind == "ring" and d.cp > 1 else 1) * (d.tp if d.sp else 1)
    if num_tokens % pieces == 0:
        return []
    parts = f"cp {d.cp} ({d.cp_kind})" + (f" x tp {d.tp} (sp)" if d.sp else "")
    rule = f"{parts} cuts a microbatch into {pieces} equal pieces, and it has {num_tokens} tokens"
    options = [pieces * k for k in range(1, num_tokens // pieces + 2)]
    return [Violation("num_tokens_per_microbatch", rule, f"Set it to {nearest(options, num_tokens)}")]
