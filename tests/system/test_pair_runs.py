"""Losses on pairs in whole runs: from rows without sampling, and from a run's own samples."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.errors import DataError
from plait.jobs import stop
from plait.jobs.replay_batch import replay_batch
from plait.jobs.train import resume, train
from plait.recipe import load_run_config

OFFLINE = ("algorithm.name=dpo", "batch.num_samples_per_prompt=2", "optimizer.learning_rate=1e-3")
ITERATIVE = ("algorithm.name=iterative_dpo", "optimizer.learning_rate=1e-3")


@pytest.fixture
def offline(toy):
    """offline(*overrides) loads the toy recipe with rows that have a chosen and a rejected answer."""
    toy()
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows = [row | {"chosen": "seven words", "rejected": "4 + 9 = 13"} for row in rows]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = Path("toy.toml").read_text().replace('source = "rows"', 'source = "preferences"')
    Path("pairs.toml").write_text(text.replace("rows.jsonl", "pairs.jsonl"))

    def load(*overrides):
        return load_run_config("pairs.toml", [*OFFLINE, *overrides])

    return load


def run(config, **more):
    return train(config, recipe_dir=Path.cwd(), progress=False, **more)


def steps(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def tensors(folder):
    newest = max((Path(folder) / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    return {path.stem: load_file(path) for path in newest.glob("*.safetensors")}


def untimed(records):
    timed = ("time", "throughput/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records]


def test_rows_of_preferences_are_learnt_without_sampling(offline):
    result = run(offline("train.num_steps=6", "batch.num_epochs_per_step=2"))
    made = steps(result.run_dir)
    assert made[0]["loss/pairwise"] > made[-1]["loss/pairwise"] > 0
    assert made[-1]["pairs/accuracy"] == 1.0
    assert made[-1]["pairs/margin"] > made[1]["pairs/margin"] > 0
    assert all(record["pairs/number"] == 8 for record in made)  # 4 rows twice
    assert all(record["updates_applied"] == 2 for record in made)
    absent = ("tokens_generated", "reward/mean", "accuracy", "gap/mean", "time/generate_s", "policy_version")
    assert not any(name in record for record in made for name in (*absent, "loss/policy", "ratio/mean"))
    assert result.tokens_generated == 0
    stages = {stage["name"] for stage in json.loads((result.run_dir / "plan.json").read_text())["stages"]}
    assert stages == {"ref_logprob", "update_policy"}
    assert result.after.num_samples == result.before.num_samples > 0


def test_the_evaluation_is_of_the_weights_as_they_are(offline, monkeypatch):
    """No stage publishes weights, and the engine refuses to sample from weights that nobody published."""
    from plait.jobs import training_run

    seen, real = [], training_run.run_evaluation

    def watched(engine, *rest):
        seen.append((engine.version, engine.roles.engine.model.get_output_embeddings().weight.detach().clone()))
        return real(engine, *rest)

    monkeypatch.setattr(training_run, "run_evaluation", watched)
    result = run(offline("train.num_steps=5", "evaluation.every_steps=2"))
    assert [version for version, _ in seen] == [0, 2, 4, 5]
    masters = tensors(result.run_dir)["policy"]
    assert torch.equal(seen[-1][1], masters["model.embed_tokens.weight"])
    assert not torch.equal(seen[-2][1], seen[-1][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["offline", "iterative"])
def test_resumed_equals_never_stopped(toy, offline, kind, dtype):
    more = (f"model.compute_dtype={dtype}", "optimizer.schedule=cosine", "train.num_steps=4")
    config = offline(*more) if kind == "offline" else toy(*ITERATIVE, "batch.num_sequences_per_minibatch=8", *more)
    run(config, run_dir=Path("whole"))

    def reason(_):
        path = Path("cut/metrics.jsonl")
        done = sum('"train"' in line for line in path.read_text().splitlines()) if path.exists() else 0
        return "SIGTERM" if done >= 2 else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop.StopRequest, "reason", property(reason))
        assert run(config, run_dir=Path("cut")).steps == 2
    assert resume(Path("cut"), progress=False).steps == 4
    first, second = tensors("whole"), tensors("cut")
    assert first.keys() == second.keys() == {"policy", "optimizer"}
    for stem, named in first.items():
        assert all(torch.equal(tensor, second[stem][name]) for name, tensor in named.items()), stem
    assert untimed(steps("whole")) == untimed(steps("cut"))
    assert len({record["pairs/chosen_logprob"] for record in steps("whole")}) == 4


def test_a_runs_own_samples_are_paired(toy):
    result = run(toy(*ITERATIVE[:1], "train.num_steps=12", "batch.num_prompts_per_step=8"))
    made = steps(result.run_dir)
    assert all(record["pairs/number"] == round(8 * record["groups/with_signal"]) for record in made)
    assert all(record["samples_trained"] == 2 * record["pairs/number"] for record in made)
    assert made[0]["loss/pairwise"] == pytest.approx(math.log(2), abs=1e-6)
    assert sum(record["reward/mean"] for record in made[-3:]) > sum(record["reward/mean"] for record in made[:3])
    assert made[0]["gap/max"] < 1e-4  # engine and trainer on the sampled answers


def test_a_step_without_pairs_goes_on(toy):
    text = Path("toy.toml")
    toy()
    text.write_text(text.read_text().replace("toy_verifier:letters", "toy_verifier:always_one"))
    made = steps(run(toy(*ITERATIVE, "train.num_steps=2")).run_dir)
    assert [(r["pairs/number"], r["updates_applied"], r["tokens_trained"]) for r in made] == [(0, 0, 0)] * 2
    assert "pairs/accuracy" not in made[0]


def test_a_batch_of_pairs_is_replayed(offline):
    config = offline("train.num_steps=2", "checkpoint.every_steps=1", "checkpoint.keep=9")
    result = run(config)
    again = replay_batch(result.run_dir, 2, rerun=True)
    recorded = steps(result.run_dir)[1]["grad_norm"]
    assert again.runs[0].grad_norm == pytest.approx(recorded, rel=1e-6)
    assert {sample.advantage for sample in again.runs[0].samples} == {None}
    assert {sample.sample_id.partition("#")[2] for sample in again.runs[0].samples} == {"chosen", "rejected"}
    again.render()


def test_a_batch_of_pairs_that_is_not_finite_is_kept(offline, monkeypatch):
    from plait.stages import pair_loss

    real = pair_loss.losses

    def nan_losses(sums, algorithm):
        made = real(sums, algorithm)
        return made._replace(loss_B=made.loss_B * math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(pair_loss, "losses", nan_losses)
        result = run(offline("train.num_steps=1", "train.max_nonfinite_updates=9"))
        assert steps(result.run_dir)[0]["updates_skipped_nonfinite"] == 1
        again = replay_batch(result.run_dir, 1, rerun=True)
        assert again.runs[0].first.kind in ("loss", "gradient of the loss")
        assert again.batch == "kept by the run"
    assert replay_batch(result.run_dir, 1, rerun=True).runs[0].first is None


def test_rows_without_an_answer_are_enough_where_nothing_is_evaluated(offline):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    Path("pairs.jsonl").write_text(
        "".join(json.dumps({k: row[k] for k in row if k != "answer"}) + "\n" for row in rows)
    )
    Path("pairs.toml").write_text(Path("pairs.toml").read_text().replace("toy_verifier:letters", "answer"))
    with pytest.raises(DataError, match='the field "answer" is missing'):
        run(offline("train.num_steps=1"))
    run(offline("train.num_steps=1", "evaluation.at_start=false", "evaluation.at_end=false"))


@pytest.mark.parametrize("loss", ["ipo", "simpo"])
def test_other_losses_by_one_setting(offline, loss):
    more = ("algorithm.pairwise.beta=2.0", "algorithm.pairwise.margin=1.0") if loss == "simpo" else ()
    result = run(offline(f"algorithm.pairwise_loss={loss}", *more, "train.num_steps=6"))
    made = steps(result.run_dir)
    assert made[-1]["pairs/accuracy"] == 1.0
    assert made[-1]["loss/pairwise"] < made[0]["loss/pairwise"]
    assert ("time/ref_logprob_s" in made[0]) == (loss == "ipo")


@pytest.mark.timeout(600)
def test_iterative_dpo_learns_the_starters_task(tmp_path, monkeypatch):
    """The first 12 of the 40 steps of recipe starter_dpo: those reach about 0.8, from 0.56."""
    monkeypatch.chdir(tmp_path)
    config = load_run_config("starter_dpo", ["train.num_steps=12", "evaluation.num_samples_per_prompt=2"])
    result = train(config, progress=False)
    assert result.after.accuracy_low > result.before.accuracy_high
    assert result.after.reasoning_share > result.before.reasoning_share + 0.1
    assert result.seconds_per_stage.keys() >= {"generate", "score_verifier", "pair", "ref_logprob", "update_policy"}
