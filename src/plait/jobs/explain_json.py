"""An Explanation for programs: plain numbers, SI units. Torch-free."""

from dataclasses import asdict
from typing import Any

from plait.cost.composition.step import PoolEstimate, StepEstimate
from plait.jobs.explain import Explanation, StageLine, batch_dict, parameters_dict


def to_dict(report: Explanation) -> dict[str, Any]:
    """See `Explanation.to_dict`."""
    cluster, peak, step = report.asked.cluster, report.peak, report.step
    return {
        "model": parameters_dict(report.setting),
        "cluster": {
            "name": cluster.name,
            "device": cluster.device.name,
            "nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
            "device_memory_bytes": cluster.device.memory_bytes,
        },
        "algorithm": report.asked.algorithm,
        "batch": batch_dict(report.setting),
        "stages": [_stage(line) for line in report.stages],
        "memory": {
            "fits": report.fits,
            "peak_stage": peak.estimate.name,
            "peak_bytes": peak.num_bytes,
            "usable_bytes": peak.usable_bytes,
            "terms": dict(peak.memory),
            "stages": {line.estimate.name: dict(line.memory) for line in report.stages if line.memory},
            "changes": [
                {"stage": line.estimate.name, "what": c.what, "bytes": c.num_bytes, "fits": c.fits,
                 "devices": c.num_devices}
                for line in report.stages
                for c in line.changes
            ],
        },
        "placement": report.placement,
        "schedule": asdict(report.asked.schedule),
        "fuse": dict(report.asked.fuse),
        "totals": _totals(step),
        "pools": {name: _pool(report, name, pool) for name, pool in step.pools.items()},
        "spans": [
            {"step": number, "stage": name, "start_s": float(span.start_s), "end_s": float(span.end_s)}
            for (number, name), span in step.spans.items()
        ],
        "notes": list(report.notes),
        "violations": [{"where": v.where, "rule": v.rule, "change": v.change} for v in report.violations],
    }  # fmt: skip


def _totals(step: StepEstimate) -> dict[str, Any]:
    """Of all steps together; step_s: of one on average."""
    assert step.brent_op is not None
    assert step.brent_s is not None
    return {
        "steps": step.num_steps,
        "work_op": float(step.work_op),
        "depth_op": float(step.depth_op),
        "parallelism": float(step.parallelism),
        "rounds": float(step.num_rounds),
        "time_s": float(step.time_s),
        "low_s": float(step.low_s),
        "high_s": float(step.high_s),
        "step_s": float(step.step_s),
        "least_s": float(step.least_s or 0),
        "brent_op": [float(step.brent_op.least), float(step.brent_op.most)],
        "brent_s": [float(step.brent_s.least), float(step.brent_s.most)],
    }


def _pool(report: Explanation, name: str, pool: PoolEstimate) -> dict[str, Any]:
    """held: bytes per device by term while no stage runs (stage null), then while each does."""
    cluster = report.setting.pools.get(name)
    return {
        "devices": 0 if cluster is None else cluster.num_devices,
        "busy_s": float(pool.busy_s),
        "idle_share": float(pool.idle_share),
        "peak_bytes": float(pool.peak_bytes),
        "held": [
            {"stage": moment.stage, "bytes": float(moment.total_bytes),
             "terms": {term: float(size) for term, size in moment.memory.items() if size}}
            for moment in pool.held
        ],
    }  # fmt: skip


def _stage(line: StageLine) -> dict[str, Any]:
    e = line.estimate
    return {
        "name": e.name,
        "pool": line.pool,
        "layout": line.layout,
        "devices": e.num_devices,
        "work_op": float(e.work_op),
        "depth_op": float(e.depth_op),
        "rounds": float(e.num_rounds),
        "flop": float(e.flop),
        "sent_bytes": float(e.sent_bytes),
        "hbm_bytes": float(e.hbm_bytes),
        "time_s": float(e.time_s),
        "low_s": float(e.low_s),
        "high_s": float(e.high_s),
        "least_s": line.least_s,
        "terms_s": {cause: float(seconds) for cause, seconds in e.terms_s.items()},
        "bottleneck": e.bottleneck,
        "memory_bytes": line.num_bytes,
        "memory": dict(line.memory),
        "fits": line.fits,
        "granularity": e.granularity,
        "pieces": float(e.num_pieces),
    }
