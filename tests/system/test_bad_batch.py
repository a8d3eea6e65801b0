"""Batches of updates that are not finite: kept, replayed, and the right value named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from plait.cli import app
from plait.errors import ConfigError, NonFiniteError, PlaitError
from plait.jobs import replay_update
from plait.jobs.replay_batch import ADVICE, Finding, Kind, UpdateAgain, replay_batch, verdict
from plait.jobs.train import resume, train
from plait.models.optimizer import MasterOptimizer
from plait.roles.policy import Policy
from plait.telemetry.bad_batches import MAX_KEPT, BadBatches

VERIFIER = '''

def huge(samples):
    """A score out of all proportion for one sample of row 3."""
    return [SCORE if s.prompt.answer == "3" and s.id.endswith("#1") else letters([s])[0] for s in samples]
'''
NO_EVALUATION = ("evaluation.at_start=false", "evaluation.at_end=false", "algorithm.scale=none")


@pytest.fixture
def run(toy):
    """run(*overrides, score=...) trains the toy with one sample of that score, and returns its folder.

    In five steps of four prompts each of the twenty rows comes once, so exactly one step has row 3.
    """

    def start(*overrides, score="0.5", name="r"):
        path = Path("toy_verifier.py")
        path.write_text(path.read_text() + VERIFIER.replace("SCORE", score))
        recipe = Path("toy.toml")
        recipe.write_text(recipe.read_text().replace("toy_verifier:letters", "toy_verifier:huge"))
        config = toy("train.num_steps=5", *NO_EVALUATION, *overrides)
        return train(config, run_dir=Path(name), recipe_dir=Path.cwd(), progress=True).run_dir

    return start


def steps_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if record["kind"] == "train"}


def kept(folder):
    return BadBatches(folder / "bad_batches").steps()


def content(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def nan_gradients(monkeypatch, when):
    """As a faulty kernel would: the gradient of one parameter is NaN in the updates for which when(number) holds."""
    original, calls = MasterOptimizer.apply, []

    def apply(self, rate):
        calls.append(None)
        if when(len(calls)):
            self.masters["model.norm.weight"].grad[0] = math.nan
        return original(self, rate)

    monkeypatch.setattr(MasterOptimizer, "apply", apply)


def test_a_finite_run_keeps_nothing(run, capsys):
    folder = run("train.num_steps=2")
    assert not (folder / "bad_batches").exists()
    assert "bad_batches" not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_advantage_that_overflows_is_named(run, dtype, capsys):
    """0.75e39 is a number in Python and none in float32 (up to 3.4e38); its siblings' -0.25e39 is one."""
    folder = run(f"model.compute_dtype={dtype}", "checkpoint.every_steps=1", "checkpoint.keep=9", score="1e39")
    (step,) = kept(folder)
    assert steps_of(folder)[step]["updates_skipped_nonfinite"] == 1
    output = capsys.readouterr().out
    assert f"bad_batches/step-{step}.json (the newest 3 are)" in output
    assert f"plait replay r --batch {step}" in output
    before = content(folder)
    result = replay_batch(folder, step)
    assert content(folder) == before
    assert result.batch == "kept by the run"
    assert [again.dtype for again in result.runs] == [dtype, {"float32": "bfloat16", "bfloat16": "float32"}[dtype]]
    for again in result.runs:
        assert again.first.kind == "advantage"
        assert again.first.sample_id.endswith("#1")
        assert again.first.value == "inf"
        assert again.num_nonfinite == 1
        assert again.samples[0].first == again.first
        assert sorted(sample.sample_id[-2:] for sample in again.samples[1:4]) == ["#0", "#2", "#3"]
        assert not math.isfinite(again.grad_norm)
    assert "it is the same" in result.verdict
    assert "bound what the verifier returns" in result.verdict
    record = json.loads((folder / "bad_batches" / f"step-{step}.json").read_text())
    guilty = next(sample for sample in record["samples"] if sample["reward"] == 1e39)
    assert guilty["to_verify"]["verifier"] == "toy_verifier:huge"
    assert guilty["to_verify"]["answer"] == "3"
    assert guilty["score"] == 1e39
    assert set(guilty["advantages"]) == {"inf"}
    assert record["found"]["nonfinite_in"]


