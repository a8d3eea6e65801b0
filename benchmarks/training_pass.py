"""Forward and backward of a 50M-parameter Qwen3 on packed sequences, as a share of the best matrix-product rate.

    python benchmarks/training_pass.py [--tokens 4096] [--rounds 5] [--dtype auto]

The pass is the one of an update: `Policy.token_scores` on a packed microbatch, a loss on the response tokens, and
`Policy.backward` (gradients added to the fp32 ones). Its floating-point operations, forward and twice that backward:

    6 L (2 D N H + 2 D M H + 3 D F) T  +  6 V D R  +  6 L N H sum(s_i^2)

T real tokens (the filling of a row counts as time, not as work), R loss tokens (logits exist for them only), s_i the
lengths of the sequences: causal attention does 2 x 2 N H s^2 / 2 operations per layer for its two products, backward
twice that. Norms, rotations, softmax and activations are not counted.

The rate of matrix products is measured in the same turns with torch.mm in the same dtype: 2048^3, and the model's own
shapes (T x D by the weights of queries, keys, output, gate, down), each the best of its repetitions; the divisor is
the larger of the two. The last line is JSON: `fraction_of_matmul_peak` is the median over the rounds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.config import OptimizerConfig
from plait.cost.model_shape import ModelShape, read_model_shape
from plait.jobs.machine import usable_cores
from plait.models.dtype import faster_dtype
from plait.models.load import load_model
from plait.roles.policy import Policy
from plait.stages.packing import Microbatch, TokenSequence, pack

PROMPT_TOKENS = 64
PEAK_SIDE = 2048


def sequences(num_tokens: int, vocab: int) -> list[TokenSequence]:
    """About num_tokens in sequences of a prompt and a completion of 64 to 192 tokens."""
    draw = np.random.default_rng(0)
    made, left = [], num_tokens
    while left > PROMPT_TOKENS + 64:
        length = min(PROMPT_TOKENS + int(draw.integers(64, 193)), left)
        made.append(TokenSequence(draw.integers(3, vocab, length), np.arange(length) >= PROMPT_TOKENS))
        left -= length
    return made


def pass_flop(shape: ModelShape, lengths: list[int], num_loss_tokens: int) -> int:
    """Operations of forward and backward by the formula at the head of this file."""
    matrices = shape.num_layers * shape.num_matrix_parameters_per_layer * sum(lengths)
    head = shape.vocab_size * shape.hidden_size * num_loss_tokens
    attention = shape.num_layers * shape.query_width * sum(length**2 for length in lengths)
    return 6 * (matrices + head + attention)


def best_rate(shapes: list[tuple[int, int, int]], dtype: torch.dtype, repetitions: int = 5) -> float:
    """Operations per second over products [m, k] x [k, n], each at its best repetition."""
    total_flop, total_s = 0, 0.0
    for m, k, n in shapes:
        left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        torch.mm(left, right, out=out)
        seconds = []
        for _ in range(repetitions):
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            seconds.append(time.perf_counter() - started)
        total_flop += 2 * m * k * n
        total_s += min(seconds)
    return total_flop / total_s


def model_products(shape: ModelShape, num_tokens: int) -> list[tuple[int, int, int]]:
    """The products of one layer's forward pass."""
    width, query, keys, inner = shape.hidden_size, shape.query_width, shape.kv_width, shape.intermediate_size
    return [
        (num_tokens, width, query),
        (num_tokens, width, keys),
        (num_tokens, query, width),
        (num_tokens, width, inner),
        (num_tokens, inner, width),
    ]


def one_pass(policy: Policy, microbatch: Microbatch) -> float:
    """Seconds of a forward and a backward pass."""
    started = time.perf_counter()
    scores = policy.token_scores(microbatch, 1.0)
    policy.backward(-scores.logprobs_R.mean())
    return time.perf_counter() - started


def measure(folder: Path, num_tokens: int, rounds: int, dtype_name: str) -> dict[str, Any]:
    """Rounds of one pass and both kinds of matrix products."""
    dtype = getattr(torch, dtype_name)
    shape = read_model_shape(str(folder))
    policy = Policy(load_model(str(folder), dtype=dtype, device="cpu"), OptimizerConfig())
    packed = sequences(num_tokens, shape.vocab_size)
    microbatches = pack(packed, num_tokens, "cpu")
    assert len(microbatches) == 1, f"{len(microbatches)} microbatches, expected 1"
    lengths = [len(sequence.ids_T) for sequence in packed]
    flop = pass_flop(shape, lengths, len(microbatches[0].predict_R))
    for _ in range(2):
        one_pass(policy, microbatches[0])
    rates: dict[str, list[float]] = {"pass": [], "square": [], "model_shapes": []}
    for _ in range(rounds):
        rates["pass"].append(flop / one_pass(policy, microbatches[0]))
        rates["square"].append(best_rate([(PEAK_SIDE,) * 3], dtype))
        rates["model_shapes"].append(best_rate(model_products(shape, sum(lengths)), dtype))
    square, own = max(rates["square"]), max(rates["model_shapes"])
    achieved = statistics.median(rates["pass"])
    return {
        "fraction_of_matmul_peak": achieved / max(square, own),
        "fraction_of_square_products": achieved / square,
        "fraction_of_model_shaped_products": achieved / own,
        "pass_flop_per_s": achieved,
        "square_flop_per_s": square,
        "model_shapes_flop_per_s": own,
        "pass_s": flop / achieved,
        "tokens_per_s": sum(lengths) * achieved / flop,
        "num_parameters": shape.num_parameters,
        "num_tokens": sum(lengths),
        "num_sequences": len(lengths),
        "dtype": dtype_name,
    }


def main() -> None:
    """Run and report."""
    from random_models import cores, print_figures, write_random_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    dtype = faster_dtype("cpu") if arguments.dtype == "auto" else arguments.dtype
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), "50m")
        figures = measure(model, arguments.tokens, arguments.rounds, dtype)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    print_figures({"benchmark": "training_pass", "cores": cores(), **figures})


if __name__ == "__main__":
    main()
