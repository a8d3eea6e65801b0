"""Stored samples, computed again: equal where they must be, and the right thing named where they are not."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from plait.cli import app
from plait.errors import CheckpointError, ConfigError, PlaitError
from plait.jobs import replay_weights
from plait.jobs.replay import Scored, replay, verdict
from plait.jobs.train import train
from plait.models.load import load_tokenizer
from plait.telemetry.checkpoint import CheckpointStore
from plait.telemetry.gap import BANDS

DTYPES = ("float32", "bfloat16")


@pytest.fixture
def run(toy):
    """run(*overrides) trains the toy and returns its folder."""

    def start(*overrides, name="r"):
        config = toy("evaluation.at_start=false", "evaluation.at_end=false", *overrides)
        return train(config, run_dir=Path(name), recipe_dir=Path.cwd(), progress=False).run_dir

    return start


def stored(folder, step=None):
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if step in (None, record["step"])]


def ids_of(folder, step):
    return [record["id"] for record in stored(folder, step)]


def content(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def by_axis(result):
    return {row.axis: row for row in result.scored}


def test_samples_hold_what_a_replay_needs(run):
    folder = run("train.num_steps=2", "logging.samples_per_step=16")
    tokenizer = load_tokenizer("starter")
    for record in stored(folder):
        assert tokenizer.decode(record["response_ids"]) == record["completion"]
        assert len(record["response_ids"]) == len(record["rollout_logprobs"]) == record["response_tokens"]
        assert record["versions"] == [[0, record["policy_version"]]] == [[0, record["step"] - 1]]
        assert all(value < 0 for value in record["rollout_logprobs"])
        assert record["prompt"] in tokenizer.decode(record["prompt_ids"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sample_of_the_initial_model(run, dtype, temperature):
    folder = run("train.num_steps=1", f"model.compute_dtype={dtype}", f"rollout.sampling.temperature={temperature}")
    before = content(folder)
    result = replay(folder, ids_of(folder, 1)[0])
    assert content(folder) == before
    assert (result.step, result.policy_version, result.dtype) == (1, 0, dtype)
    assert result.weights.startswith("the initial model")
    assert result.notes == ()
    rows = by_axis(result)
    assert set(rows) == {"trainer", "dtype", "batch shape"} | ({"temperature"} if temperature != 1 else set())
    assert rows["trainer"].largest <= BANDS[dtype]
    assert rows["trainer"].moved == 0
    assert result.verdict.startswith("The difference is rounding")
    assert rows["batch shape"].largest <= BANDS[dtype]
    assert rows["batch shape"].how == "packed with 7 other stored samples of the step"
    assert result.regeneration.is_expected
    if dtype == "float32":
        assert result.regeneration.first_difference is None
        assert 1e-5 < rows["dtype"].mean < BANDS["bfloat16"]
    if temperature != 1:
        # logits / 0.7 against logits: many times any rounding, and the sentence says that it is the temperature.
        assert rows["temperature"].moved > 10 * rows["dtype"].moved
        assert "What moves it most is temperature (temperature 1 instead of 0.7)" in result.verdict
        assert "further from what was stored" in result.verdict


def test_figures_are_those_of_transformers(run, tiny_model):
    """The trainer's row against a plain forward pass of transformers, with its own attention."""
    from transformers import AutoModelForCausalLM

    folder = run("train.num_steps=1", "rollout.sampling.temperature=0.7")
    record = stored(folder, 1)[2]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt, response = record["prompt_ids"], record["response_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    for axis, temperature in (("trainer", 0.7), ("temperature", 1.0)):
        chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        difference = np.abs(chosen - np.array(record["rollout_logprobs"]))
        row = by_axis(replay(folder, record["id"]))[axis]
        assert row.mean == pytest.approx(float(difference.mean()), abs=2e-6)
        assert row.largest == pytest.approx(float(difference.max()), abs=5e-6)
        if axis == "temperature":
            assert row.worst_token == int(difference.argmax())
            assert row.worst_text == load_tokenizer("starter").backend.decode([response[row.worst_token]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_dropped_and_made_again(run, dtype):
    """Versions 2 and 4 are kept; 1 is made again from the start and 3 from step 2, exactly as they were."""
    settings = (f"model.compute_dtype={dtype}", "optimizer.schedule=cosine", "optimizer.warmup_share=0.3")
    folder = run("checkpoint.every_steps=2", *settings)
    every = run("checkpoint.every_steps=1", "checkpoint.keep=9", *settings, name="every")
    kept = replay(folder, ids_of(folder, 3)[1])
    assert kept.weights == "checkpoint step-2"
    assert kept.scored[0].is_in_band
    before = content(folder)
    for step, weights in ((2, "step 1 made again from the start"), (4, "step 3 made again from checkpoint step-2")):
        name = ids_of(folder, step)[0]
        with pytest.raises(ConfigError, match=r"has those of 0, 2, 4 .*Add --rerun to make step \d \(1 x .* s as rec"):
            replay(folder, name)
        said = []
        again = replay(folder, name, rerun=True, say=said.append)
        assert (again.weights, again.notes) == (weights, ())
        assert len(said) == 1
        assert f"making {weights[:6]} (1 x " in said[0]
        assert again.scored[0].is_in_band
        if dtype == "float32":
            assert again.regeneration.first_difference is None
        same = replay(every, name)
        assert same.weights == f"checkpoint step-{step - 1}"
        # Bit for bit the weights that were dropped: every figure is equal.
        assert same.scored == again.scored
    assert content(folder) == before


def test_a_rerun_that_differs_is_said(run):
    folder = run()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    record = json.loads(metrics[0]) | {"grad_norm": 0.125}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(record), *metrics[1:]]) + "\n")
    result = replay(folder, ids_of(folder, 3)[0], rerun=True)
    assert len(result.notes) == 1
    assert "differs from the run from step 1 on (grad_norm" in result.notes[0]
    assert "recorded 0.125" in result.notes[0]


