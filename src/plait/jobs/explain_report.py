"""An Explanation as a person reads it, in 100 columns."""

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.cost.fit import GIB
from plait.jobs.explain import Explanation, StageLine, said

_SHORT = {"memory bandwidth": "memory"}
_HEADS = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "kv_cache": "KV",
    "other_state": "others",
}


def render(report: Explanation) -> RenderableType:
    """What is asked; a row per stage; the step; memory; what would make it fit; notes."""
    parts: list[RenderableType] = [Text(line) for line in _asked(report)]
    parts += [
        Text(""),
        _stages(report),
        Text(""),
        *(Text(line) for line in _totals(report)),
        Text(""),
        _memory(report),
        Text(""),
    ]
    parts += [Text(line) for line in _verdict(report)]
    parts += [Text(note, style="dim") for note in report.notes]
    return Group(*parts)


def _asked(report: Explanation) -> Iterator[str]:
    spec, cluster, batch = report.setting.models["policy"], report.cluster, report.setting.batch
    active = "" if spec.experts is None else f" ({spec.num_active_parameters / 1e9:.3g} G active)"
    device = cluster.device
    yield (
        f"{spec.name}: {spec.num_parameters:,} parameters{active}, {report.algorithm} on {cluster.name} "
        f"({cluster.num_devices} x {device.memory_bytes / GIB:.0f} GiB)"
    )
    longest = batch.lengths.expected_max(batch.num_sequences)
    yield (
        f"{batch.num_prompts:,} prompts x {batch.num_samples_per_prompt} samples of {batch.prompt_tokens:g} + "
        f"{batch.lengths.mean:.0f} tokens (longest {longest:.0f}), {_plural(batch.num_updates, 'update')}, "
        f"microbatches of {batch.num_tokens_per_microbatch:,} tokens"
    )


def _plural(count: float, word: str) -> str:
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def _stages(report: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    unit = memory_unit(report)
    table.add_column("stage", no_wrap=True)
    table.add_column("layout", overflow="fold", min_width=7)
    for name in ("W op", "D op", "rounds", "sent B", "time", "low-high", "least", unit.name):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    for line in report.stages:
        e = line.estimate
        table.add_row(
            e.name, Text(_place(report, line)), power(e.work_op), power(e.depth_op), power(e.num_rounds),
            size(e.sent_bytes), seconds(e.time_s), between(e.low_s, e.high_s), seconds(line.least_s),
            _total(line, unit), _SHORT.get(e.bottleneck, e.bottleneck),
        )  # fmt: skip
    return table


def _place(report: Explanation, line: StageLine) -> str:
    place = line.layout
    if line.estimate.name == "score_verifier":
        place = f"{report.setting.num_cpu_cores:g} cpu"
    elif not place and not line.memory:
        place = "host"
    return place if len(report.setting.pools) == 1 or not line.memory else f"{place} @{line.pool}".strip()


class Unit(NamedTuple):
    """In which bytes are shown."""

    name: str
    num_bytes: int


def memory_unit(report: Explanation) -> Unit:
    """GiB, or MiB where a device holds less than two of them."""
    return Unit("GiB", GIB) if report.peak.num_bytes >= 2 * GIB else Unit("MiB", 2**20)


def _total(line: StageLine, unit: Unit) -> Text:
    if not line.memory:
        return Text("-")
    return Text(f"{line.num_bytes / unit.num_bytes:.1f}", style="" if line.fits else "bold red")


def power(value: float) -> str:
    """1.2e15, or the number itself below ten thousand."""
    value = float(value)
    return f"{value:.0f}" if value < 10_000 else f"{value:.1e}".replace("e+", "e").replace("e0", "e")


def size(num_bytes: float) -> str:
    """Bytes with a decimal prefix."""
    value = float(num_bytes)
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5 or prefix == "T":
            return f"{value:.3g}{prefix}" if value else "0"
        value /= 1000
    raise AssertionError("the last prefix always returns")


def seconds(value: float) -> str:
    """Three digits, with a unit."""
    value = float(value)
    if value >= 5400:
        return f"{value / 3600:.3g}h"
    if value >= 0.9995:
        return f"{value:.3g}s" if value < 999.5 else f"{value:.0f}s"
    if value >= 0.9995e-3:
        return f"{value * 1e3:.3g}ms"
    return f"{value * 1e6:.3g}us" if value >= 1e-7 else "0"


def between(low: float, high: float) -> str:
    """Two times, the unit once where it is the same."""
    first, last = seconds(low), seconds(high)
    unit = last.lstrip("0123456789.")
    return f"{first.removesuffix(unit)}-{last}" if first.lstrip("0123456789.") == unit else f"{first}-{last}"


def _totals(report: Explanation) -> Iterator[str]:
    t = report.totals
    yield (
        f"step: {seconds(t.time_s)} ({between(t.low_s, t.high_s)}), stages in turns; no less than "
        f"{seconds(t.least_s)} at peak rates"
    )
    low, high = t.brent_op
    low_s, high_s = t.brent_s
    yield (
        f"W {power(t.work_op)} operations, D {power(t.depth_op)}, average parallelism W/D {power(t.parallelism)}, "
        f"{power(t.num_rounds)} rounds"
    )
    yield (
        f"Brent: {power(low)} to {power(high)} turns of all operations in flight; W / rates and D x latency: "
        f"{seconds(low_s)} to {seconds(high_s)}"
    )
    tokens = report.setting.batch.num_sequences * (
        report.setting.batch.prompt_tokens + report.setting.batch.lengths.mean
    )
    price = report.cluster.price_per_hour
    cost = "" if price is None else f", ${float(t.time_s) / 3600 * price:.2f} per step at list prices"
    per_device = tokens / float(t.time_s) / report.cluster.num_devices
    yield f"{per_device:,.0f} tokens per second and device{cost}"


def _memory(report: Explanation) -> Table:
    lines, unit = [line for line in report.stages if line.memory], memory_unit(report)
    used = [term for term in lines[0].memory if any(line.memory[term] for line in lines)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"{unit.name} per device", no_wrap=True)
    for term in [*used, "all", "of"]:
        table.add_column(_HEADS.get(term, term), justify="right", no_wrap=True)
    for line in lines:
        shown = [f"{line.memory[term] / unit.num_bytes:.1f}" if line.memory[term] else "-" for term in used]
        usable = f"{line.usable_bytes / unit.num_bytes:.1f}"
        table.add_row(line.estimate.name, *shown, _total(line, unit), usable)
    return table


def _verdict(report: Explanation) -> Iterator[str]:
    peak, unit = report.peak, memory_unit(report)
    terms = sorted(peak.memory.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name.replace('_', ' ')} {value / unit.num_bytes:.1f}" for name, value in terms if value)
    fits = "fits" if report.fits else "does not fit"
    yield f"Memory {fits}. Most is needed by {peak.estimate.name}: {largest} {unit.name}"
    for violation in report.violations:
        yield f"{violation.rule[0].upper()}{violation.rule[1:]}"
        name = violation.where.removeprefix("memory.")
        tried = next(line.changes for line in report.stages if line.estimate.name == name)
        if not violation.change.startswith("Any of"):
            yield f"  {violation.change}"
        if tried and tried[0].fits:
            yield "It would fit with one of"
            yield from (f"  {said(change)}" for change in tried)
