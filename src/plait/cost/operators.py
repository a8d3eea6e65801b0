"""Work, depth and memory traffic of each operator, forward and backward. Torch-free; plain arithmetic.

Conventions. One multiply or add is one operation, so a product of n x a by a x c is 2 n a c; every function of one
number (exp, rsqrt, silu) is one operation. Depth is the longest chain with unbounded processors: one step per
elementwise operation, ceil(log2 n) for a reduction over n numbers, 1 + ceil(log2 a) for a product over a. Moving data
(reshape, gather, cast) costs bytes, no operation. Bytes are what has to pass through device memory if each operator
reads its inputs and writes its outputs once; b is the size of a number.

Shapes: n tokens (rows), a inputs, c outputs, x keys; letters of a model as in `plait.cost.model_spec`. Sources: the
forms are Ben-Nun and Hoefler (arXiv 1802.09941) and Besta et al. (arXiv 2608.27046, appendix B); the constants are
counted from the operators that transformers runs, and tests compare them with traced graphs.
"""

from dataclasses import dataclass, replace
from typing import Literal

from plait.cost.arithmetic import Number, maximum, tree_depth

Implementation = Literal["eager", "fused"]
"""eager: attention scores pass through memory. fused: FlashAttention, which keeps them on the chip."""


@dataclass(frozen=True, slots=True)
class Cost:
    """work: operations. depth: longest chain of them. flop: the part of the work in matrix products.

    read_bytes, write_bytes: traffic with device memory; product_bytes: the part of it in operators that hold products.
    num_operators: launches. a + b is a, then b; a * k is a, k times in a row.
    """

    work: Number = 0
    depth: Number = 0
    flop: Number = 0
    read_bytes: Number = 0
    write_bytes: Number = 0
    product_bytes: Number = 0
    num_operators: Number = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.work + other.work,
            self.depth + other.depth,
            self.flop + other.flop,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            self.product_bytes + other.product_bytes,
            self.num_operators + other.num_operators,
        )

    def __mul__(self, times: Number) -> "Cost":
        return Cost(
            self.work * times,
            self.depth * times,
            self.flop * times,
            self.read_bytes * times,
            self.write_bytes * times,
            self.product_bytes * times,
            self.num_operators * times,
        )

    @property
    def hbm_bytes(self) -> Number:
        """Read and written."""
        return self.read_bytes + self.write_bytes

    def off_path(self) -> "Cost":
        """The same work beside a longer chain: it adds no depth."""
        return replace(self, depth=0)


def beside(*costs: Cost) -> Cost:
    """Operators that do not wait for each other: work adds up, the deepest one counts."""
    total = Cost()
    depth: Number = 0
    for cost in costs:
        total, depth = total + cost.off_path(), maximum(depth, cost.depth)
    return replace(total, depth=depth)


def operator(work: Number, depth: Number, flop: Number, read_bytes: Number, write_bytes: Number) -> Cost:
    """One launch; all of its traffic is a product's where it holds one."""
    holds_product = not (isinstance(flop, int) and flop == 0)
    traffic = read_bytes + write_bytes if holds_product else 0
    return Cost(work, depth, flop, read_bytes, write_bytes, traffic, 1)


def elementwise(num_numbers: Number, operations: Number, depth: Number, b: Number, num_inputs: Number = 1) -> Cost:
    """`operations` per number, in a chain of `depth`; num_inputs arrays of that size are read, one written."""
    return operator(operations * num_numbers, depth, 0, b * num_inputs * num_numbers, b * num_numbers)


def linear(n: Number, a: Number, c: Number, b: Number, *, has_bias: bool = False) -> Cost:
    """y = x A (+ bias): 2 n a c; depth 1 + log a."""
    bias = n * c if has_bias else 0
    depth = 1 + tree_depth(a) + (1 if has_bias else 0)
    return operator(2 * n * a * c + bias, depth, 2 * n * a * c, b * (n * a + a * c), b * n * c)


