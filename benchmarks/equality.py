"""Every layout against the unsharded model, on every family: the full cross product, of which CI runs a part.

    python benchmarks/equality.py [--kinds qwen3 llama] [--worlds 2 4] [--only cp2]

fp32 under gloo on CPU processes of this machine. Bars: loss relative 1e-5, every gradient relative 1e-4 by norm. Prints
a line per case; the last line is JSON with the number of cases, those that failed, and the largest errors.
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "dist"))

from random_models import print_figures

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v")
DATA = [("dp2", {}), *(("fsdp2", {"zero": z}) for z in (1, 2, 3)), *(("dp2fsdp2", {"zero": z}) for z in (1, 2, 3))]
TENSOR = [(text, {"sp": sp}) for text, sp in product(("tp2", "tp4", "fsdp2tp2", "dp2tp2"), (False, True))]
CONTEXT = [
    *((text, {"cp_kind": kind}) for text, kind in product(("cp2", "cp4", "fsdp2cp2"), ("ring", "ulysses"))),
    ("cp2tp2", {"sp": True}),
    ("dp2cp2tp2", {}),
    ("fsdp2cp2tp2", {"sp": True, "zero": 1}),
]
PIPELINE = [
    *(("pp2", {"pp_schedule": schedule}) for schedule in SCHEDULES),
    *(("fsdp2pp2", {"pp_schedule": schedule}) for schedule in SCHEDULES),
    ("dp2pp2", {}),
    ("tp2pp2", {}),
    ("tp2pp2", {"sp": True, "pp_schedule": "zero_bubble_v"}),
    ("cp2pp2", {}),
    ("fsdp2tp2pp2", {"sp": True}),
]
RECOMPUTE = [
    (text, {"recompute": kind, **settings})
    for (text, settings), kind in product([("fsdp2", {}), ("tp2", {"sp": True}), ("cp2", {})], ("selective", "full"))
]
EXPERTS = [
    *(("fsdp2ep2", {"zero": z}) for z in (1, 2, 3)),
    ("fsdp4ep4", {}),
    ("fsdp4ep2", {}),
    ("dp2fsdp2ep2", {}),
    *(("tp2ep2", {"sp": sp}) for sp in (False, True)),
    *(("fsdp2tp2ep4", {"sp": sp}) for sp in (False, True)),
    ("fsdp2tp2ep2", {}),
    ("fsdp2cp2ep4", {}),
    ("fsdp2ep2pp2", {}),
    ("fsdp2ep2", {"recompute": "full"}),
]


def cases(kinds, worlds, only):
    """(kind, layout, settings, changes of the model) of every case, by layout; experts for sparse models alone."""
    from models import SPARSE
    from plait.parallel.degrees import Layout

    for text, settings in sorted([*DATA, *TENSOR, *CONTEXT, *PIPELINE, *RECOMPUTE, *EXPERTS], key=lambda case: case[0]):
        if only not in (None, text) or Layout.parse(text, **settings).world_size not in worlds:
            continue
        for kind in kinds:
            if "ep" in text and kind not in SPARSE:
                continue
            for is_tied in (False, True) if "pp" in text or "tp" in text else (False,):
                yield kind, text, settings, {"tie_word_embeddings": is_tied}


def main():
    """Run the cases, one group of processes per world size."""
    from equality import compare
    from ranks import RankError, Ranks

    from models import KINDS
    from plait.parallel.degrees import Layout

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--only", help="a layout")
    arguments = parser.parse_args()
    groups = {world: Ranks(world) for world in arguments.worlds}
    failed, results, start_s, last = [], [], time.monotonic(), None
    try:
        for kind, text, settings, changes in cases(arguments.kinds, arguments.worlds, arguments.only):
            name = " ".join([kind, text, *(f"{key}={value}" for key, value in {**settings, **changes}.items())])
            if text != last:
                for group in groups.values():
                    group.stop()  # the process groups of a layout have threads, and live as long as their processes
            last, group = text, groups[Layout.parse(text, **settings).world_size]
            try:
                ranks = group.run(compare, kind, text, settings, changes, timeout_s=300)
            except RankError as error:
                failed.append(name)
                print(f"FAILED {name}: {str(error).strip().splitlines()[-1]}", flush=True)
                continue
            results.append({key: max(rank[key] for rank in ranks) for key in ("loss", "gradient", "logprobs")})
            print(f"{name}: loss {results[-1]['loss']:.1e}, gradient {results[-1]['gradient']:.1e}", flush=True)
    finally:
        for group in groups.values():
            group.stop()
    worst = {f"max_{key}_error": max((r[key] for r in results), default=None) for key in ("loss", "gradient")}
    worst["max_logprob_difference"] = max((r["logprobs"] for r in results), default=None)
    seconds = round(time.monotonic() - start_s, 1)
    print_figures({"num_cases": len(results) + len(failed), "failed": failed, **worst, "wall_s": seconds})


if __name__ == "__main__":
    main()