def test_a_rerun_that_is_stopped_says_so(run, monkeypatch):
    folder = run()
    from plait.jobs import stop

    monkeypatch.setattr(stop.StopRequest, "reason", property(lambda s: "SIGTERM"))
    with pytest.raises(PlaitError, match="stopped by SIGTERM after step 0 of 2"):
        replay(folder, ids_of(folder, 3)[0], rerun=True)


def test_an_unknown_sample_is_answered_with_near_ones(run):
    folder = run("train.num_steps=2")
    name = ids_of(folder, 2)[0]
    with pytest.raises(ConfigError) as caught:
        replay(folder, name[:-1])
    text = str(caught.value)
    assert f'stores 16 samples of 2 steps from 1 to 2, and none of them has the id "{name[:-1]}"' in text
    assert f'"{name}" (step 2)' in text
    with pytest.raises(ConfigError, match=r"The first: .*\(step 1\)"):
        replay(folder, "zzzzzzzz")


def test_folders_and_samples_that_cannot_be_replayed(run, tiny_model):
    with pytest.raises(ConfigError, match="is not a run"):
        replay(Path("nowhere"), "x")
    with pytest.raises(ConfigError, match="is not a run"):
        replay(tiny_model, "x")
    folder = run("train.num_steps=1", "logging.samples_per_step=0")
    with pytest.raises(ConfigError, match="stores no samples"):
        replay(folder, "x")
    line = {"id": "x", "step": 1, "seed": 1, "prompt_ids": [3], "response_ids": [4, 5], "rollout_logprobs": [-1, -2]}
    cases = (
        ({"response_ids": [], "rollout_logprobs": [], "versions": []}, "has no tokens"),
        ({"versions": [[0, 0]], "rollout_logprobs": [-1, None]}, "token 1 was not finite"),
        ({"versions": [[0, 0], [1, 1]]}, "policy versions 0, 1 in turn"),
    )
    for change, message in cases:
        (folder / "samples.jsonl").write_text(json.dumps(line | change) + "\n")
        with pytest.raises(PlaitError, match=message):
            replay(folder, "x")


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_weights_than_those_that_sampled_are_found(run, dtype):
    folder = run("checkpoint.every_steps=2", f"model.compute_dtype={dtype}")
    store = CheckpointStore(folder / "checkpoints", 9)
    path = folder / "checkpoints" / "step-2"
    checkpoint = store.load(path)
    name = "model.layers.1.mlp.down_proj.weight"
    generator = torch.Generator().manual_seed(0)
    masters = checkpoint.tensors["policy"]
    noise = torch.randn(masters[name].shape, generator=generator)
    store.save(2, checkpoint.tensors | {"policy": masters | {name: masters[name] + noise}}, checkpoint.state)
    result = replay(folder, ids_of(folder, 3)[0])
    assert result.verdict.startswith("The difference is not rounding")
    assert "look at the weights" in result.verdict
    assert result.regeneration.first_difference is not None
    assert result.regeneration.is_expected


def test_a_damaged_checkpoint_is_named(run):
    folder = run("checkpoint.every_steps=2")
    path = folder / "checkpoints" / "step-2" / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"policy\.safetensors is damaged"):
        replay(folder, ids_of(folder, 3)[0])


def test_a_checkpoint_of_another_model_is_refused(run):
    folder = run("checkpoint.every_steps=2")
    store = CheckpointStore(folder / "checkpoints", 9)
    store.save(2, {"policy": {"other": torch.zeros(2)}}, {})
    with pytest.raises(ConfigError, match="checkpoint step-2 holds other parameters"):
        replay(folder, ids_of(folder, 3)[0])


