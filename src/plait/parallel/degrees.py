"""The one place where parallel degrees are spelled, multiplied and validated. Torch-free."""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

_FIELDS = {"dp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
Recompute = Literal["none", "full"]
_TOKEN = re.compile(r"(fsdp|dp|tp|pp|cp|ep)(\d+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one model is split: world size = pp x dp_replicate x dp_shard x cp x tp; ep never multiplies it.

    recompute: which activations the backward pass computes again instead of keeping them.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in _FIELDS.values():
            if getattr(self, name) < 1:
                raise ValueError(f"degree {name} is {getattr(self, name)}, expected at least 1")
        spread = self.dp_shard * self.cp * self.tp
        if spread % self.ep or (self.ep % self.tp and self.ep != 1):
            raise ValueError(
                f"ep {self.ep} must divide dp_shard x cp x tp = {spread} and be a multiple of tp {self.tp}"
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the short spelling, for example "fsdp4tp2pp2ep4"; "" is one device. Raises ValueError."""
        degrees: dict[str, Any] = {}
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(
                    f'cannot read layout "{text}" at "{text[position:]}": '
                    "expected dp, fsdp, tp, pp, cp or ep and a number"
                )
            axis, degree = _FIELDS[match[1]], int(match[2])
            if axis in degrees:
                raise ValueError(f'layout "{text}" names {match[1]} twice')
            degrees[axis] = degree
            position = match.end()
        return cls(**degrees)

    def with_recompute(self, recompute: Recompute) -> "Layout":
        return replace(self, recompute=recompute)

    def __str__(self) -> str:
        return "".join(f"{short}{getattr(self, name)}" for short, name in _FIELDS.items() if getattr(self, name) > 1)
