"""Import directions: planning never loads torch, the maths loads torch only, engines load where they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "plait"
FILES = sorted(SOURCE.rglob("*.py"))

TORCH_FREE = (
    "batch", "config", "errors", "plan", "recipe", "rules", "algorithm_config", "algorithms.named",
    "algorithms.settings", "jobs.algorithms", "stages.graph",
    "parallel.degrees", "schedules.sync", "executor.protocol", "rollout.scheduler", "data.catalogue",
    "data.stream", "data.tasks", "rewards.verifier", "rewards.extract", "rewards.scoring", "rewards.breaker",
    "telemetry.metrics", "telemetry.trace", "telemetry.gap", "telemetry.alarm_log", "telemetry.bad_batches",
    "cost.memory", "cost.run_memory", "cost.stage_costs",
    "cost.cluster_catalogue", "cost.model_catalogue", "cost.generation", "cost.collectives", "cost.pipeline",
    "cost.reshard", "cost.traffic.layout", "cost.verifier_time", "parallel.layout_rules",
    "parallel.pipeline_orders", "jobs.check", "jobs.replay", "jobs.replay_batch",
    "cli",
)  # fmt: skip
HEAVY = {"torch", "transformers", "reasoning_gym", "ray", "vllm"}
ONLY_IN = {
    "ray": {"executor"},
    "vllm": {"rollout"},
    "pydantic": {"algorithm_config.py", "config.py", "recipe.py", "recipe_errors.py", "schema.py", "section.py"},
    "typer": {"cli.py"},
    "reasoning_gym": {"data", "rewards", "specs", "models"},
}


def imports_of(path):
    """(line, dotted module) of every import statement, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module


def test_planning_side_loads_nothing_heavy():
    modules = ",".join(f"plait.{name}" for name in TORCH_FREE)
    code = f"import sys, {modules}; print(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_maths_imports_torch_only():
    for path in (SOURCE / "algorithms").glob("*.py"):
        if path.name in ("settings.py", "__init__.py"):
            continue
        others = [module for _, module in imports_of(path) if not module.startswith("plait.algorithms.")]
        roots = {module.split(".")[0] for module in others}
        assert roots <= {"torch", "typing", "math", "collections", "dataclasses"}, f"{path.name} imports {roots}"


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_dependency_is_imported_where_it_belongs(package):
    for path in FILES:
        place = path.relative_to(SOURCE).parts[0]
        for line, module in imports_of(path):
            if module.split(".")[0] == package:
                assert place in ONLY_IN[package], f"{path}:{line} imports {package}"


def test_nothing_imports_the_command_line():
    for path in FILES:
        if path.name == "__main__.py":
            continue
        assert all(module != "plait.cli" for _, module in imports_of(path)), f"{path} imports plait.cli"


@pytest.mark.parametrize(
    ("lower", "forbidden"),
    [
        (
            "algorithms",
            {"stages.update", "stages.generate", "jobs", "executor", "rollout", "telemetry", "roles"},
        ),
        ("stages", {"jobs", "executor", "telemetry"}),
        ("rollout", {"jobs", "executor", "stages", "roles", "telemetry"}),
        ("models", {"jobs", "executor", "rollout", "stages", "roles", "telemetry"}),
        ("schedules", {"jobs", "executor.inline", "stages", "rollout", "roles", "models", "telemetry"}),
        ("telemetry", {"jobs", "executor", "stages", "rollout", "roles", "models"}),
        ("rewards", {"jobs", "executor", "stages", "rollout", "roles", "models", "telemetry"}),
        ("cost", {"jobs", "executor", "stages", "rollout", "roles", "telemetry"}),
        ("parallel", {"jobs", "executor", "stages.graph", "stages.update", "rollout", "telemetry", "cost"}),
        ("data", {"jobs", "executor", "stages", "rollout", "roles", "models", "telemetry"}),
    ],
)
def test_lower_layers_do_not_know_the_upper_ones(lower, forbidden):
    for path in (SOURCE / lower).rglob("*.py"):
        for line, module in imports_of(path):
            inner = module.removeprefix("plait.")
            hits = [name for name in forbidden if module != inner and (inner == name or inner.startswith(f"{name}."))]
            assert not hits, f"{path}:{line} imports {module}"
