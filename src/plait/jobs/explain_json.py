"""An Explanation for programs: plain numbers, SI units. Torch-free."""

from typing import Any

from plait.jobs.explain import Explanation, StageLine, batch_dict, parameters_dict


def to_dict(report: Explanation) -> dict[str, Any]:
    """See `Explanation.to_dict`."""
    cluster, peak = report.cluster, report.peak
    return {
        "model": parameters_dict(report.setting),
        "cluster": {
            "name": cluster.name,
            "device": cluster.device.name,
            "nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
            "device_memory_bytes": cluster.device.memory_bytes,
        },
        "algorithm": report.algorithm,
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
        "totals": {
            "work_op": float(report.totals.work_op),
            "depth_op": float(report.totals.depth_op),
            "parallelism": float(report.totals.parallelism),
            "rounds": float(report.totals.num_rounds),
            "time_s": float(report.totals.time_s),
            "low_s": float(report.totals.low_s),
            "high_s": float(report.totals.high_s),
            "least_s": float(report.totals.least_s),
            "brent_op": [float(bound) for bound in report.totals.brent_op],
            "brent_s": [float(bound) for bound in report.totals.brent_s],
        },
        "notes": list(report.notes),
        "violations": [{"where": v.where, "rule": v.rule, "change": v.change} for v in report.violations],
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
