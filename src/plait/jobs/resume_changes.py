"""What `--resume` may change: freely, when it is accepted by name, or never. Every change is said.

A setting that is not listed here must be accepted: a resumed run is the same run unless somebody says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.config import RunConfig
from plait.errors import ConfigError, Violation
from plait.jobs.inputs import Inputs
from plait.models.optimizer import learning_rate
from plait.plan import BatchCounts

FREE = frozenset(
    {
        *("name", "train.wall_clock_limit_s", "train.max_nonfinite_updates"),
        *("checkpoint.every_steps", "checkpoint.keep", "logging.tensorboard", "logging.samples_per_step"),
        *("evaluation.every_steps", "evaluation.at_start", "evaluation.at_end", "rollout.record_experts"),
    }
)
"""Settings that decide when a run stops, evaluates, saves and what it writes, and nothing of what a step computes.
`train.num_steps` and `verifiers.num_workers` are free where the functions below find no effect."""

NEVER = frozenset({"algorithm.name", "algorithm.critic.kind", "optimizer.name"})
"""The checkpoint holds the state of this algorithm, its critic and this optimiser, and no other can go on from it."""

_READ_BY_PATH = ("path", "eval_path")


@dataclass(frozen=True, slots=True)
class Change:
    """where: setting. what: the change, in words. effect: why it matters; empty for a free one."""

    where: str
    what: str
    effect: str = ""
    is_possible: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"

    def is_named_in(self, accepted: Sequence[str]) -> bool:
        """By its setting, or by a section that holds it."""
        return any(self.where == name or self.where.startswith(f"{name}.") for name in accepted)


def changes(before: RunConfig, after: RunConfig, read: Inputs, reads: Inputs, steps_done: int) -> list[Change]:
    """Everything that differs between the run as it was started (or resumed last) and as it is resumed now.

    read, reads: what it read then, and would read now. steps_done: of the checkpoint.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    found = {}
    for key in sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)):
        what = f"{_shown(old, key)} -> {_shown(new, key)}"
        if key.rpartition(".")[2] in _READ_BY_PATH and key in read and key in reads:
            if read[key] == reads[key]:  # files are compared by content, wherever they lie
                found[key] = Change(key, f"{what}, with the same content")
            continue
        found[key] = Change(key, what, _effect(key, before, after, steps_done), key not in NEVER)
    for key in sorted(read.keys() | reads.keys()):
        change = _input_change(key, read.get(key, {}), reads.get(key, {}))
        if change is not None and key not in found:
            found[key] = change
    return list(found.values())


def _input_change(key: str, then: Mapping[str, str], now: Mapping[str, str]) -> Change | None:
    parts = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if not parts:
        return None
    listed = ", ".join(f"{name} {_short(then.get(name))} -> {_short(now.get(name))}" for name in parts)
    # Another architecture has other parameters than those of the checkpoint.
    is_possible = not (key in ("model.path", "algorithm.critic.path") and "config.json" in parts)
    return Change(key, f"what it leads to has changed: {listed}", "the run would go on with other content", is_possible)


def _effect(key: str, before: RunConfig, after: RunConfig, steps_done: int) -> str:
    """Why a changed setting must be accepted; empty where it needs not."""
    if key in FREE:
        return ""
    if key == "train.num_steps":
        return _schedule_effect(before, after, steps_done)
    if key == "verifiers.num_workers":
        was_limited, is_limited = before.verifiers.num_workers > 0, after.verifiers.num_workers > 0
        return "" if was_limited == is_limited else "verifiers have time and memory limits in workers only"
    return "the steps to come would not be those of the run as it was started"


def _schedule_effect(before: RunConfig, after: RunConfig, steps_done: int) -> str:
    """What another number of steps does to the learning rates of the updates to come."""
    optimizer, per_step = after.optimizer, BatchCounts.from_config(after).num_updates_per_step
    old, new, first = before.train.num_steps * per_step, after.train.num_steps * per_step, steps_done * per_step
    warmups = optimizer.num_warmup_updates(old), optimizer.num_warmup_updates(new)
    if optimizer.schedule == "constant" and (warmups[0] == warmups[1] or first >= max(warmups)):
        return ""
    what = f'the schedule "{optimizer.schedule}" with its warm-up spans all updates'
    if first >= new:
        return ""
    rate = learning_rate(optimizer, first, new)
    if first < old:
        planned = learning_rate(optimizer, first, old)
        return f"{what}: update {first + 1} would have the learning rate {rate:.3g} instead of {planned:.3g}"
    last = learning_rate(optimizer, old - 1, old)
    return f"{what}: the learning rate ended at {last:.3g} and would go on from {rate:.3g}"


def refuse_changes(found: Sequence[Change], accepted: Sequence[str], config: RunConfig, steps_done: int) -> None:
    """ConfigError with every change that nobody accepted, or that cannot be made."""
    violations = []
    if config.train.num_steps < steps_done:
        rule = f"{config.train.num_steps} steps are asked for, and the checkpoint is of step {steps_done}"
        violations.append(Violation("train.num_steps", rule, f"Set it to {steps_done} or more"))
    for change in found:
        rule = f"{change.what} since the run was started"
        if not change.is_possible:
            violations.append(Violation(change.where, rule, "A checkpoint cannot go on with that; start a new run"))
        elif change.effect and not change.is_named_in(accepted):
            remedy = f"Undo it, start a new run, or accept it by name: --accept {change.where}"
            violations.append(Violation(change.where, f"{rule}; {change.effect}", remedy))
    if violations:
        raise ConfigError(violations)


def notes_on(found: Sequence[Change], accepted: Sequence[str]) -> list[str]:
    """One line per change that is made, and per name that was accepted for nothing."""
    notes = [f"changed, {'accepted by name' if change.effect else 'free to change'}: {change}" for change in found]
    idle = [name for name in accepted if not any(change.is_named_in([name]) for change in found)]
    return notes + [f"--accept {name}: nothing has changed there" for name in idle]


def version_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Packages whose versions differ, as "torch 2.13.0 -> 2.14.0"."""
    names = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    return [f"{name} {then.get(name, 'not recorded')} -> {now.get(name, 'absent')}" for name in names]


def work_left(config: RunConfig, steps_done: int) -> str:
    """What a resumed run still plans: steps, samples, updates."""
    counts, steps = BatchCounts.from_config(config), config.train.num_steps - steps_done
    samples, updates = steps * counts.num_samples_per_step, steps * counts.num_updates_per_step
    more = ", and more samples where groups are refilled" if config.algorithm.dynamic_sampling.enabled else ""
    return (
        f"going on after step {steps_done} of {config.train.num_steps}; left: {steps:,} steps, {samples:,} samples, "
        f"{updates:,} updates{more}"
    )


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; the items of a list by their number, as --set writes them."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if items is None or not data:
        return {prefix.removesuffix("."): data}
    return {key: value for name, part in items for key, value in _flat(part, f"{prefix}{name}.").items()}


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"


def _short(fingerprint: str | None) -> str:
    return "absent" if fingerprint is None else fingerprint[:12]
