"""Plait: reinforcement learning from verifiable rewards for reasoning language models.

The functions here are the public interface; each imports what it needs when it is called, so that
`import plait` is cheap.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.jobs.machine import forget_compiled_products, share_the_cores

if TYPE_CHECKING:
    from plait.batch import Sample
    from plait.config import RunConfig, SftConfig
    from plait.jobs.check import CheckReport
    from plait.jobs.evaluate import EvaluationResult
    from plait.jobs.sft import SftResult
    from plait.jobs.train import TrainResult

share_the_cores()
forget_compiled_products()

__all__ = ["__version__", "check", "evaluate", "load_recipe", "load_sft_recipe", "sample", "sft", "train"]


def __getattr__(name: str) -> Any:
    # Reading the version off the installed package takes 20 ms, which only those pay who ask.
    if name == "__version__":
        from importlib.metadata import version

        return version("plait")
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def load_recipe(name_or_path: str, *overrides: str) -> "RunConfig":
    """A checked configuration from a packaged recipe or a TOML file; overrides as "train.num_steps=20".

    Raises plait.errors.ConfigError with everything that is wrong.
    """
    from plait.recipe import load_run_config

    return load_run_config(name_or_path, overrides)


def load_sft_recipe(name_or_path: str, *overrides: str) -> "SftConfig":
    """The same for supervised training."""
    from plait.recipe import load_sft_config

    return load_sft_config(name_or_path, overrides)


def check(config: "RunConfig") -> "CheckReport":
    """Broken rules, warnings and derived numbers of a configuration; loads no model."""
    from plait.jobs.check import check as job

    return job(config)


def train(
    config: "RunConfig", *, run_dir: Path | None = None, recipe_dir: Path = Path(), progress: bool = True
) -> "TrainResult":
    """Train by reinforcement learning; results go to run_dir, or to the first free runs/<name>.

    recipe_dir, here and below: where relative files and "module:function" verifiers are looked up.
    """
    from plait.jobs.train import train as job

    return job(config, run_dir=run_dir, recipe_dir=recipe_dir, progress=progress)


def evaluate(config: "RunConfig", *, model: str | None = None, recipe_dir: Path = Path()) -> "EvaluationResult":
    """Accuracy of a model folder or run (the configuration's own model if None) on held-out prompts."""
    from plait.jobs.evaluate import evaluate as job

    return job(config, model=model, recipe_dir=recipe_dir)


def sample(
    config: "RunConfig",
    *,
    model: str | None = None,
    num_prompts: int = 4,
    num_samples: int = 1,
    recipe_dir: Path = Path(),
) -> "list[Sample]":
    """Scored samples on held-out prompts."""
    from plait.jobs.sample import sample as job

    return job(config, model=model, num_prompts=num_prompts, num_samples=num_samples, recipe_dir=recipe_dir)


def sft(
    config: "SftConfig", *, out_dir: Path | None = None, recipe_dir: Path = Path(), progress: bool = True
) -> "SftResult":
    """Train on completions; the model is written to out_dir."""
    from plait.jobs.sft import sft as job

    return job(config, out_dir=out_dir, recipe_dir=recipe_dir, progress=progress)
