"""The few functions beyond + - * / that cost formulas need, for floats, numpy arrays and sympy symbols alike.

Use as `from plait.cost import arithmetic as am` and `am.max(a, b)`. Torch-free; sympy is loaded only when it is given
symbols.
"""

import math
from typing import Any

import numpy as np


def _is_symbolic(*values: Any) -> bool:
    return any(type(value).__module__.partition(".")[0] == "sympy" for value in values)


def _is_array(*values: Any) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)


def max(a: Any, b: Any) -> Any:
    """The larger of two, element by element."""
    if _is_symbolic(a, b):
        import sympy

        return sympy.Max(a, b)
    return np.maximum(a, b) if _is_array(a, b) else where(a >= b, a, b)


def min(a: Any, b: Any) -> Any:
    """The smaller of two, element by element."""
    if _is_symbolic(a, b):
        import sympy

        return sympy.Min(a, b)
    return np.minimum(a, b) if _is_array(a, b) else where(a <= b, a, b)


def ceil(a: Any) -> Any:
    """The least whole number not below a."""
    if _is_symbolic(a):
        import sympy

        return sympy.ceiling(a)
    return np.ceil(a) if _is_array(a) else math.ceil(a)


def floor(a: Any) -> Any:
    """The greatest whole number not above a."""
    if _is_symbolic(a):
        import sympy

        return sympy.floor(a)
    return np.floor(a) if _is_array(a) else math.floor(a)


def log2(a: Any) -> Any:
    """Logarithm to base 2."""
    if _is_symbolic(a):
        import sympy

        return sympy.log(a, 2)
    return np.log2(a) if _is_array(a) else math.log2(a)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; both are computed."""
    if _is_symbolic(condition, a, b):
        import sympy

        return sympy.Piecewise((a, condition), (b, True))
    if _is_array(condition, a, b):
        return np.where(condition, a, b)
    return a if condition else b