def test_a_trainer_at_the_wrong_temperature_is_named(run):
    folder = run("train.num_steps=1")
    config = json.loads((folder / "config.json").read_text())
    config["rollout"]["sampling"]["temperature"] = 0.7  # what a trainer would use that does not know the engine's
    (folder / "config.json").write_text(json.dumps(config))
    result = replay(folder, ids_of(folder, 1)[0])
    assert "temperature explains it: temperature 1 instead of 0.7" in result.verdict
    assert "closer to what was stored" in result.verdict


def test_the_verdict_by_hand():
    def row(axis, mean, largest, moved, dtype="bfloat16"):
        return Scored(axis, f"as {axis}", dtype, mean, largest, 0, "a", moved)

    close = [
        row("trainer", 0.01, 0.09, 0),
        row("dtype", 0.02, 0.05, 0.015, "float32"),
        row("batch shape", 0.0, 0.0, 0.01),
    ]
    assert verdict(close) == (
        "The difference is rounding: no token's is above the band of bfloat16, 0.1. What moves it most is dtype "
        "(as dtype): by 0.015 on average, further from what was stored (mean 0.02)."
    )
    wide = [row("trainer", 0.2, 0.5, 0), row("dtype", 0.2, 0.5, 0.001, "float32"), row("batch shape", 0.01, 0.02, 0.19)]
    assert "batch shape explains it: as batch shape leaves 0.02 at most" in verdict(wide)
    # 0.05 would be rounding in bfloat16, and is none in float32.
    wide[2] = row("batch shape", 0.01, 0.05, 0.19, "float32")
    assert "none of them explains it" in verdict(wide)
    still = [row("trainer", 0.2, 0.5, 0), row("dtype", 0.2, 0.5, 0), row("batch shape", 0.2, 0.5, 0)]
    assert verdict(still).endswith("No axis moves it.")


def test_what_does_not_apply_is_left_out_with_the_reason(run):
    folder = run("train.num_steps=1", "logging.samples_per_step=1")
    result = replay(folder, ids_of(folder, 1)[0])
    assert set(by_axis(result)) == {"trainer", "dtype"}
    assert [text.split(" was")[0] for text in result.left_out] == ["Batch shape", "Temperature"]


def test_other_package_versions_are_said(run, monkeypatch):
    folder = run("train.num_steps=1")
    then = replay_weights.versions()["torch"]
    monkeypatch.setattr(replay_weights, "versions", lambda: {"torch": "9.9"})
    result = replay(folder, ids_of(folder, 1)[0])
    assert result.notes == (f"Versions differ from those of the run: torch {then} then, 9.9 now",)


def test_the_command(run):
    folder = run("train.num_steps=2")
    name = ids_of(folder, 2)[0]
    runner = CliRunner()
    refused = runner.invoke(app, ["replay", str(folder), "--sample", name])
    assert refused.exit_code == 2
    assert "Add --rerun" in refused.output
    shown = runner.invoke(app, ["replay", str(folder), "--sample", name, "--rerun"])
    assert shown.exit_code == 0, shown.output
    assert "making step 1 (1 x" in shown.stderr
    for part in ("batch shape", "The difference is rounding", "Generated again alone: the same tokens"):
        assert part in shown.stdout
    data = json.loads(runner.invoke(app, ["replay", str(folder), "--sample", name, "--rerun", "--json"]).stdout)
    assert data["is_in_band"] is True
    assert data["band"] == BANDS["float32"]
    assert data["scored"][0]["axis"] == "trainer"
    assert data["regeneration"]["first_difference"] is None


def test_nothing_heavy_is_loaded_before_the_sample_was_found(run):
    folder = run("train.num_steps=1")
    code = f"""
import sys
from pathlib import Path
from plait.errors import ConfigError
from plait.jobs.replay import replay
for folder in ({str(folder)!r}, "nowhere"):
    try:
        replay(Path(folder), "no such sample")
    except ConfigError as error:
        print(error)
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = result.stdout.splitlines()
    assert "none of them has the id" in lines[0]
    assert lines[-1] == "[]"


def test_a_wide_gap_is_said_once_and_a_usual_one_never(toy, capsys, monkeypatch):
    from plait.stages import policy_loss

    config = toy("train.num_steps=3", "evaluation.at_start=false", "evaluation.at_end=false")
    train(config, run_dir=Path("usual"), recipe_dir=Path.cwd())
    assert "plait replay" not in capsys.readouterr().out
    original = policy_loss.rollout_logprobs
    monkeypatch.setattr(policy_loss, "rollout_logprobs", lambda members: original(members) - 0.5)
    train(config, run_dir=Path("wide"), recipe_dir=Path.cwd())
    output = capsys.readouterr().out
    assert output.count("plait replay wide --sample") == 1
    assert "ALARM step 1: gap: 100.0% of the sampled tokens" in output
    records = [json.loads(line) for line in Path("wide/metrics.jsonl").read_text().splitlines()]
    assert all(record["gap/outside_share"] == 1 for record in records)
    assert all(record["gap/mean"] == pytest.approx(0.5, abs=1e-4) for record in records)
