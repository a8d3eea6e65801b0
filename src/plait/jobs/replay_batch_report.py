"""A BatchReplay as a person reads it."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.jobs.replay_batch import BatchReplay

_NUM_SAMPLES = 5


def render(result: BatchReplay) -> RenderableType:
    """The update in both dtypes, the samples that pull most, the verdict, and notes."""
    table = Table("dtype", "loss", "gradient norm", "not finite", "begins with", title_justify="left")
    table.title = Text(
        f"Step {result.step}, update {result.update} of {result.num_updates}: batch {result.batch}; weights before the "
        f"step: {result.weights}"
    )
    for run in result.runs:
        found = f"{run.num_nonfinite} of {len(run.samples)} samples"
        first = "-" if run.first is None else str(run.first)
        table.add_row(*map(Text, (run.dtype, f"{sum(run.losses):.4g}", f"{run.grad_norm:.4g}", found, first)))
    run = result.runs[0]
    samples = Table("sample", "tokens", "advantage", "gradient norm alone", "begins with", title_justify="left")
    samples.title = Text(f"Samples that pull most, in {run.dtype} ({min(_NUM_SAMPLES, len(run.samples))} of them)")
    for sample in run.samples[:_NUM_SAMPLES]:
        first = "-" if sample.first is None else str(sample.first)
        advantage = "-" if sample.advantage is None else f"{sample.advantage:.4g}"
        cells = (sample.sample_id, str(sample.num_tokens), advantage, f"{sample.grad_norm:.4g}", first)
        samples.add_row(*map(Text, cells))
    norms = ", ".join(f"{float(norm):.4g}" for norm in result.recorded) or "not noted: the run ended with this update"
    lines = [result.verdict, f"Gradient norms that the run had noted: {norms}.", *result.notes]
    return Group(table, samples, *(Text(line) for line in lines))