@pytest.mark.parametrize("kind", ["independent", "shared_trunk"])
def test_a_batch_with_a_critic_is_made_again(run, kind):
    """The batch holds values and returns; the return of the guilty sample is what overflows, and its advantage."""
    folder = run("algorithm.name=ppo", f"algorithm.critic.kind={kind}", score="1e39")
    (step,) = kept(folder)
    result = replay_batch(folder, step, rerun=True)
    record = json.loads((folder / "bad_batches" / f"step-{step}.json").read_text())
    assert all({"advantages", "returns", "values"} <= sample.keys() for sample in record["samples"])
    for again in result.runs:
        assert again.first.kind in ("advantage", "return")
        assert again.first.value == "inf"
    assert any("critic's update" in note for note in result.notes) == (kind == "independent")


def test_squares_that_overflow_are_named_as_the_norm(run):
    """1e30 and its gradients are float32; a square of 1e60 is none, so the norm is infinite and no gradient is."""
    folder = run(score="1e30")
    (step,) = kept(folder)
    result = replay_batch(folder, step, rerun=True)
    for again in result.runs:
        assert (again.first.kind, again.first.sample_id) == ("gradient norm", "")
        assert again.num_nonfinite == 0
        assert again.grad_norm == math.inf
        # The three siblings have a third of the guilty one's advantage each.
        assert again.samples[0].sample_id.endswith("#1")
        assert again.samples[0].advantage == pytest.approx(0.75e30)
        assert 1e25 < again.samples[0].grad_norm < 1e33


@pytest.mark.parametrize(
    ("old", "kind", "value"), [(-math.inf, "old log-probability", "-inf"), (-900.0, "ratio", "inf")]
)
def test_one_token_is_named(run, old, kind, value):
    """A kept batch, changed by hand: finite scores, and one token whose old log-probability explains it all.

    exp(900) is no float32.
    """
    folder = run(score="1e30")
    batches = BadBatches(folder / "bad_batches")
    (step,) = kept(folder)
    batch = batches.load(step)
    samples = {sample.id: sample for group in batch.groups for sample in group.samples}
    name = next(key for key in samples if key.endswith("#2"))
    batch.streams["advantages"] = {
        key: np.full(sample.num_loss_tokens, (-1.0) ** i, dtype=np.float32)
        for i, (key, sample) in enumerate(samples.items())
    }
    batch.streams["old_logprobs"] = {key: sample.rollout_logprobs_R.copy() for key, sample in samples.items()}
    batch.streams["old_logprobs"][name][4] = old
    batches.keep(batch)
    for again in replay_batch(folder, step, rerun=True).runs:
        assert (again.first.kind, again.first.sample_id, again.first.value) == (kind, name, value)
        assert again.first.place.startswith("response token 4 ")
        assert again.num_nonfinite == 1


def changed_model(tiny_model, **factors):
    """A copy of the toy's model with parameters multiplied; "__" stands for the dots of a name."""
    from transformers import AutoModelForCausalLM

    from plait.models.load import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, factor in factors.items():
            model.get_parameter(name.replace("__", ".")).mul_(factor)
    model.save_pretrained("changed")
    load_tokenizer("starter").backend.save_pretrained("changed")
    return "model.path=changed"


def test_a_layer_that_overflows_is_named(run, tiny_model, capsys):
    """What the second layer's up projection gives is finite still; the product of its down projection is not."""
    mlp = "model__layers__1__mlp"
    model = changed_model(tiny_model, **{f"{mlp}__up_proj__weight": 1e38, f"{mlp}__down_proj__weight": 1e38})
    with pytest.raises(NonFiniteError, match="1 updates in a row"):
        run(model, "train.max_nonfinite_updates=1")
    folder = Path("r")
    (step,) = kept(folder)
    assert step not in steps_of(folder)  # it ended the run before it was logged
    assert f"plait replay r --batch {step}" in capsys.readouterr().out
    # Logits that are no numbers give the same token again and again: equal texts, and no update until row 3 came.
    assert [record["nonfinite_logprob_share"] for record in steps_of(folder).values()] == [1.0] * (step - 1)
    onsets = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
    assert (onsets[0]["step"], onsets[0]["alarm"]) == (1, "nonfinite_logprobs")
    result = replay_batch(folder, step, rerun=True)
    assert result.recorded == ()
    assert result.weights.endswith("made again from the start")
    for again in result.runs:
        assert (again.first.kind, again.first.name) == ("activation", "model.layers.1.mlp.down_proj")
        assert again.first.place.startswith("prompt token")
        assert again.num_nonfinite == 4


