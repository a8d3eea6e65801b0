"""A table of the documentation: rows of text, with one sentence that says what it teaches. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.cost.document.symbols import show


@dataclass(frozen=True, slots=True)
class Table:
    """intro: what the rows are, and the numbers of the example. insight: one sentence."""

    title: str
    intro: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    insight: str

    def markdown(self) -> str:
        """Title, introduction, rows, insight."""
        assert all(len(row) == len(self.header) for row in self.rows), self.title
        lines = [f"### {self.title}", "", self.intro, ""]
        lines += [_line(self.header), _line(["---"] * len(self.header)), *(_line(row) for row in self.rows)]
        return "\n".join([*lines, "", f"**Insight.** {self.insight}", ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def formula(value: Any) -> str:
    """An expression as a cell; zero as a dash."""
    text = show(value)
    return "-" if text == "0" else f"`{text}`"
