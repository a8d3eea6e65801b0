"""sft, eval, sample and the command line, on the toy model."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.config import SftConfig
from plait.errors import ConfigError, DataError
from plait.jobs.evaluate import evaluate
from plait.jobs.sample import render, sample
from plait.jobs.sft import sft
from plait.jobs.train import train


def sft_config(folder, path, **more):
    data = {
        "name": "warm",
        "model": {"path": str(folder), "compute_dtype": "float32", "num_threads": 1},
        "data": {"source": "rows", "path": str(path)},
        "train": {"num_updates": 30, "num_sequences_per_update": 4, "num_tokens_per_microbatch": 256},
        "max_sequence_tokens": 64,
        "optimizer": {"learning_rate": 2e-2},
    }
    return SftConfig.model_validate_json(json.dumps(data | more))


def test_sft_learns_rows_and_the_model_then_says_them(toy, tiny_model):
    Path("sft.jsonl").write_text('{"prompt": "Say 1", "completion": "one"}\n{"prompt": "Say 2", "completion": "one"}\n')
    result = sft(sft_config(tiny_model, "sft.jsonl"), out_dir=Path("warm"), progress=False)
    assert result.last_loss < 0.1 < result.first_loss
    config = toy("evaluation.sampling.temperature=0.0", "evaluation.num_samples_per_prompt=1")
    texts = {s.text for s in sample(config, model="warm", num_prompts=2, num_samples=1, recipe_dir=Path.cwd())}
    assert texts == {"one"}
    with pytest.raises(ConfigError, match="not empty"):
        sft(sft_config(tiny_model, "sft.jsonl"), out_dir=Path("warm"), progress=False)


def test_sft_is_reproducible_and_from_scratch_forgets(toy, tiny_model):
    from safetensors.torch import load_file

    Path("sft.jsonl").write_text('{"prompt": "Say 1", "completion": "one"}\n')
    few = {"num_updates": 2, "num_sequences_per_update": 2}
    for name in ("a", "b"):
        sft(sft_config(tiny_model, "sft.jsonl", train=few), out_dir=Path(name), progress=False)
    model = {"path": str(tiny_model), "compute_dtype": "float32", "num_threads": 1, "from_scratch": True}
    sft(sft_config(tiny_model, "sft.jsonl", train=few, seed=5, model=model), out_dir=Path("c"), progress=False)
    first, again, scratch = (load_file(f"{name}/model.safetensors") for name in "abc")
    assert all((first[key] == again[key]).all() for key in first)
    assert any((first[key] != scratch[key]).any() for key in first)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"}', "completion is missing"),
        ('{"prompt": "x", "completion": ""}', "completion is ''"),
        ('{"prompt": null, "completion": "y"}', "prompt"),
        ('{"completion": "y"}', "exactly one of the fields prompt and messages"),
        ('{"messages": [{"role": "robot", "content": "x"}], "completion": "y"}', "message 0"),
        ("not json", "row 1"),
    ],
)
def test_bad_supervised_rows_name_row_and_field(tmp_path, tiny_model, line, message):
    path = tmp_path / "sft.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        sft(sft_config(tiny_model, path), out_dir=tmp_path / "out", progress=False)


def test_a_row_that_is_too_long_is_not_cut(tmp_path, tiny_model):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": "x", "completion": "word " * 200}) + "\n")
    with pytest.raises(DataError, match="more than max_sequence_tokens 64"):
        sft(sft_config(tiny_model, path), out_dir=tmp_path / "out", progress=False)


def test_evaluation_scores_every_row(toy):
    """C32: 20 rows in batches of 8 slots; nothing is dropped."""
    config = toy("tasks.0.eval_path=rows.jsonl", "evaluation.num_prompts=20", "rollout.num_slots=8")
    result = evaluate(config, recipe_dir=Path.cwd())
    assert (result.num_prompts, result.num_samples) == (20, 40)
    assert result.accuracy_low <= result.accuracy <= result.accuracy_high


def test_evaluation_of_a_finished_run_gives_its_final_figures(toy):
    config = toy("model.compute_dtype=bfloat16")
    trained = train(config, recipe_dir=Path.cwd(), progress=False)
    again = evaluate(config, model=str(trained.run_dir), recipe_dir=Path.cwd())
    assert again.accuracy == trained.after.accuracy
    assert again.response_tokens_mean == trained.after.response_tokens_mean


def test_samples_are_shown_as_text_never_as_markup(toy):
    from rich.console import Console

    samples = sample(toy(), num_prompts=1, num_samples=2, recipe_dir=Path.cwd())
    samples[0].text = "[red]x[/red]\x1b[31m\x00 \\boxed{7}"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(samples))
    shown = console.export_text()
    assert "[red]x[/red]\\x1b[31m\\x00" in shown.replace("\n", "")


def test_commands_end_to_end(toy):
    toy()
    runner = CliRunner()
    done = runner.invoke(app, ["train", "toy.toml", "--set", "train.num_steps=1", "--run-dir", "r"])
    assert done.exit_code == 0, done.output
    assert "accuracy (95 % interval)" in done.output
    assert "Run: r" in done.output
    for arguments in (["eval", "r"], ["sample", "r", "--num-prompts", "1"], ["check", "toy.toml"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
    again = runner.invoke(app, ["train", "toy.toml", "--run-dir", "r"])
    assert again.exit_code == 2
    assert "holds a run already" in again.output
    more = runner.invoke(app, ["train", "--resume", "r", "--set", "train.num_steps=2"])
    assert more.exit_code == 0, more.output


def test_sigterm_to_the_process_saves_says_how_to_go_on_and_exits_143(toy):
    toy()
    code = "from plait.cli import main; main()"
    arguments = ["train", "toy.toml", "--run-dir", "r", "--set", "train.num_steps=100000"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    metrics, deadline = Path("r/metrics.jsonl"), time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"train"') >= 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "Go on with: plait train --resume r" in output
    assert list(Path("r/checkpoints").glob("step-*"))
