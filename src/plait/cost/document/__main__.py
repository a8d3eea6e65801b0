"""Writes docs/parallelism.md: `python -m plait.cost.document [file]`. Torch-free."""

import sys
from pathlib import Path

from plait.cost.document import layout_tables, model_tables, step_tables
from plait.cost.document.symbols import NAMES

HEAD = """# Parallelism: what splitting costs

Generated from the cost formulas by `make docs`; do not edit. The same functions give the numbers of `plait explain`.

**Work** W is the number of operations over all processors, **depth** D the longest chain of them that depend on each
other, with unbounded processors (a reduction over n numbers is ceil(log2 n) deep, printed `lg(n)`). On p processors
max(W / p, D) <= T <= W / p + D (Brent). **Rounds** R of communication that wait for each other are kept apart from
depth, as are bytes. One multiply or add is one operation. The taxonomy and the form of the tables follow Besta et al.,
"Performance Foundations of Parallel & Distributed Reasoning Language Models" (arXiv 2608.27046); constants here are
counted (norms, softmax, grouped heads, gated activations), and tests compare them with what torch runs.

## Taxonomy

```
one model (intra-model)                        the whole step (inter-model)
  tokens and sequences                           model structure
    data       dp, ZeRO 1-3 (fsdp)                 independent critic | shared trunk | critic-free
    sequence   sp   (between tp regions)         placement
    context    cp   (ring, Ulysses)                colocated | hybrid | partly colocated | disaggregated
  width                                          fusion
    tensor     tp                                  sample, group, minibatch streams | interleaved pipelines
    experts    ep   (inside dp x cp x tp)        schedule
  depth                                            sync | one step off-policy | fully async (max_staleness)
    pipeline   pp   (gpipe ... dual_pipe_v)
```

## Letters

"""

NOTES = """## Where this differs from the paper

- Depth under tensor parallelism is that of one device: what a local reduction loses, the all-reduce behind it adds; the
  paper's gain of log P_t^2 leaves the all-reduce out. Rounds are a column of their own.
- Stage fusion: the paper writes max(D_G, D_A) for fused generation and assessment. That is what streaming tends to in
  time, with many small pieces; as a chain the last sample still passes both.
- Its first decode equation has (S + t) d per layer, its closed form 2 (S + t) d; the latter is counted here.
- Vocabulary terms are divided by tp on the edge ranks of a pipeline, not by pp.
- Publishing weights takes time (t_syn), which its asynchronous recurrence leaves out.
"""


def document() -> str:
    """The whole page."""
    letters = "\n".join(f"- `{name}`: {meaning}" for name, meaning in NAMES.items())
    tables = [
        "## One model on one device\n",
        model_tables.operator_table().markdown(),
        model_tables.layer_table().markdown(),
        model_tables.model_table().markdown(),
        "## Stages\n",
        layout_tables.stage_table().markdown(),
        "## One model on several devices\n",
        layout_tables.collective_table().markdown(),
        layout_tables.pipeline_table().markdown(),
        layout_tables.strategy_table().markdown(),
        "## The whole step\n",
        step_tables.step_table().markdown(),
        step_tables.memory_table().markdown(),
        step_tables.schedule_table().markdown(),
    ]
    return f"{HEAD}{letters}\n\n" + "\n".join(tables) + "\n" + NOTES


def main() -> None:
    """Write the page to the file named, or to docs/parallelism.md."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/parallelism.md")
    path.write_text(document(), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
