"""A whole layout in one word: its short spelling and, after colons, its settings: "fsdp8tp4:sp:full". Torch-free.

Words: sp; selective, full (recompute); zero0 ... zero3; a pipeline schedule by its name; v3 (three stages per rank);
ulysses, ring; offload_optimizer, offload_all.
"""

import re
from typing import Any, get_args

from plait.parallel.degrees import ContextKind, Layout, Offload, PipelineSchedule, Recompute, parse_degrees

_CHOICES: dict[str, tuple[str, Any]] = {
    "sp": ("sp", True),
    **{f"zero{stage}": ("zero", stage) for stage in range(4)},
    **{word: ("recompute", word) for word in get_args(Recompute) if word != "none"},
    **{word: ("pp_schedule", word) for word in get_args(PipelineSchedule)},
    **{word: ("cp_kind", word) for word in get_args(ContextKind)},
    **{f"offload_{word}": ("offload", word) for word in get_args(Offload) if word != "none"},
}


def parse_layout_words(text: str) -> dict[str, Any]:
    """The fields of a layout, not yet checked against each other. Raises ValueError."""
    degrees, *words = text.strip().split(":")
    found: dict[str, Any] = dict(parse_degrees(degrees))
    for word in words:
        stages = re.fullmatch(r"v(\d+)", word)
        if stages is None and word not in _CHOICES:
            raise ValueError(f'cannot read "{word}" in layout "{text}": expected {", ".join(_CHOICES)} or v2')
        name, value = ("num_virtual", int(stages[1])) if stages is not None else _CHOICES[word]
        if name in found:
            raise ValueError(f'layout "{text}" says {name} twice')
        found[name] = value
    return found


def layout_words(layout: Layout) -> str:
    """The spelling that `parse_layout_words` reads; "1 device" has no degrees and is spelled "dp1"."""
    settings = layout.settings()
    words = [word for word, (name, value) in _CHOICES.items() if name in settings and settings[name] == value]
    words += [f"v{settings['num_virtual']}"] if "num_virtual" in settings else []
    return ":".join([str(layout) or "dp1", *words])
