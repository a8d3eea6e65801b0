"""Settings that a person wrote and that nothing would read."""

from collections.abc import Iterator

from plait.config import BatchConfig, CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainConfig
from plait.errors import Violation
from plait.rules.batch import counts


def learning_rate_schedule(optimizer: OptimizerConfig) -> Iterator[Violation]:
    if "final_share" in optimizer.model_fields_set and optimizer.schedule == "constant":
        yield Violation(
            "optimizer.final_share",
            'it changes nothing while optimizer.schedule is "constant"',
            'Take it out, or set schedule to "linear" or "cosine"',
        )


def sgd(optimizer: OptimizerConfig) -> Iterator[Violation]:
    if optimizer.name == "sgd" and "eps" in optimizer.model_fields_set:
        yield Violation("optimizer.eps", "SGD has no eps, so it changes nothing", "Take it out")


def never_reached(
    train: TrainConfig, evaluation: EvaluationConfig, checkpoint: CheckpointConfig
) -> Iterator[Violation]:
    for name, section in (("evaluation", evaluation), ("checkpoint", checkpoint)):
        # A default that a short run never reaches was not asked for.
        if "every_steps" in section.model_fields_set and section.every_steps > train.num_steps:
            rule = f"every {section.every_steps} steps is never reached in a run of {train.num_steps} steps"
            yield Violation(f"{name}.every_steps", rule, f"Set it to {train.num_steps} or less, or to 0")


def warmup_takes_all(optimizer: OptimizerConfig, batch: BatchConfig, train: TrainConfig) -> Iterator[Violation]:
    updates = train.num_steps * counts(batch).num_updates_per_step
    if optimizer.warmup_share > 0 and optimizer.num_warmup_updates(updates) >= updates:
        yield Violation(
            "optimizer.warmup_share",
            f"all {updates} updates of the run are warm-up ({optimizer.warmup_share:g} of them, rounded up)",
            "Lower it, or make the run longer",
        )
