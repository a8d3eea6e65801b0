"""The one place where parallel degrees are spelled, multiplied and validated. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, get_args

from plait.errors import Violation

_FIELDS = {"dp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
_TOKEN = re.compile(r"(fsdp|dp|tp|pp|cp|ep)(\d+)")
Recompute = Literal["none", "selective", "full"]
ContextKind = Literal["ring", "ulysses"]
Offload = Literal["none", "optimizer", "all"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v"]
V_SCHEDULES = ("zero_bubble_v", "dual_pipe_v")
"""Rank r holds stages r and 2 pp - 1 - r: the pipeline comes back, so the first and last stage share a rank."""


class LayoutError(ValueError):
    """A layout that cannot be, whatever the model and the devices. Carries every violation found."""

    def __init__(self, violations: list[Violation]):
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.rule} ({v.change})" for v in violations))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one model is split: world size = pp x dp_replicate x dp_shard x cp x tp; ep never multiplies it.

    zero: what is sharded over dp_shard x cp: 1 optimiser state, 2 also gradients, 3 also parameters; 0 nothing.
    sp: activations between the tensor-parallel regions are split over tp along the sequence.
    num_virtual: stages per pipeline rank; left out, it is what the schedule needs (2 for interleaved and V-shaped).
    recompute: which activations backward computes again: selective keeps matrix products and attention outputs.
    offload: what waits in host memory: optimizer, its state; all, also parameters and gradients.
    Raises LayoutError.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    zero: int = 3
    sp: bool = False
    pp_schedule: PipelineSchedule = "1f1b"
    num_virtual: int | None = None
    cp_kind: ContextKind = "ring"
    offload: Offload = "none"

    def __post_init__(self) -> None:
        found = own_violations({field.name: getattr(self, field.name) for field in fields(self)})
        if found:
            raise LayoutError(found)

    @property
    def world_size(self) -> int:
        """Devices of one copy of this layout."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that work on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Ranks over which parameters, gradients and optimiser state outside the experts are sharded."""
        return self.dp_shard * self.cp

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks over which those of one expert are sharded: dp_shard x cp x tp / ep, or dp_shard x cp without ep."""
        return self.shard_ranks if self.ep == 1 else self.dp_shard * self.cp * self.tp // self.ep

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that one rank holds."""
        return self.num_virtual if self.num_virtual is not None else default_virtual(self.pp_schedule)

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all; 1 without a pipeline."""
        return self.pp * self.stages_per_rank if self.pp > 1 else 1

    @classmethod
    def parse(cls, text: str, **settings: Any) -> "Layout":
        """Read the short spelling, for example "fsdp4tp2pp2ep4"; "" is one device. Raises ValueError.

        settings: the fields that the short spelling cannot say (zero, sp, recompute, ...).
        """
        degrees: dict[str, Any] = dict(parse_degrees(text))
        return cls(**degrees, **settings)

    def with_recompute(self, recompute: Recompute) -> "Layout":
        """The same layout with another recompute setting."""
        return replace(self, recompute=recompute)

    def settings(self) -> dict[str, Any]:
        """The fields beside the degrees that differ from their defaults: Layout.parse(str(x), **x.settings()) == x."""
        named = [field for field in fields(self) if field.name not in _FIELDS.values()]
        return {field.name: getattr(self, field.name) for field in named if getattr(self, field.name) != field.default}

    def __str__(self) -> str:
        return "".join(f"{short}{getattr(self, name)}" for short, name in _FIELDS.items() if getattr(self, name) > 1)


def parse_degrees(text: str) -> dict[str, int]:
    """The degrees that a short spelling names, by field; not yet checked against each other. Raises ValueError."""
    degrees: dict[str, int] = {}
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(
                f'cannot read layout "{text}" at "{text[position:]}": expected dp, fsdp, tp, pp, cp or ep and a number'
            )
        axis, degree = _FIELDS[match[1]], int(match[2])
        if axis in degrees:
            raise ValueError(f'layout "{text}" names {match[1]} twice')
        degrees[axis] = degree
        position = match.end()
    return degrees


def layer_ranges(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage: as even as can be, the first stages taking one more."""
    base, rest = divmod(num_layers, num_stages)
    starts = [stage * base + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(options: list[int], wanted: int) -> str:
    """The options on either side of a value, for a message: "2 or 4"."""
    below = [option for option in options if option <= wanted][-1:]
    above = [option for option in options if option > wanted][:1]
    return " or ".join(str(option) for option in below + above)


def default_virtual(schedule: str) -> int:
    """Stages per rank of a schedule where num_virtual is left out."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def with_defaults(written: Mapping[str, Any]) -> Any:
    """The fields of a layout, those left out at their defaults, with nothing checked."""
    values = {field.name: field.default for field in fields(Layout)}
    assert set(written) <= set(values), f"no such field of a layout: {sorted(set(written) - set(values))}"
    return SimpleNamespace(**{**values, **written})


def own_violations(written: Mapping[str, Any]) -> list[Violation]:
    """Every rule that the fields of a layout break among themselves, at once. Unknown names are an assertion."""
    layout = with_defaults(written)
    found = _wrong_values(layout)
    if found:
        return found  # the rules below multiply and divide what was found wrong
    return [
        *_expert_spread(layout),
        *_without_effect(layout),
        *_pipeline_chunks(layout),
        *_backward_in_two_parts(layout),
    ]


def _wrong_values(layout: Any) -> list[Violation]:
    found = [
        Violation(name, f"degree {name} is {getattr(layout, name)}, expected at least 1", f"Set {name} to 1 or more")
        for name in _FIELDS.values()
        if getattr(layout, name) < 1
    ]
    choices = {
        "recompute": get_args(Recompute),
        "cp_kind": get_args(ContextKind),
        "offload": get_args(Offload),
        "pp_schedule": get_args(PipelineSchedule),
        "zero": (0, 1, 2, 3),
    }
    for name, allowed in choices.items():
        if getattr(layout, name) not in allowed:
            known = ", ".join(str(value) for value in allowed)
            found.append(Violation(name, f"{name} is {getattr(layout, name)!r}", f"Choose one of {known}"))
    if layout.num_virtual is not None and layout.num_virtual < 1:
        found.append(
            Violation("num_virtual", f"num_virtual is {layout.num_virtual}, expected at least 1", "Leave it out")
        )
    return found


def _expert_spread(layout: Any) -> list[Violation]:
    spread = layout.dp_shard * layout.cp * layout.tp
    if layout.ep == 1 or (spread % layout.ep == 0 and layout.ep % layout.tp == 0):
        return []
    valid = [d for d in divisors(spread) if d == 1 or d % layout.tp == 0]
    return [
        Violation(
            "ep",
            f"ep {layout.ep} must divide dp_shard x cp x tp = {spread} and be a multiple of tp {layout.tp}",
            f"Set ep to {nearest(valid, layout.ep)}",
        )
    ]


def _without_effect(layout: Any) -> list[Violation]:
    """Settings that change nothing: left in, they would make a reader believe otherwise."""
    found = []
    if layout.sp and layout.tp == 1:
        found.append(Violation("sp", "sp splits activations over tp, and tp is 1", "Leave sp out, or set tp to 2"))
    if layout.pp == 1 and (layout.pp_schedule != "1f1b" or layout.num_virtual is not None):
        rule = f"there is no pipeline (pp 1) for pp_schedule {layout.pp_schedule}, num_virtual {layout.num_virtual}"
        found.append(Violation("pp_schedule", rule, "Leave pp_schedule and num_virtual out, or set pp to 2"))
    if layout.cp == 1 and layout.cp_kind != "ring":
        found.append(Violation("cp_kind", f"cp_kind is {layout.cp_kind}, and cp is 1", "Leave it out, or set cp to 2"))
    if layout.zero != 3 and layout.dp_shard * layout.cp == 1:
        rule = f"zero is {layout.zero}, and there is one rank to shard over (dp_shard x cp = 1)"
        found.append(Violation("zero", rule, "Leave zero out, or set dp_shard to 2"))
    if layout.zero == 0 and layout.dp_shard > 1:
        rule = f"zero 0 shards nothing, and dp_shard {layout.dp_shard} asks for shards"
        change = f"Write dp_replicate {layout.dp_replicate * layout.dp_shard} and leave dp_shard out, or set zero to 1"
        found.append(Violation("zero", rule, change))
    return found


def _backward_in_two_parts(layout: Any) -> list[Violation]:
    """torch's selective checkpoints allow one backward pass, and V schedules run one for inputs and one for weights."""
    if layout.pp == 1 or layout.pp_schedule not in V_SCHEDULES or layout.recompute != "selective":
        return []
    rule = f"{layout.pp_schedule} runs backward in two parts, and recompute selective allows one"
    return [Violation("recompute", rule, 'Set recompute to "full" or "none", or pp_schedule to 1f1b')]


def _pipeline_chunks(layout: Any) -> list[Violation]:
    if layout.pp == 1 or layout.num_virtual is None:
        return []
    schedule, chunks = layout.pp_schedule, layout.num_virtual
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        change = "Leave num_virtual out, or choose interleaved_1f1b"
    elif schedule in V_SCHEDULES and chunks != 2:
        change = "Leave num_virtual out: a V has 2"
    elif schedule == "interleaved_1f1b" and chunks < 2:
        change = "Set num_virtual to 2 or more, or choose 1f1b"
    else:
        return []
    return [Violation("num_virtual", f"{schedule} cannot have {chunks} stages per rank", change)]
