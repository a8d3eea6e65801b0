"""Settings that a person wrote and that nothing would read."""

from collections.abc import Iterator

from plait.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from plait.errors import Violation
from plait.rules.batch import counts


def kl(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if "kl_estimator" in algorithm.model_fields_set and algorithm.kl_coefficient == 0:
        yield Violation(
            "algorithm.kl_estimator",
            "it changes nothing while algorithm.kl_coefficient is 0",
            "Take it out (--set algorithm.kl_estimator=null), or set kl_coefficient above 0 (0.001 is usual)",
        )


def advantage_scale(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    for name in ("eps", "std_correction"):
        if name in algorithm.model_fields_set and algorithm.scale == "none":
            yield Violation(
                f"algorithm.{name}",
                'it changes nothing while algorithm.scale is "none": no standard deviation is taken',
                'Take it out, or set scale to "group_std" or "batch_std"',
            )


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


def dynamic_sampling(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    dynamic = algorithm.dynamic_sampling
    written = sorted(dynamic.model_fields_set - {"enabled"})
    if not dynamic.enabled and written:
        yield Violation(
            "algorithm.dynamic_sampling",
            f"{', '.join(written)} change nothing while enabled is false",
            "Set enabled = true, or take them out",
        )


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
