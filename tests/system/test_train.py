"""Whole runs in this process: what they write, and that they learn, stop and go on."""

import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.errors import ConfigError, DataError, NoSignalError, VerifierContractError, VerifierFailureError
from plait.jobs.train import resume, train


def run(config, **more):
    return train(config, recipe_dir=Path.cwd(), progress=False, **more)


def records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder):
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    return load_file(newest / "policy.safetensors")


def test_a_run_learns_and_leaves_everything_behind(toy):
    config = toy("train.num_steps=40", "rollout.max_completion_tokens=3", "optimizer.learning_rate=3e-2")
    result = run(config)
    folder = result.run_dir
    assert {p.name for p in folder.iterdir()} >= {
        *("config.json", "plan.json", "summary.json", "metrics.jsonl", "samples.jsonl", "trace.json"),
        *("checkpoints", "model"),
    }
    steps = [r for r in records(folder) if r["kind"] == "train"]
    assert [r["step"] for r in steps] == list(range(1, 41))
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2
    assert result.stopped == ""
    assert (result.before.num_prompts, result.before.num_samples) == (
        result.after.num_prompts,
        2 * result.after.num_prompts,
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"]["accuracy"] == result.after.accuracy
    assert summary["seconds_per_stage"].keys() >= {
        "generate",
        "score_verifier",
        "advantage",
        "update_policy",
        "sync_weights",
    }
    assert summary["versions"]["torch"] == torch.__version__
    sample = records(folder, "samples.jsonl")[0]
    assert sample.keys() >= {"prompt", "completion", "reward", "parts", "policy_version"}


def test_the_exported_model_is_the_trained_one_in_transformers(toy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run(toy())
    exported = AutoModelForCausalLM.from_pretrained(result.run_dir / "model")
    assert AutoTokenizer.from_pretrained(result.run_dir / "model").eos_token == "<|im_end|>"
    masters = weights(result.run_dir)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.float(), masters[name].bfloat16().float()), name


def test_the_trace_opens_as_chrome_events_and_stages_do_not_overlap(toy):
    result = run(toy("train.num_steps=2"))
    trace = json.loads((result.run_dir / "trace.json").read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["step"] in (1, 2) and e["cat"] == "stage"]
    stages = [e for e in spans if e["name"] not in ("evaluate", "checkpoint")]
    order = ["generate", "score_verifier", "advantage", "update_policy", "sync_weights"]
    assert [e["name"] for e in sorted(stages, key=lambda e: e["ts"])] == order * 2
    for earlier, later in itertools.pairwise(stages):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stopped_and_resumed_equals_never_stopped(toy, dtype):
    settings = (f"model.compute_dtype={dtype}", "optimizer.schedule=cosine", "optimizer.warmup_share=0.3")
    whole = run(toy("train.num_steps=6", *settings), run_dir=Path("whole"))
    config = toy("train.num_steps=6", "checkpoint.every_steps=3", *settings)
    # Stop after step 3, as a signal would, by the schedule's own question.
    from plait.jobs import stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop.StopRequest, "reason", property(lambda s: "SIGTERM" if _steps_done("cut") >= 3 else ""))
        cut = run(config, run_dir=Path("cut"))
    assert (cut.steps, cut.stopped) == (3, "SIGTERM")
    resumed = resume(Path("cut"), progress=False)
    assert resumed.steps == 6
    first, second = weights(Path("whole")), weights(Path("cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    timeless = ("reward/mean", "response_tokens/mean", "grad_norm", "entropy", "learning_rate", "policy_version")
    for a, b in zip(records(Path("whole")), records(Path("cut")), strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        assert all(a[key] == b[key] for key in timeless if key in a)
    assert records(Path("whole"), "samples.jsonl") == records(Path("cut"), "samples.jsonl")
    assert resumed.after.accuracy == whole.after.accuracy


def _steps_done(folder):
    path = Path(folder) / "metrics.jsonl"
    return sum('"train"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def test_more_steps_may_be_added_and_other_changes_are_refused_by_name(toy):
    run(toy("train.num_steps=2"), run_dir=Path("r"))
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate.*0\.01"):
        resume(Path("r"), ["optimizer.learning_rate=0.5"], progress=False)
    result = resume(Path("r"), ["train.num_steps=4"], progress=False)
    assert result.steps == 4
    assert [r["step"] for r in records(Path("r")) if r["kind"] == "train"] == [1, 2, 3, 4]


def test_resume_passes_over_a_damaged_checkpoint_and_a_partial_one_and_says_so(toy, monkeypatch):
    from plait.telemetry.progress import Progress

    run(toy("train.num_steps=4", "checkpoint.every_steps=2", "evaluation.at_end=false"), run_dir=Path("r"))
    Path("r/checkpoints/.partial-step-6-abcd").mkdir()
    notes = []
    monkeypatch.setattr(Progress, "note", lambda self, text: notes.append(text))
    newest = Path("r/checkpoints/step-4/policy.safetensors")
    newest.write_bytes(newest.read_bytes()[:-7])
    result = resume(Path("r"), progress=False)
    assert result.steps == 4
    assert weights(Path("r"))
    said = {note.split(":")[0]: note for note in notes if note.startswith("passed over checkpoint ")}
    assert "interrupted" in said["passed over checkpoint .partial-step-6-abcd"]
    assert "policy.safetensors" in said["passed over checkpoint step-4"]
    assert any(note.startswith("going on after step 2 of 4; left: 2 steps, 32 samples, 2 updates") for note in notes)


def test_resume_without_any_checkpoint_starts_again(toy):
    """As after a kill -9 before the first checkpoint."""
    whole = run(toy("checkpoint.every_steps=0"), run_dir=Path("whole"))
    run(toy("checkpoint.every_steps=0"), run_dir=Path("cut"))
    shutil.rmtree("cut/checkpoints")
    resumed = resume(Path("cut"), progress=False)
    assert resumed.after.accuracy == whole.after.accuracy
    assert records(Path("cut"), "samples.jsonl") == records(Path("whole"), "samples.jsonl")
    assert all(
        torch.equal(a, b) for a, b in zip(weights(Path("whole")).values(), weights(Path("cut")).values(), strict=True)
    )


def test_wall_clock_limit_saves_and_says_how_to_go_on(toy):
    result = run(toy("train.num_steps=100000", "train.wall_clock_limit_s=4"))
    assert 0 < result.steps < 100000
    assert "wall-clock limit" in result.stopped
    assert resume(result.run_dir, [f"train.num_steps={result.steps + 1}"], progress=False).steps == result.steps + 1


def test_a_signal_ends_the_run_after_the_step(toy):
    config = toy("train.num_steps=100000")
    from plait.jobs import training_run

    original = training_run.TrainingRun._on_step_end

    def send_after_two(self, state):
        original(self, state)
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.TrainingRun, "_on_step_end", send_after_two)
        result = run(config)
    assert (result.steps, result.stopped, result.exit_code) == (2, "SIGTERM", 143)
    assert (result.run_dir / "checkpoints" / "step-2").is_dir()
    assert not (result.run_dir / "model").exists()


def test_checkpoints_are_kept_by_number_and_the_best_beside_them(toy):
    config = toy("train.num_steps=6", "checkpoint.every_steps=1", "checkpoint.keep=2", "evaluation.every_steps=2")
    result = run(config)
    kept = sorted(p.name for p in (result.run_dir / "checkpoints").glob("step-*"))
    best = json.loads((result.run_dir / "checkpoints" / "best.json").read_text())["step"]
    assert {"step-5", "step-6"} <= set(kept) <= {"step-5", "step-6", f"step-{best}"}
    evaluated = [r["step"] for r in records(result.run_dir) if r["kind"] == "eval"]
    assert evaluated == [0, 2, 4, 6]


def test_seeds_decide_the_run(toy):
    first, again, other = (run(toy("train.num_steps=2", f"seed={seed}")).run_dir for seed in (1, 1, 2))
    assert records(first, "samples.jsonl") == records(again, "samples.jsonl")
    assert records(first, "samples.jsonl") != records(other, "samples.jsonl")
    evaluations = [next(r for r in records(f) if r["kind"] == "eval")["eval/accuracy"] for f in (first, other)]
    assert evaluations[0] == evaluations[1]  # the held-out set and its sampling do not depend on the run's seed


def test_b01_a_verifier_that_raises_costs_its_sample_only(toy):
    config = toy("tasks.0.verifier=toy_verifier:raises_on_one", "logging.samples_per_step=0", "train.num_steps=5")
    result = run(config)
    failed = [s for s in records(result.run_dir, "samples.jsonl") if s["verdict"]["kind"] == "failed"]
    assert result.num_failed_samples == len(failed) > 0
    assert all("KeyError" in s["verdict"]["reason"] and s["id"].endswith("#0") and s["reward"] == 0 for s in failed)
    shares = [r["verdict/failed"] for r in records(result.run_dir) if r["kind"] == "train"]
    assert sum(shares) * 16 == pytest.approx(len(failed))


@pytest.mark.parametrize(("function", "reason"), [("gives_none", "None"), ("gives_nan", "nan")])
def test_none_and_nan_are_failures_with_a_reason(toy, function, reason):
    settings = (f"tasks.0.verifier=toy_verifier:{function}", "train.num_steps=1")
    result = run(toy(*settings, "verifiers.max_failed_share=1.0"))
    assert result.num_failed_samples == 16
    assert reason in records(result.run_dir, "samples.jsonl")[0]["verdict"]["reason"]
    step = next(r for r in records(result.run_dir) if r["kind"] == "train")
    assert (step["groups/excluded"], step["updates_applied"]) == (1, 0)
    with pytest.raises(VerifierFailureError, match=f"{function}.*has not judged a single sample"):
        run(toy(*settings))


def test_b02_a_wrong_number_of_results_stops_the_run_before_any_update(toy):
    with pytest.raises(VerifierContractError, match=r"one_too_few.*"):
        run(toy("tasks.0.verifier=toy_verifier:one_too_few", "evaluation.at_start=false"), run_dir=Path("r"))
    assert records(Path("r")) == []


def test_b23_no_signal_is_bounded_and_explained(toy):
    settings = ("tasks.0.verifier=toy_verifier:always_one", "algorithm.dynamic_sampling.enabled=true")
    with pytest.raises(NoSignalError, match=r"4 rounds gave 0 of the 4 groups.*4/4: 16"):
        run(toy(*settings))
    skipped = run(toy(*settings, "algorithm.dynamic_sampling.when_exhausted=skip_step", "train.num_steps=2"))
    steps = [r for r in records(skipped.run_dir) if r["kind"] == "train"]
    assert [(r["sampling_rounds"], r["updates_applied"]) for r in steps] == [(4, 0)] * 2


def test_dynamic_sampling_trains_on_groups_with_signal_only(toy):
    result = run(toy("algorithm.dynamic_sampling.enabled=true", "train.num_steps=2"))
    for step in (r for r in records(result.run_dir) if r["kind"] == "train"):
        assert step["samples_skipped_zero_advantage"] == 0


def test_control_with_random_rewards_evaluates_by_the_real_verifier(toy):
    result = run(toy("control.rewards=random", "train.num_steps=1", "tasks.0.verifier=toy_verifier:always_one"))
    assert result.after.accuracy == 1.0
    step = next(r for r in records(result.run_dir) if r["kind"] == "train")
    assert 0 < step["reward/mean"] < 1


def test_kl_and_several_updates_per_step(toy):
    result = run(
        toy(
            "algorithm.kl_coefficient=0.01",
            "batch.num_sequences_per_minibatch=8",
            "batch.num_epochs_per_step=2",
            "algorithm.clip_high=0.28",
            "algorithm.entropy_coefficient=0.001",
        )
    )
    steps = [r for r in records(result.run_dir) if r["kind"] == "train"]
    assert all(r["updates_applied"] == 4 for r in steps)
    assert steps[-1]["kl/reference"] > 0
    assert steps[0]["ratio/mean"] != 1


def test_overlong_prompts_are_dropped_and_counted_or_stop(toy):
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows + json.dumps({"prompt": "word " * 100, "answer": "1"}) + "\n")
    config = toy("train.num_steps=6", "tasks.0.holdout_share=0.2")
    assert run(config).num_dropped_prompts > 0
    with pytest.raises(DataError, match=r"more than rollout\.max_prompt_tokens 40"):
        run(toy("train.num_steps=6", "rollout.overlong_prompts=stop"))


def test_two_processes_cannot_share_a_folder_and_a_finished_run_is_not_overwritten(toy):
    run(toy("train.num_steps=1"), run_dir=Path("r"))
    with pytest.raises(ConfigError, match="holds a run already"):
        run(toy("train.num_steps=1"), run_dir=Path("r"))


def test_stored_ids_are_what_was_sampled_even_where_text_cannot_give_them_back(toy):
    """B32: the random model samples byte fragments; decoding and encoding again would change them."""
    from plait.jobs.sample import sample
    from plait.models.load import load_tokenizer

    tokenizer = load_tokenizer("starter")
    samples = sample(toy(), num_prompts=4, num_samples=8, recipe_dir=Path.cwd())
    changed = [
        s for s in samples if tokenizer.backend.encode(s.text, add_special_tokens=False) != s.response_ids_R.tolist()
    ]
    assert changed
    assert all(math.isfinite(float(s.rollout_logprobs_R.sum())) for s in samples)


def test_b08_wrong_unreadable_cut_and_failed_are_counted_apart(toy):
    result = run(toy("tasks.0.verifier=toy_verifier:four_kinds", "train.num_steps=1"))
    step = next(r for r in records(result.run_dir) if r["kind"] == "train")
    assert step["verdict/failed"] == 0.25
    # A cut completion that is wrong or without an answer counts as truncated; the random model hardly ever ends.
    assert step["verdict/wrong"] + step["verdict/no_answer"] + step["verdict/truncated"] == 0.75
    assert step["verdict/truncated"] > 0


def test_b13_resume_at_the_end_of_an_epoch_runs_the_remaining_one(toy):
    """16 training rows in steps of 4 are 4 steps per epoch; the run stops at the end of the first of two."""
    settings = ("tasks.0.holdout_share=0.2", "train.num_steps=8", "logging.samples_per_step=99")
    whole = run(toy(*settings), run_dir=Path("whole"))
    run(toy(*settings, "train.num_steps=4"), run_dir=Path("cut"))
    assert resume(Path("cut"), ["train.num_steps=8"], progress=False).steps == whole.steps == 8
    first, second = ([s["id"] for s in records(Path(f), "samples.jsonl")] for f in ("whole", "cut"))
    assert first == second


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_b38_resident_memory_is_flat(toy):
    from plait.jobs import training_run

    original, seen = training_run.TrainingRun._on_step_end, {}

    def watch(self, state):
        original(self, state)
        seen[state.step] = int(Path("/proc/self/statm").read_text().split()[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.TrainingRun, "_on_step_end", watch)
        run(toy("train.num_steps=200", "checkpoint.every_steps=0", "evaluation.at_end=false"))
    assert seen[200] <= 1.02 * seen[50]


def test_memory_is_said_before_the_engine_takes_it_and_slots_that_do_not_fit_are_refused(toy, monkeypatch):
    from plait.jobs import roles
    from plait.jobs import train as job
    from plait.telemetry.progress import Progress

    notes, engines, make_engine = [], [], roles.make_engine

    def watched(*arguments):
        engines.append([note for note in notes if note.startswith("memory: ")])
        return make_engine(*arguments)

    monkeypatch.setattr(Progress, "note", lambda self, text: notes.append(text))
    monkeypatch.setattr(roles, "make_engine", watched)
    run(toy("train.num_steps=1"))
    assert len(engines) == 1
    assert "KV slots 0.00 GiB, predicted peak 0." in engines[0][0]
    # 2 x 2 layers x 16 numbers x 128 slots x 52 tokens x 4 bytes are 1.7 MB.
    monkeypatch.setattr(job, "available_bytes", lambda model: 1_000_000)
    with pytest.raises(ConfigError, match=r"rollout\.num_slots: the KV slots alone.*75 or less"):
        run(toy("train.num_steps=1"))
    assert len(engines) == 1


def test_b25_the_samples_of_an_update_that_is_not_finite_are_all_kept(toy):
    """A NaN in one gradient of step 2: not applied, its batch stored, and the run goes on."""
    from plait.roles.policy import Policy

    original, calls = Policy.apply, []

    def poisoned(self, rate):
        calls.append(rate)
        if len(calls) == 2:
            next(iter(self._optimizer.masters.values())).grad[0] = float("nan")
        return original(self, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "apply", poisoned)
        result = run(toy("train.num_steps=3", "logging.samples_per_step=2"))
    assert result.steps == 3
    stored = [s["step"] for s in records(result.run_dir, "samples.jsonl")]
    assert [stored.count(step) for step in (1, 2, 3)] == [2, 16, 2]
    steps = [r for r in records(result.run_dir) if r["kind"] == "train"]
    assert [(r["updates_applied"], r["updates_skipped_nonfinite"]) for r in steps] == [(1, 0), (0, 1), (1, 0)]
