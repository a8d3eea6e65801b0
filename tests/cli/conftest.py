"""A complete small recipe beside a model folder that has only the JSON files which the rules read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

BASE = {
    "": 'name = "base"',
    "model": 'path = "model"',
    "tasks": 'source = "reasoning_gym"\ntask = "chain_sum"',
    "batch": "num_prompts_per_step = 16\nnum_samples_per_prompt = 4",
    "train": "num_steps = 3",
}
RecipeWriter = Callable[..., str]


@pytest.fixture
def model_files(tmp_path: Path) -> dict[str, dict[str, object]]:
    """The model's JSON files, to be changed by a test before `write_recipe` is called."""
    return {"config.json": {"max_position_embeddings": 5000, "eos_token_id": 1}}


@pytest.fixture
def write_recipe(tmp_path: Path, model_files: dict[str, dict[str, object]]) -> RecipeWriter:
    """write_recipe(batch="...", rollout="...", top="...", without=("train",)) -> path of the TOML file.

    A keyword replaces that section's lines; `a__b` is the section [a.b].
    """

    def write(*, top: str = "", without: tuple[str, ...] = (), **sections: str) -> str:
        (tmp_path / "model").mkdir(exist_ok=True)
        for name, content in model_files.items():
            (tmp_path / "model" / name).write_text(json.dumps(content))
        merged = {**BASE, **{name.replace("__", "."): text for name, text in sections.items()}}
        lines = [merged.pop(""), top]
        for name, text in merged.items():
            if name not in without:
                lines.append(f"[[{name}]]\n{text}" if name == "tasks" else f"[{name}]\n{text}")
        path = tmp_path / "recipe.toml"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write