def linear_input_gradient(n: Number, a: Number, c: Number, b: Number) -> Cost:
    """dx = dy A^T: 2 n a c; depth 1 + log c."""
    return operator(2 * n * a * c, 1 + tree_depth(c), 2 * n * a * c, b * (n * c + a * c), b * n * a)


def linear_weight_gradient(
    n: Number, a: Number, c: Number, b: Number, *, gradient_b: Number | None = None, has_bias: bool = False
) -> Cost:
    """dA = x^T dy: 2 n a c; depth 1 + log n, it adds over tokens. gradient_b: bytes of a gradient, b if None."""
    size = b if gradient_b is None else gradient_b
    bias = n * c if has_bias else 0
    return operator(2 * n * a * c + bias, 1 + tree_depth(n), 2 * n * a * c, b * n * (a + c), size * a * c)


def rms_norm(n: Number, d: Number, b: Number) -> Cost:
    """x / sqrt(mean(x^2) + eps) x weight: 4 n d + 3 n; depth log d + 6 (square, mean, eps, rsqrt, two products)."""
    return operator(4 * n * d + 3 * n, tree_depth(d) + 6, 0, b * n * d, b * n * d)


def rms_norm_backward(n: Number, d: Number, b: Number) -> Cost:
    """dx = r (g - xhat mean(g xhat)), g = w dy: 9 n d + 3 n; depth log d + 7. For the weight 2 n d, off the path."""
    return operator(11 * n * d + 3 * n, tree_depth(d) + 7, 0, 2 * b * n * d, b * n * d)


def layer_norm(n: Number, d: Number, b: Number) -> Cost:
    """(x - mean) / sqrt(variance + eps) x weight + bias: 7 n d + 4 n; depth 2 log d + 8."""
    return operator(7 * n * d + 4 * n, 2 * tree_depth(d) + 8, 0, b * n * d, b * n * d)


def layer_norm_backward(n: Number, d: Number, b: Number) -> Cost:
    """As RMSNorm with one more mean, taken beside the first: 11 n d + 3 n; depth log d + 6."""
    return operator(11 * n * d + 3 * n, tree_depth(d) + 6, 0, 2 * b * n * d, b * n * d)


def softmax(n: Number, x: Number, b: Number) -> Cost:
    """n rows of x: maximum, difference, exp, sum, quotient: 5 n x; depth 2 log x + 3."""
    return operator(5 * n * x, 2 * tree_depth(x) + 3, 0, b * n * x, b * n * x)


