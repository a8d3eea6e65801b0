"""What a run reads besides its recipe, by fingerprint, so that a resumed run is known to read the same. Torch-free."""

import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

from plait.config import ReasoningGymTask, RowsTask, RunConfig
from plait.data.mixture import Mixture
from plait.data.rows import RowTask
from plait.models.folder import model_folder
from plait.rewards.user_functions import candidate_files

Inputs = dict[str, dict[str, str]]
"""Setting through which something is read -> its parts (files, packages) -> SHA-256 or version."""

ROWS = "rows"
"""The one part of a file of rows: its name does not matter, its bytes do."""

_MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py"})
"""Of the files from which transformers reads a model and its tokenizer; a README may change."""


def describe_inputs(config: RunConfig, mixture: Mixture, recipe_dir: Path) -> Inputs:
    """Fingerprints of the model's folder, files of rows, users' verifiers, and the generators of tasks.

    mixture: of the same tasks; its rows may name verifiers of their own. Of a verifier the file of its module counts,
    not what that imports.
    """
    found: Inputs = {"model.path": _model_files(config.model.path)}
    if config.algorithm.critic.path:
        found["algorithm.critic.path"] = _model_files(config.algorithm.critic.path)
    for index, reward_model in enumerate(config.reward_models):
        found[f"reward_models.{index}.path"] = _model_files(reward_model.path)
    for index, (task, built) in enumerate(zip(config.tasks, mixture.tasks, strict=True)):
        if isinstance(task, ReasoningGymTask):
            found[f"tasks.{index}.task"] = {"reasoning-gym": version("reasoning-gym")}
        elif isinstance(task, RowsTask):
            assert isinstance(built, RowTask), f"task {index} is of rows, and was built as {type(built).__name__}"
            for key, path in (("path", task.path), ("eval_path", task.eval_path)):
                if path:
                    found[f"tasks.{index}.{key}"] = {ROWS: sha256_of(recipe_dir / path)}
            functions = {name: _source_of(name, recipe_dir) for name in built.verifiers if ":" in name}
            files = {name: sha256_of(path) for name, path in functions.items() if path is not None}
            if files:
                found[f"tasks.{index}.verifier"] = files
    return found


def _model_files(path: str) -> dict[str, str]:
    return {
        file.name: sha256_of(file)
        for file in sorted(model_folder(path).iterdir())
        if file.is_file() and file.suffix in _MODEL_SUFFIXES
    }


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source_of(name: str, recipe_dir: Path) -> Path | None:
    """The file of a user's verifier "module:function"; None for a module without one."""
    module = name.partition(":")[0]
    for path in candidate_files(module, recipe_dir):
        if path.is_file():
            return path
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return Path(spec.origin)
