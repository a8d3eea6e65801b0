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
        *(Text(line) for line in (*_totals(report), *_pools(report))),
        Text(""),
        _memory(report),
        Text(""),
    ]
    parts += [Text(line) for line in _verdict(report)]
    parts += [Text(note, style="dim") for note in report.notes]
    return Group(*parts)


def _asked(report: Explanation) -> Iterator[str]:
    spec, cluster, batch = report.setting.models["policy"], report.asked.cluster, report.setting.batch
    active = "" if spec.experts is None else f" ({spec.num_active_parameters / 1e9:.3g} G active)"
    device = cluster.device
    yield (
        f"{spec.name}: {spec.num_parameters:,} parameters{active}, {report.asked.algorithm} on {cluster.name} "
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
    step = report.step
    schedule, count = report.asked.schedule, step.num_steps
    versions = f" (max_staleness {schedule.max_staleness})" if schedule.kind == "fully_async" else ""
    how = f"{report.placement.replace('_', ' ')}, {schedule.kind}{versions}"
    of = "step" if count == 1 else f"{count} steps"
    each = "" if count == 1 else f", {seconds(step.step_s)} each"
    assert step.brent_op is not None
    assert step.brent_s is not None
    yield f"{of}: {seconds(step.time_s)} ({between(step.low_s, step.high_s)}){each}; {how}"
    if report.asked.fuse:
        yield "fused: " + ", ".join(f"{name} by {piece}" for name, piece in report.asked.fuse.items())
    yield f"no less than {seconds(step.least_s or 0)} on these pools: their busiest resource at peak rates"
    yield (
        f"W {power(step.work_op)} operations, D {power(step.depth_op)}, average parallelism W/D "
        f"{power(step.parallelism)}, {power(step.num_rounds)} rounds"
    )
    yield (
        f"Brent: {power(step.brent_op.least)} to {power(step.brent_op.most)} turns of all operations in flight; "
        f"W / rates, D x latency: {seconds(step.brent_s.least)} to {seconds(step.brent_s.most)}"
    )
    batch, cluster = report.setting.batch, report.asked.cluster
    devices = sum(pool.num_devices for pool in report.setting.pools.values())
    price = cluster.price_per_hour
    share = devices / cluster.num_devices
    cost = "" if price is None else f", ${float(step.step_s) / 3600 * price * share:.2f} per step at list prices"
    tokens = batch.num_sequences * (batch.prompt_tokens + batch.lengths.mean)
    yield f"{tokens / float(step.step_s) / devices:,.0f} tokens per second and device{cost}"


def _pools(report: Explanation) -> Iterator[str]:
    """How busy each pool is, and what its devices hold: between stages, and at most."""
    unit = memory_unit(report)
    for name, pool in report.step.pools.items():
        busy = f"{name}: idle {float(pool.idle_share):.0%}"
        if name not in report.setting.pools:
            yield f"{busy} of the time (processor cores)"
            continue
        cluster, most = report.setting.pools[name], max(pool.held, key=lambda moment: moment.total_bytes)
        resting = float(pool.held[0].total_bytes) / unit.num_bytes
        yield (
            f"{busy} of the time, {_plural(cluster.num_devices, 'device')}; {resting:.1f} {unit.name} each between "
            f"stages, at most {float(pool.peak_bytes) / unit.num_bytes:.1f} ({most.stage or 'always'})"
        )


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
        yield f"{violation.where.removeprefix('memory.')}: {violation.rule.removeprefix('the ')}"
        name = violation.where.removeprefix("memory.")
        tried = next(line.changes for line in report.stages if line.estimate.name == name)
        if not violation.change.startswith("Any of"):
            yield f"  {violation.change}"
        if tried and tried[0].fits:
            yield "It would fit with one of"
            yield from (f"  {said(change)}" for change in tried)
