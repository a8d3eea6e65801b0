"""A ReplayResult as a person reads it."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.jobs.replay import Regeneration, ReplayResult
from plait.telemetry.progress import printable


def render(result: ReplayResult) -> RenderableType:
    """The table of axes, the verdict, what generating again gave, and notes. Tokens are shown as text, never markup."""
    table = Table("scored", "how", "mean difference", "largest", "at token", title_justify="left")
    table.title = Text(
        f"{result.sample_id}: {result.num_tokens} tokens of step {result.step}, policy version "
        f"{result.policy_version} ({result.weights})"
    )
    for column in table.columns[2:4]:
        column.justify = "right"
    for row in result.scored:
        place = f"{row.worst_token} {_shown(row.worst_text)}"
        table.add_row(*map(Text, (row.axis, row.how, f"{row.mean:.2e}", f"{row.largest:.2e}", place)))
    lines = [result.verdict, _again(result.regeneration), *result.left_out, *result.notes]
    return Group(table, *(Text(line) for line in lines))


def _shown(token: str) -> str:
    return f'"{printable(token, "utf-8")}"'


def _again(regeneration: Regeneration) -> str:
    if regeneration.first_difference is None:
        return f"Generated again alone: the same tokens. {regeneration.reason}."
    how = "which is no surprise" if regeneration.is_expected else "which is a surprise"
    return (
        f"Generated again alone: other tokens from index {regeneration.first_difference} on, "
        f"{_shown(regeneration.again)} where {_shown(regeneration.stored)} was stored, {how}. {regeneration.reason}."
    )