def test_a_gradient_that_overflows_on_the_way_back_is_named(run, tiny_model):
    """One token per sample: what goes back for the guilty one begins with 0.75 x 4e38 / 16. Embeddings of size 2e-4
    (made up for at the head by its norm) let every norm multiply by up to 1000 on the way."""
    model = changed_model(tiny_model, model__embed_tokens__weight=0.01, model__norm__weight=100.0)
    folder = run(model, "rollout.max_completion_tokens=1", score="4e38")
    (step,) = kept(folder)
    for again in replay_batch(folder, step, rerun=True).runs:
        assert again.first.kind in ("gradient of an activation", "gradient of a parameter")
        assert again.first.name.startswith("model.")
        # Its siblings have a third of its advantage, which overflows as well; no sample of another group does.
        assert {sample.sample_id.partition("@")[0] for sample in again.samples if sample.first} == {"rows/r3"}
        assert all(map(math.isfinite, again.losses))


def test_a_fault_from_outside_is_said_to_be_one(run, monkeypatch):
    with monkeypatch.context() as patch:
        nan_gradients(patch, lambda number: number == 2)
        folder = run("checkpoint.every_steps=1", "checkpoint.keep=9")
    assert kept(folder) == [2]
    result = replay_batch(folder, 2)
    assert result.recorded == ("nan",)
    assert [again.first for again in result.runs] == [None, None]
    assert result.verdict.startswith(
        "Every value is finite in float32 and in bfloat16, although it was not in the run. What made it"
    )


def test_the_newest_few_are_kept_and_it_is_said(run, monkeypatch, capsys):
    nan_gradients(monkeypatch, lambda number: True)
    folder = run("train.max_nonfinite_updates=9")
    assert MAX_KEPT == 3
    assert kept(folder) == [3, 4, 5]
    assert len(list((folder / "bad_batches").iterdir())) == 6
    output = capsys.readouterr().out
    assert output.count("(the newest 3 are)") == 5
    assert output.count("nonfinite_update") == 1  # the alarm: once, while it stays on
    summary = json.loads((folder / "summary.json").read_text())
    (alarm,) = (entry for entry in summary["alarms"] if entry["alarm"] == "nonfinite_update")
    assert (alarm["steps"], alarm["is_active"]) == ([1], True)


def test_a_finite_step_is_made_again_exactly(run):
    """In float32 the replay of a batch made again gives the run's own gradient, to the last bit."""
    folder = run("checkpoint.every_steps=1", "checkpoint.keep=9", "algorithm.kl_coefficient=0.1")
    recorded = steps_of(folder)
    for step in (1, 4):
        result = replay_batch(folder, step, rerun=True)
        assert result.batch == "made again"
        assert result.notes == ()
        assert result.runs[0].grad_norm == recorded[step]["grad_norm"]
        assert sum(result.runs[0].losses) == pytest.approx(recorded[step]["loss/total"], abs=1e-7)
        assert result.runs[0].first is None
        assert "as it was in the run" in result.verdict
        # bfloat16 is another computation of the same.
        assert result.runs[1].grad_norm == pytest.approx(recorded[step]["grad_norm"], rel=0.1)
        assert result.runs[1].grad_norm != result.runs[0].grad_norm