def softmax_backward(n: Number, x: Number, b: Number) -> Cost:
    """y (dy - sum(y dy)): 4 n x; depth log x + 3."""
    return operator(4 * n * x, tree_depth(x) + 3, 0, 2 * b * n * x, b * n * x)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention core depends on.

    pairs: (query, key) pairs that are computed, of one head, over all sequences: `plait.cost.tokens` counts them.
    num_queries, num_keys: tokens whose queries are read and whose keys and values are read. longest: most keys that
    one query sees. num_heads: N. score_size, value_size: numbers of a head in queries and in its output.
    key_width: numbers of one token's keys and values together.
    """

    pairs: Number
    num_queries: Number
    num_keys: Number
    longest: Number
    num_heads: Number
    score_size: Number
    value_size: Number
    key_width: Number


def attention_core(shape: AttentionShape, b: Number, implementation: Implementation = "fused") -> Cost:
    """Scores, scaling, mask, softmax, weighted sum: N pairs (2 e + 2 e_v + 7); depth log e + 3 log x + 7.

    Products: 2 N (e + e_v) pairs, that is 4 N H per query and key with equal sizes. Grouping of heads changes bytes,
    not work.
    """
    per_head = shape.num_heads * shape.pairs
    flop = 2 * per_head * (shape.score_size + shape.value_size)
    depth = tree_depth(shape.score_size) + 3 * tree_depth(shape.longest) + 7
    read = b * (shape.num_queries * shape.num_heads * shape.score_size + shape.num_keys * shape.key_width)
    write = b * shape.num_queries * shape.num_heads * shape.value_size
    if implementation == "eager":
        # Scores are written, scaled, masked, normalised in fp32, cast where b is smaller, and read by the product.
        read, write = read + per_head * (3 * b + 4 + b), write + per_head * (3 * b + 4 + b)
    return operator(flop + 7 * per_head, depth, flop, read, write)


def attention_core_backward(shape: AttentionShape, b: Number, implementation: Implementation = "fused") -> Cost:
    """Four products, twice the forward's; the fused one makes the scores again: five (2.5 times).

    Depth: dP = dO V^T (1 + log e_v), softmax backward (log x + 3), scale, then dQ and dK beside each other (1 + log x);
    dK adds over the queries that see a key, of which there are as many as keys that a query sees.
    Source: benchmark convention of github.com/Dao-AILab/flash-attention.
    """
    per_head = shape.num_heads * shape.pairs
    flop = 4 * per_head * (shape.score_size + shape.value_size)
    work = flop + 5 * per_head
    depth = tree_depth(shape.value_size) + 2 * tree_depth(shape.longest) + 6
    queries = shape.num_queries * shape.num_heads * (shape.score_size + shape.value_size)
    read, write = b * (2 * queries + shape.num_keys * shape.key_width), b * (queries + shape.num_keys * shape.key_width)
    if implementation == "eager":
        read, write = read + per_head * (5 * b + 4), write + per_head * (3 * b + 4)
    else:
        again = 2 * per_head * shape.score_size
        flop, work, depth = flop + again, work + again + 7 * per_head, depth + tree_depth(shape.score_size) + 5
    return operator(work, depth, flop, read, write)


def rope(n: Number, width: Number, b: Number) -> Cost:
    """q cos + rotate_half(q) sin over `width` numbers per token: 3.5 each; depth 3 (sign, product, sum)."""
    return elementwise(n * width, 3.5, 3, b)


def rope_backward(n: Number, width: Number, b: Number) -> Cost:
    """The opposite rotation, its halves added up: 4.5 each; depth 4."""
    return elementwise(n * width, 4.5, 4, b)


def gated_activation(n: Number, f: Number, b: Number) -> Cost:
    """silu(gate) up: 2 n f; depth 2."""
    return elementwise(n * f, 2, 2, b, num_inputs=2)


def gated_activation_backward(n: Number, f: Number, b: Number) -> Cost:
    """d up = dy silu(gate); d gate = dy up silu'(gate): 3 n f; depth 2. Reads dy, gate and up, writes two."""
    return operator(3 * n * f, 2, 0, 3 * b * n * f, 2 * b * n * f)


def activation(n: Number, f: Number, b: Number) -> Cost:
    """gelu: n f; depth 1."""
    return elementwise(n * f, 1, 1, b)


def activation_backward(n: Number, f: Number, b: Number) -> Cost:
    """dy gelu'(x): n f; depth 1."""
    return elementwise(n * f, 1, 1, b, num_inputs=2)


def residual(n: Number, d: Number, b: Number) -> Cost:
    """x + y: n d; depth 1."""
    return elementwise(n * d, 1, 1, b, num_inputs=2)


def embedding(n: Number, d: Number, b: Number) -> Cost:
    """One row per token: bytes only."""
    return operator(0, 0, 0, b * n * d, b * n * d)


def embedding_backward(n: Number, d: Number, b: Number) -> Cost:
    """Adds each token's gradient to its row: n d; depth log n, for a token that fills the batch."""
    return operator(n * d, tree_depth(n), 0, 2 * b * n * d, b * n * d)


def routing(n: Number, num_experts: Number, num_chosen: Number, b: Number) -> Cost:
    """After the router's product: softmax, the best K of E, weights that sum to 1: n (6 E + 2 K).

    Depth 3 log E + log K + 4: the K best are found by a tournament.
    """
    chosen = operator(
        n * (num_experts + 2 * num_chosen),
        tree_depth(num_experts) + tree_depth(num_chosen) + 1,
        0,
        b * n * num_experts,
        b * n * num_chosen,
    )
    return softmax(n, num_experts, b) + chosen


