"""Measures what specs/clusters/devices.toml says of the device "cpu": run on this machine, print one JSON line.

Rates are the best of a few repetitions; shares are what sizes of layers reach of it, smallest, median and best. Two
processes all-reduce over gloo for the link.

    python benchmarks/device.py
"""

import json
import multiprocessing
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist

SECONDS = 1.0
SHAPES = ((256, 512, 512), (512, 1024, 1024), (1024, 1024, 4096), (2048, 2048, 2048))


def best_s(run, seconds=SECONDS):
    """The shortest of as many repetitions as fit, after one to warm up."""
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_rates(dtype):
    """Operations per second of each shape."""
    rates = []
    for n, a, c in SHAPES:
        x, y = torch.randn(n, a).to(dtype), torch.randn(a, c).to(dtype)
        rates.append(2 * n * a * c / best_s(lambda x=x, y=y: x @ y))
    return rates


def memory_rates():
    """Bytes per second, read and written, of sums of arrays that no cache holds."""
    rates = []
    for size in (2**24, 2**26, 2**27):
        x, y = torch.ones(size), torch.ones(size)
        out = torch.empty(size)
        rates.append(12 * size / best_s(lambda x=x, y=y, out=out: torch.add(x, y, out=out)))
    return rates


def op_latency_s():
    """One dependent elementwise operator on a few numbers."""
    x = torch.ones(16)

    def chain():
        y = x
        for _ in range(1000):
            y = y + x

    return best_s(chain) / 1000


def _rank(rank, port, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds = {}
    for size in (1, 2**18, 2**24):
        seconds[size] = _all_reduce_s(torch.ones(size))
    if rank == 0:
        queue.put(seconds)
    dist.destroy_process_group()


def _all_reduce_s(x):
    """The shortest of a fixed number, so that both ranks do as many."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - start)
    return min(times)


def link():
    """(bytes per second, seconds) of all-reduces of two processes: a line through a small and a large one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    seconds = queue.get(timeout=120)
    for process in ranks:
        process.join()
    # Bus bandwidth of an all-reduce of two ranks is its payload over its time.
    return 4 * (2**24 - 2**18) / (seconds[2**24] - seconds[2**18]), seconds[1]


def main():
    """One JSON line."""
    bf16, fp32, memory = matmul_rates(torch.bfloat16), matmul_rates(torch.float32), memory_rates()
    bytes_per_s, base_s = link()
    shares = sorted(rate / max(bf16) for rate in bf16)
    figures = {
        "bf16_flop_per_s": max(bf16),
        "fp32_flop_per_s": max(fp32),
        "matmul_share": [shares[0], statistics.median(shares), shares[-1]],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_bytes_per_s": max(memory),
        "memory_share": [min(memory) / max(memory), statistics.median(memory) / max(memory), 1.0],
        "op_latency_s": op_latency_s(),
        "scale_up_bytes_per_s": bytes_per_s,
        "scale_up_base_s": base_s,
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
