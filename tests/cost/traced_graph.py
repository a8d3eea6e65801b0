"""Longest path and number of operations of what torch really runs, by watching every operator it dispatches.

Each tensor carries the depth of its storage; an operator's results are as deep as its deepest input and the operator's
own steps. All tensors are kept alive, so no storage is used twice. Independent of the formulas under test: the steps
here are those of aten's operators, one by one.
"""

from math import ceil, log2

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOVES = (
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "clone", "copy_", "_to_copy", "detach", "alias", "cat", "stack", "split", "split_with_sizes", "embedding", "index",
    "gather", "scatter_", "scatter", "arange", "empty", "empty_like", "new_empty", "new_empty_strided", "zeros",
    "zeros_like", "ones_like", "full", "fill_", "zero_", "slice_backward", "select_backward", "as_strided",
    "lift_fresh", "nonzero", "_local_scalar_dense", "new_zeros", "new_ones", "scalar_tensor", "one_hot",
    "index_put", "index_put_",
    "_index_put_impl_", "unbind", "ones", "full_like", "is_same_size", "contiguous", "empty_strided", "bernoulli_",
    "scatter_add", "aminmax", "index_select", "_unsafe_index", "diff", "where",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit",
)  # fmt: skip
COMPARISONS = (
    "eq",
    "ne",
    "ge",
    "gt",
    "le",
    "lt",
    "logical_and",
    "logical_and_",
    "logical_or",
    "bitwise_and",
    "bitwise_not",
    "all",
    "any",
)
ELEMENTWISE = (
    "add", "add_", "sub", "rsub", "mul", "mul_", "div", "div_", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "silu",
    "silu_backward", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "cos", "sin",
    "masked_fill", "masked_fill_", "clamp", "reciprocal", "clamp_min", "clamp_max", "maximum", "minimum",
)  # fmt: skip


def tree(n):
    """Depth of a binary tree over n numbers."""
    return ceil(log2(n)) if n > 1 else 0


class Trace(TorchDispatchMode):
    """depth: the longest path so far. work: operations so far. flop: those in matrix products."""

    def __init__(self, combined=1):
        super().__init__()
        self.depths, self.kept = {}, []
        self.depth = self.work = self.flop = 0
        self.combined = combined

    def depth_of(self, tensor):
        return self.depths.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Before it runs: an operator in place changes its own input.
        start = max((self.depth_of(tensor) for tensor in inputs), default=0)
        result = function(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = function._schema.name.removeprefix("aten::")
        steps, work, flop = self.price(name, args, outputs)
        if name == "index_add_":
            # Adding rows one after the other is a reduction over the experts of a token: a tree, not a chain.
            start, steps = max(self.depth_of(args[0]) - steps, self.depth_of(args[3])), steps
        for tensor in outputs:
            self.kept.append(tensor)
            key = tensor.untyped_storage()._cdata
            self.depths[key] = max(self.depths.get(key, 0), start + steps)
            if tensor.is_floating_point():
                self.depth = max(self.depth, self.depths[key])
        self.kept += inputs
        self.work += work
        self.flop += flop
        return result

    def price(self, name, args, outputs):
        """(steps, operations, those in products) of one call."""
        size = outputs[0].numel() if outputs else 0
        if name in MOVES or name in COMPARISONS:
            return 0, 0, 0
        if name in ("mm", "bmm"):
            flop = 2 * size * args[0].shape[-1]
            return 1 + tree(args[0].shape[-1]), flop, flop
        if name == "addmm":
            flop = 2 * size * args[1].shape[-1]
            return 2 + tree(args[1].shape[-1]), flop + size, flop
        if name in ("_softmax", "_log_softmax"):
            x = args[0].shape[args[1]]
            return 2 * tree(x) + (3 if name == "_softmax" else 4), 5 * size, 0
        if name == "_softmax_backward_data":
            return tree(args[0].shape[-1]) + 3, 4 * size, 0
        if name == "cumsum":  # a work-efficient scan, up a tree and down again
            n = args[0].shape[args[1]]
            return 2 * tree(n), 2 * args[0].numel(), 0
        if name in ("sum", "mean", "amax", "max"):
            n = args[0].numel() // max(1, size)
            is_mean = name == "mean"
            return tree(n) + is_mean, args[0].numel() + size * is_mean, 0
        if name == "topk":
            return tree(args[0].shape[-1]), args[0].numel(), 0
        if name == "index_add_":
            return tree(self.combined), args[3].numel(), 0
        if name == "native_layer_norm":
            d = args[1][0]
            return 2 * tree(d) + 8, 7 * size, 0
        if name == "native_layer_norm_backward":
            return tree(args[2][0]) + 6, 11 * size, 0
        if name == "embedding_dense_backward":
            return tree(args[0].numel() // args[0].shape[-1]), args[0].numel(), 0
        if name == "_log_softmax_backward_data":
            return tree(args[0].shape[-1]) + 3, 4 * size, 0
        if name == "linalg_vector_norm":
            return tree(args[0].numel()) + 2, 2 * args[0].numel(), 0
        if name in ("lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_"):
            return 3, 3 * size, 0
        assert name in ELEMENTWISE, f"no price for {name}"
        return 1, size, 0
