"""The few operations beyond + - * / that the cost formulas need, for floats, numpy arrays and sympy symbols alike.

A formula that uses only these and ordinary arithmetic gives a number for numbers, an array over many plans for arrays,
and an expression to print for symbols. sympy is never imported here: a symbol brings it along.
"""

import math
import sys
from typing import Any

import numpy as np

Number = Any
"""A float, an int, a numpy array or a sympy expression."""


def _is_symbolic(*values: Number) -> bool:
    # A symbol can only exist once sympy is imported.
    return "sympy" in sys.modules and any(isinstance(value, sys.modules["sympy"].Basic) for value in values)


def _is_array(*values: Number) -> bool:
    return any(isinstance(value, np.ndarray | np.generic) for value in values)


def maximum(a: Number, b: Number) -> Number:
    """max(a, b), element by element for arrays."""
    if _is_symbolic(a, b):
        return sys.modules["sympy"].Max(a, b)
    return np.maximum(a, b) if _is_array(a, b) else max(a, b)


def minimum(a: Number, b: Number) -> Number:
    """min(a, b), element by element for arrays."""
    if _is_symbolic(a, b):
        return sys.modules["sympy"].Min(a, b)
    return np.minimum(a, b) if _is_array(a, b) else min(a, b)


def ceil(x: Number) -> Number:
    """The least whole number that is not below x."""
    if _is_symbolic(x):
        return sys.modules["sympy"].ceiling(x)
    return np.ceil(x) if _is_array(x) else math.ceil(x)


def floor(x: Number) -> Number:
    """The greatest whole number that is not above x."""
    if _is_symbolic(x):
        return sys.modules["sympy"].floor(x)
    return np.floor(x) if _is_array(x) else math.floor(x)


def log2(x: Number) -> Number:
    """The logarithm to base 2."""
    if _is_symbolic(x):
        return sys.modules["sympy"].log(x, 2)
    return np.log2(x) if _is_array(x) else math.log2(x)


def tree_depth(n: Number) -> Number:
    """Depth of a reduction over n numbers by a binary tree: ceil(log2 n); 0 for one number."""
    return ceil(log2(maximum(n, 1)))


def where(condition: Number, a: Number, b: Number) -> Number:
    """a where the condition holds, else b."""
    if _is_symbolic(condition, a, b):
        return sys.modules["sympy"].Piecewise((a, condition), (b, True))
    return np.where(condition, a, b) if _is_array(condition, a, b) else (a if condition else b)