def expert_combination(n: Number, d: Number, num_chosen: Number, b: Number) -> Cost:
    """Weighted sum of K outputs per token: 2 n K d; depth 1 + log K."""
    return operator(2 * n * num_chosen * d, 1 + tree_depth(num_chosen), 0, b * n * num_chosen * d, b * n * d)


def expected_experts(num_tokens: Number, num_experts: Number, num_chosen: Number) -> Number:
    """Experts that at least one of the tokens chooses, if all are equally likely: E (1 - (1 - K/E)^n)."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def log_softmax(n: Number, v: Number, b: Number) -> Cost:
    """Log-probabilities of n rows of logits: maximum, difference, exp, sum, log, difference: 5 n V + n; 2 log V + 4."""
    return operator(5 * n * v + n, 2 * tree_depth(v) + 4, 0, b * n * v, 4 * n * v)


def log_softmax_backward(n: Number, v: Number, b: Number) -> Cost:
    """dy - softmax sum(dy) for one chosen entry per row: 3 n V; depth 3, since the sum has one term."""
    return operator(3 * n * v, 3, 0, 4 * n * v, b * n * v)


def policy_loss(n: Number) -> Cost:
    """Clipped ratio of n tokens and their sum: about 12 n; depth log n + 6 (difference, exp, two products, minimum)."""
    return operator(12 * n, tree_depth(n) + 6, 0, 20 * n, 4 * n)


def adam(num_parameters: Number, bytes_per_parameter: Number = 28) -> Cost:
    """AdamW: 15 operations per parameter (3 + 4 moments, 2 corrections, 3 root and quotient, 2 step, 1 decay); depth 9.

    bytes_per_parameter: read parameter, gradient and two moments, write all but the gradient: 28 in fp32.
    """
    n = num_parameters
    return operator(15 * n, 9, 0, bytes_per_parameter * n * 4 / 7, bytes_per_parameter * n * 3 / 7)


def clip(num_parameters: Number, gradient_b: Number = 4) -> Cost:
    """Norm of all gradients and scaling: 3 N; depth log N + 5 (square, root, quotient, minimum, product)."""
    n = num_parameters
    return operator(3 * n, tree_depth(n) + 5, 0, 2 * gradient_b * n, gradient_b * n)


def sampling(n: Number, v: Number, b: Number, *, sorts: bool = False) -> Cost:
    """One token for each of n rows: temperature, softmax, running sum, search: 8 n V; depth 5 log V + 4.

    The running sum is a work-efficient scan (2 V, 2 log V). sorts: top-p sorts first by a bitonic network:
    V log V (log V + 1) / 4 comparisons, log V (log V + 1) / 2 deep.
    """
    tree = tree_depth(v)
    draw = operator(8 * n * v, 5 * tree + 4, 0, 3 * b * n * v, 2 * b * n * v)
    if not sorts:
        return draw
    rounds = tree * (tree + 1) / 2
    return operator(n * v * rounds / 2, rounds, 0, b * n * v, b * n * v) + draw


def gae(num_sequences: Number, length: Number, *, is_scan: bool = True) -> Cost:
    """A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t: 3 per delta.

    As a scan of linear maps (3 operations, 2 deep, 2 T of them in 2 log T levels): 9 T; depth 3 + 4 log T. One after
    the other: 5 T; depth 3 + 2 T. Source of the recurrence: Schulman 2016, eq. 16.
    """
    steps, depth = (9, 3 + 4 * tree_depth(length)) if is_scan else (5, 3 + 2 * length)
    numbers = num_sequences * length
    return operator(steps * numbers, depth, 0, 8 * numbers, 4 * numbers)


def group_statistics(num_groups: Number, group_size: Number) -> Cost:
    """(r - mean) / (std + eps) in groups of G: 5 G + 4 per group; depth 2 log G + 7."""
    rewards = num_groups * group_size
    return operator(5 * rewards + 4 * num_groups, 2 * tree_depth(group_size) + 7, 0, 4 * rewards, 4 * rewards)
