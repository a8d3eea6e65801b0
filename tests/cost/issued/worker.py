"""One process of the group: runs every case and writes what it issued. Arguments: rank, world, folder, [cases]."""

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import cases
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=30)


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=LIMIT)
    names = sys.argv[4:] or list(cases.ALL)
    issued = {name: cases.ALL[name](world) for name in names}
    (folder / f"issued-{rank}.json").write_text(json.dumps(issued))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
