"""`plait explain --symbolic`: the formulas of the asked plan's stages, by the code that estimates, on symbols."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy

from plait.cost.document.stage_formulas import STAGES, symbolic_stage_table
from plait.cost.document.symbols import NAMES, show, symbolic_spec
from plait.cost.setting import costed_as
from plait.jobs.explain_request import Request, read_request
from plait.parallel.layout_words import layout_words

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Formula:
    """what: a stage, with its layout. quantity: with its unit. expression: as the code computes it."""

    what: str
    quantity: str
    expression: Any


@dataclass(frozen=True, slots=True)
class Formulas:
    """Of every stage that has formulas, for a model's kind of decoder. notes: what they leave out."""

    model: str
    formulas: tuple[Formula, ...]
    notes: tuple[str, ...]

    @property
    def legend(self) -> str:
        """The letters that occur."""
        used = {str(s) for f in self.formulas for s in sympy.sympify(f.expression).free_symbols}
        return "; ".join(f"{name} {meaning}" for name, meaning in NAMES.items() if name in used) + "; lg ceil(log2)"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = [{"what": f.what, "quantity": f.quantity, "expression": show(f.expression)} for f in self.formulas]
        return {"model": self.model, "legend": self.legend, "formulas": rows, "notes": list(self.notes)}

    def render(self) -> "RenderableType":
        """One block per stage."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"Formulas for decoders like {self.model}"), Text(self.legend, style="dim")]
        for what in dict.fromkeys(formula.what for formula in self.formulas):
            lines.append(Text(f"\n{what}", style="bold"))
            lines += [Text(f"  {f.quantity} = {show(f.expression)}") for f in self.formulas if f.what == what]
        return Group(*lines, Text(""), *(Text(note, style="dim") for note in self.notes))


def formulas(request: Request) -> Formulas:
    """Of the request's stages under its layouts, with the structure of its model. Raises ConfigError."""
    asked = read_request(request)
    setting, model = asked.setting, asked.setting.models["policy"]
    spec = symbolic_spec(model)
    found: list[Formula] = []
    for stage in asked.graph.stages:
        name = costed_as(stage)
        if name not in STAGES:
            continue
        layout = setting.layout_of("generate" if name == "sync_weights" else name)
        words = "" if stage.kind == "host" else layout_words(layout)
        what = f"{stage.name} ({words})" if words else stage.name
        found += [Formula(what, quantity, value) for quantity, value in symbolic_stage_table(name, layout, spec)]
    notes = ["every degree above 1 has its letter; tables of all strategies: docs/parallelism.md"]
    if model.experts is not None:
        notes.append("all layers are taken as sparse, and experts as not spread (ep 1)")
    return Formulas(model.name, tuple(found), tuple(notes))