def test_a_samples_gradient_is_that_of_transformers(run, tiny_model):
    """On-policy, token-mean: the loss of a sample is -A / (all loss tokens) x the sum of its log-probabilities."""
    from transformers import AutoModelForCausalLM

    folder = run("logging.samples_per_step=16")
    sample = replay_batch(folder, 1, rerun=True).runs[0].samples[0]
    stored = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    step = [record for record in stored if record["step"] == 1]
    record = next(record for record in step if record["id"] == sample.sample_id)
    siblings = [r["reward"] for r in step if r["id"].partition("#")[0] == sample.sample_id.partition("#")[0]]
    advantage = record["reward"] - sum(siblings) / len(siblings)
    assert sample.advantage == pytest.approx(advantage)
    assert sample.num_tokens == record["response_tokens"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt, response = record["prompt_ids"], record["response_ids"]
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
    (-advantage * chosen.sum() / sum(r["response_tokens"] for r in step)).backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    assert sample.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_update_of_a_step_is_replayed_from_the_weights_before_it(run, dtype, monkeypatch):
    """Four updates a step; the third of step 2 fails. The two before it are made again, bit for bit."""
    before = {}
    original = Policy.apply

    def remember(self, rate):
        before[len(before) + 1] = {name: master.clone() for name, master in self.state()["policy"].items()}
        return original(self, rate)

    settings = ("batch.num_sequences_per_minibatch=4", f"model.compute_dtype={dtype}", "train.num_steps=3")
    with monkeypatch.context() as patch:
        nan_gradients(patch, lambda number: number == 7)
        patch.setattr(Policy, "apply", remember)
        folder = run(*settings)
    assert kept(folder) == [2]
    with monkeypatch.context() as patch:
        # Three updates after those of step 1, which the re-run makes: the fault comes at the same one.
        nan_gradients(patch, lambda number: number == 4 + 3)
        chosen = []
        choose = replay_update._choose_update
        patch.setattr(replay_update, "_choose_update", lambda *given: chosen.append(choose(*given)) or chosen[0])
        result = replay_batch(folder, 2, rerun=True)
    assert (result.update, result.num_updates) == (3, 4)
    assert result.recorded[2] == "nan"
    assert chosen[0].masters.keys() == before[7].keys()
    assert all(torch.equal(chosen[0].masters[name], master) for name, master in before[7].items())
    assert not all(torch.equal(before[5][name], master) for name, master in before[7].items())


def test_resuming_before_the_step_keeps_the_same_batch_again(run):
    with pytest.raises(NonFiniteError):
        run("train.max_nonfinite_updates=1", "checkpoint.every_steps=1", score="1e39")
    folder = Path("r")
    (step,) = kept(folder)
    first = {path.name: path.read_bytes() for path in (folder / "bad_batches").glob("*.json")}
    arrays = BadBatches(folder / "bad_batches").load(step).streams["advantages"]
    with pytest.raises(NonFiniteError):
        resume(folder, progress=False)
    assert {path.name: path.read_bytes() for path in (folder / "bad_batches").glob("*.json")} == first
    again = BadBatches(folder / "bad_batches").load(step).streams["advantages"]
    assert {key: values.tolist() for key, values in again.items()} == {key: v.tolist() for key, v in arrays.items()}


def test_drop_after_a_resume(run, monkeypatch):
    with monkeypatch.context() as patch:
        nan_gradients(patch, lambda number: number in (2, 4))
        folder = run("train.num_steps=4")
    assert kept(folder) == [2, 4]
    BadBatches(folder / "bad_batches").drop_after(3)
    assert kept(folder) == [2]
    assert len(list((folder / "bad_batches").iterdir())) == 2


def test_refusals_in_one_sentence(run):
    folder = run("train.num_steps=3")
    with pytest.raises(ConfigError, match=r"has made steps 1 to 3, so there is no update of step 7"):
        replay_batch(folder, 7)
    text = (
        r"the batch of step 2 is not kept: a run keeps those .* Add --rerun to make steps 1 to 2 \(2 x .* from the st"
    )
    with pytest.raises(ConfigError, match=text):
        replay_batch(folder, 2)
    with pytest.raises(ConfigError, match="is not a run"):
        replay_batch(Path("nowhere"), 1)


def test_a_step_without_an_update_has_nothing_to_replay(toy):
    path = Path("toy.toml")
    path.write_text(path.read_text().replace("toy_verifier:letters", "toy_verifier:always_one"))
    folder = train(toy("train.num_steps=2", *NO_EVALUATION), recipe_dir=Path.cwd(), progress=False).run_dir
    with pytest.raises(ConfigError, match="step 2 made no update: no sample of it had an advantage other than 0"):
        replay_batch(folder, 2, rerun=True)


def test_a_damaged_batch_is_named(run):
    folder = run(score="1e39")
    (step,) = kept(folder)
    path = folder / "bad_batches" / f"step-{step}.npz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(PlaitError, match=rf"step-{step}\.json or the \.npz beside it is damaged"):
        replay_batch(folder, step)
    path.unlink()
    with pytest.raises(PlaitError, match="cannot be read"):
        replay_batch(folder, step)


def test_the_command(run):
    folder = run("checkpoint.every_steps=1", "checkpoint.keep=9", score="1e39")
    (step,) = kept(folder)
    runner = CliRunner()
    for options in ([], ["--sample", "x", "--batch", "1"]):
        refused = runner.invoke(app, ["replay", str(folder), *options])
        assert refused.exit_code == 2
        assert "give --sample ID or --batch STEP, and not both" in refused.output
    shown = runner.invoke(app, ["replay", str(folder), "--batch", str(step)])
    assert shown.exit_code == 0, shown.output
    for part in ("First value that is not finite in float32: advantage of sample", "Samples that pull most", "kept by"):
        assert part in shown.stdout
    data = json.loads(runner.invoke(app, ["replay", str(folder), "--batch", str(step), "--json"]).stdout)
    assert data["runs"][0]["first"]["kind"] == "advantage"
    assert data["runs"][0]["grad_norm"] is None
    again = runner.invoke(app, ["replay", str(folder), "--batch", "1" if step != 1 else "2", "--rerun"])
    assert again.exit_code == 0, again.output
    assert "making step" in again.stderr


def test_the_verdict_by_hand():
    def again(dtype, first):
        return UpdateAgain(dtype, (0.5,), 1.0, first, ())

    logits = Finding("logits", "lm_head", "p#1", "response token 3 ' x'", "inf")
    text = verdict([again("bfloat16", logits), again("float32", None)], was_finite=False)
    assert text == (
        "First value that is not finite in bfloat16: logits lm_head of sample \"p#1\" at response token 3 ' x' is inf. "
        "In float32 every value is finite. Next: model.compute_dtype float32 computes this update without it. "
        f"{ADVICE['logits']}."
    )
    other = Finding("ratio", "", "p#0", "response token 0 'a'", "inf")
    text = verdict([again("float32", logits), again("bfloat16", other)], was_finite=False)
    assert "In bfloat16 the first is another: ratio of sample \"p#0\" at response token 0 'a' is inf" in text
    text = verdict([again("float32", logits), again("bfloat16", None)], was_finite=False)
    assert "model.compute_dtype float32 computes" not in text
    text = verdict([again("float32", None), again("bfloat16", other)], was_finite=True)
    assert text.startswith("Every value is finite in float32, as it was in the run. In bfloat16 the ratio of sample")
    assert ADVICE.keys() == set(Kind.__args__)


def test_numbers_survive_the_file_whatever_they_are(run, tmp_path):
    folder = run(score="1e39")
    (step,) = kept(folder)
    batch = BadBatches(folder / "bad_batches").load(step)
    odd = np.array([math.nan, math.inf, -math.inf, 1e-45, -0.0, 0.1], dtype=np.float32)
    first = batch.groups[0].samples[0]
    batch.streams["old_logprobs"] = {first.id: odd, batch.groups[-1].samples[-1].id: odd[:2]}
    first.rollout_logprobs_R[:] = -0.1
    first.response_mask_R[0] = False
    again = BadBatches(tmp_path / "again")
    again.keep(batch)
    loaded = again.load(step)
    assert [[s.id for s in g.samples] for g in loaded.groups] == [[s.id for s in g.samples] for g in batch.groups]
    for name, values in batch.streams.items():
        assert loaded.streams[name].keys() == values.keys()
        for key, array in values.items():
            assert loaded.streams[name][key].dtype == array.dtype
            assert loaded.streams[name][key].tobytes() == array.tobytes()
    for group, other in zip(batch.groups, loaded.groups, strict=True):
        for sample, back in zip(group.samples, other.samples, strict=True):
            for field in ("response_ids_R", "rollout_logprobs_R", "versions_R", "response_mask_R"):
                assert getattr(sample, field).dtype == getattr(back, field).dtype
                assert np.array_equal(getattr(sample, field), getattr(back, field))
            assert (sample.prompt_ids, sample.reward, sample.seed) == (back.prompt_ids, back.reward, back.seed)
            assert sample.is_counted == back.is_counted
