"""Alarms: each on a history made for it and at the step found by hand, none on a healthy run, once per onset, exact
after a resume."""

import json
import math
from pathlib import Path

import pytest

from plait.telemetry.alarm_log import CLEARED_AFTER, AlarmLog, AlarmWatch
from plait.telemetry.alarms import ALARMS, WATCHED
from plait.telemetry.definitions import METRICS
from plait.telemetry.gap import OUTSIDE_SHARE_LIMIT
from plait.telemetry.metrics import MetricsLog, read_metrics

# Of `plait train starter`, 60 steps, seed 1: what the rules read of its metrics.jsonl.
HEALTHY_RUN = Path(__file__).with_name("healthy_run.jsonl")
QUIET = {
    "entropy": 0.5,
    "accuracy": 0.5,
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "response_tokens/mean": 100.0,
    "truncated_share": 0.0,
    "groups/with_signal": 0.5,
    "groups/all_correct": 0.25,
    "groups/all_wrong": 0.25,
    "gap/outside_share": 0.0,
    "gap/mean": 1e-4,
    "gap/max": 0.01,
    "repetition_share": 0.0,
    "grad_norm": 1.0,
    "updates_skipped_nonfinite": 0,
    "nonfinite_logprob_share": 0.0,
    "verdict/failed": 0.0,
    "verdict/no_answer": 0.0,
}
NO_SIGNAL = {"groups/with_signal": 0.0, "groups/all_correct": 0.0, "groups/all_wrong": 0.0}

# name: (what changes, from which step on, the step at which it must be raised)
CASES = {
    # Mean of 5 below 0.05: only when all five are 0.04.
    "entropy_collapse": ({"entropy": 0.04}, 11, 15),
    # Above 1.5 with four of five at 2: 8.5 / 5 = 1.7; with three 7 / 5 = 1.4.
    "entropy_explosion": ({"entropy": 2.0}, 11, 14),
    # Above 1.5 x 100 with three of five at 200: 800 / 5 = 160; steps 4 to 8 are the 20 steps before.
    "length_growth": ({"response_tokens/mean": 200.0}, 26, 28),
    # Below 50 with four of five at 20: 180 / 5 = 36; with three 52.
    "length_fall": ({"response_tokens/mean": 20.0}, 26, 29),
    # 0.1 above the start's 0 with two of five at 0.3: 0.12.
    "truncation": ({"truncated_share": 0.3}, 11, 12),
    # Below 0.1 when all five are 0: four of five leave 0.1.
    "tasks_too_hard": (NO_SIGNAL | {"groups/all_wrong": 1.0}, 11, 15),
    "tasks_too_easy": (NO_SIGNAL | {"groups/all_correct": 1.0}, 11, 15),
    "equal_rewards": (NO_SIGNAL, 11, 15),
    "gap": ({"gap/outside_share": 0.011}, 11, 11),
    # Above 0.1 with two of five at 0.3.
    "repetition": ({"repetition_share": 0.3}, 11, 12),
    "gradient_spike": ({"grad_norm": 10.5}, 11, 11),
    "nonfinite_update": ({"updates_skipped_nonfinite": 1}, 11, 11),
    "nonfinite_logprobs": ({"nonfinite_logprob_share": 1e-4}, 11, 11),
    # More than 0.5 x 0.4 below 0.5 with four of five at 0.2: 1.3 / 5 = 0.26; with three 0.32.
    "reward_fall": ({"reward/mean": 0.2}, 21, 24),
    "reward_stuck": ({}, 1, 50),
    # Above 0.05 with two of five at 0.2: 0.08; with one 0.04.
    "verifier_failures": ({"verdict/failed": 0.2}, 11, 12),
    # Above 0.5 with three of five at 0.9: 0.54; with two 0.36.
    "unread_answers": ({"verdict/no_answer": 0.9}, 11, 13),
}


def quiet(num_steps):
    return [dict(QUIET) for _ in range(num_steps)]


def changed(num_steps, change, first, last=None):
    """Quiet steps from 1 on; from `first` to `last` with a change."""
    steps = quiet(num_steps)
    for metrics in steps[first - 1 : last]:
        metrics.update(change)
    return steps


def onsets(steps):
    """(step, alarm) of every onset."""
    watch = AlarmWatch()
    return [(step, alarm.name) for step, metrics in enumerate(steps, 1) for alarm, _ in watch.see(metrics)]


def findings(steps):
    watch = AlarmWatch()
    return [finding for metrics in steps for _, finding in watch.see(metrics)]


def healthy_run():
    return [json.loads(line) for line in HEALTHY_RUN.read_text().splitlines()]


def test_every_alarm_has_a_case_and_reads_registered_metrics():
    assert CASES.keys() == {alarm.name for alarm in ALARMS}
    assert METRICS.keys() >= WATCHED
    for alarm in ALARMS:
        assert alarm.cause[-1] != "."
        assert alarm.next_step.format(run="r", step=1, sample="s")[-1] != "."


@pytest.mark.parametrize("name", CASES)
def test_raised_once_at_the_step_found_by_hand_and_nothing_else(name):
    change, first, raised = CASES[name]
    assert onsets(changed(raised - 1, change, first)) == []
    assert onsets(changed(max(raised, 34), change, first)) == [(raised, name)]


def test_a_real_healthy_run_raises_none():
    """Its entropy falls to a sixth, its length nearly doubles, at its end four of five groups are all correct."""
    steps = healthy_run()
    assert len(steps) == 60
    assert all(record.keys() >= WATCHED for record in steps[:50])
    assert onsets(steps) == []


@pytest.mark.parametrize("name", [name for name in CASES if name != "reward_stuck"])
def test_the_same_trouble_within_the_real_run(name):
    change, *_ = CASES[name]
    steps = healthy_run()
    for record in steps[40:]:
        record.update(change)
        if name.startswith(("entropy", "reward", "length")):
            # Where all is learnt these are no trouble.
            record.update({"accuracy": 0.5, "reward/mean": min(record["reward/mean"], 0.5)})
        if name == "entropy_collapse":
            record["entropy"] = 0.004
        if name == "reward_fall":
            record["reward/std"] = 0.4
    assert name in {alarm for _, alarm in onsets(steps)}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"entropy": 0.001, "accuracy": 0.95}, 11),
        # Twice the start's entropy, and three times a small one.
        ({"entropy": 1.0}, 11),
        ({"entropy": 1.4}, 11),
        # Longer, and better for it; then shorter and better.
        ({"response_tokens/mean": 300.0, "reward/mean": 0.6}, 16),
        ({"response_tokens/mean": 10.0, "reward/mean": 0.6}, 16),
        ({"truncated_share": 0.1}, 11),
        ({"groups/with_signal": 0.1, "groups/all_correct": 0.9, "groups/all_wrong": 0.0}, 11),
        ({"gap/outside_share": OUTSIDE_SHARE_LIMIT}, 11),
        ({"repetition_share": 0.1}, 11),
        ({"grad_norm": 10.0}, 11),
        ({"grad_norm": 0.0}, 11),
        ({"reward/mean": 0.31}, 21),
        ({"verdict/failed": 0.05}, 11),
        ({"verdict/no_answer": 0.5}, 11),
    ],
)
def test_at_the_limit_all_is_quiet(change, first):
    assert onsets(changed(40, change, first)) == []


def test_a_limit_that_is_too_low_from_the_start_is_said_when_five_steps_were_seen():
    assert onsets(changed(30, {"truncated_share": 0.25}, 1)) == [(5, "truncation")]


def test_no_spike_before_there_is_a_usual_value():
    steps = changed(40, {"grad_norm": 50.0}, 5, 5)
    assert onsets(steps) == []
    steps[5]["grad_norm"] = 50.0
    assert onsets(steps) == [(6, "gradient_spike")]


def test_a_small_gain_that_is_sure_is_not_stuck():
    """+0.03 without noise; then the same with noise of 0.1 that hides it."""
    for noise, expected in ((0.0, []), (0.1, [(50, "reward_stuck")])):
        steps = quiet(60)
        for number, metrics in enumerate(steps):
            metrics["reward/mean"] = 0.5 + 0.03 * (number >= 30) + noise * (-1) ** number
        assert onsets(steps) == expected


def test_once_per_onset_and_again_after_it_cleared_and_came_back():
    assert CLEARED_AFTER == 5
    steps = changed(40, {"gap/outside_share": 0.5}, 11, 14)
    steps[14 + 4]["gap/outside_share"] = 0.5  # step 19: four quiet steps since 14
    assert onsets(steps) == [(11, "gap")]
    steps[24]["gap/outside_share"] = 0.5  # step 25: five quiet steps since 19
    assert onsets(steps) == [(11, "gap"), (25, "gap")]


@pytest.mark.parametrize("absent", [None, math.nan, math.inf, "left out"])
def test_a_step_without_the_value_leaves_an_alarm_as_it_is(absent):
    """A step that made no update has no gap: it neither clears the alarm nor raises it again."""
    steps = changed(40, {"gap/outside_share": 0.5}, 11, 11)
    for metrics in steps[11:25]:
        if absent == "left out":
            del metrics["gap/outside_share"]
        else:
            metrics["gap/outside_share"] = absent
    steps[25]["gap/outside_share"] = 0.5
    assert onsets(steps) == [(11, "gap")]


def test_an_infinite_gap_is_raised_without_a_mean():
    steps = changed(11, {"gap/outside_share": 0.5, "gap/mean": math.inf, "gap/max": math.inf}, 11)
    (text,) = findings(steps)
    assert text.startswith("50.0% of the sampled tokens")
    assert text.endswith("(mean nan, largest nan)")


def test_findings_hold_the_numbers():
    (text,) = findings(changed(28, {"response_tokens/mean": 200.0}, 26))
    assert text == "mean length went from 100 to 160 tokens within 20 steps, the reward from 0.500 to 0.500"
    (text,) = findings(changed(11, {"grad_norm": 10.5}, 11))
    assert text == "grad_norm is 10.5, its median over the 5 updates before 1"
    (text,) = findings(changed(15, {"entropy": 0.04}, 11))
    assert text == "entropy is 0.04 nat, 0.5 at the start, at an accuracy of 50%"


def troubled():
    """40 steps with several alarms that begin, clear and come back; the last values are not finite."""
    steps = changed(40, {"gap/outside_share": 0.5}, 6, 8)
    for number in (9, 10, 20, 33):
        steps[number]["updates_skipped_nonfinite"] = 1
        steps[number]["grad_norm"] = math.nan
    for metrics in steps[21:25]:
        metrics["gap/outside_share"] = 1 / 3
    for metrics in steps[11:30]:
        metrics["entropy"] = 0.01 / 3
    return steps


def log_steps(folder, steps, *, last_step=-1):
    """Continue after last_step, as a run does: metrics first, then the alarms of each step."""
    with MetricsLog.reopen(folder / "metrics.jsonl", last_step) as metrics_log:
        records = read_metrics(folder / "metrics.jsonl")
        with AlarmLog(folder / "alarms.jsonl", last_step, records) as log:
            for step, metrics in enumerate(steps, 1):
                if step > last_step:
                    metrics_log.log(step, metrics)
                    log.see(step, metrics, run=Path("runs/a"), sample=f"p{step}#0")
            return log.summary(), (folder / "alarms.jsonl").read_bytes()


@pytest.mark.parametrize("cut", [1, 6, 8, 9, 12, 15, 19, 24, 33, 39])
@pytest.mark.parametrize("beyond", [0, 1, 7])
def test_resumed_equals_never_stopped(tmp_path, cut, beyond):
    """Stopped some steps beyond the checkpoint: what was raised in them is dropped and raised again."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = log_steps(tmp_path / "whole", troubled())
    raised = [(entry["alarm"], entry["steps"]) for entry in whole[0]]
    assert raised == [("gap", [6, 22]), ("nonfinite_update", [10, 21, 34]), ("entropy_collapse", [16])]
    log_steps(tmp_path / "cut", troubled()[: cut + beyond])
    assert log_steps(tmp_path / "cut", troubled(), last_step=cut) == whole


def test_the_summary_and_the_file(tmp_path):
    summary, data = log_steps(tmp_path, troubled())
    by_name = {entry["alarm"]: entry for entry in summary}
    assert by_name["nonfinite_update"]["next_step"].startswith("the batch is kept: `plait replay runs/a --batch 34`")
    assert not by_name["gap"]["is_active"]
    assert "plait replay runs/a --sample 'p22#0'" in by_name["gap"]["next_step"]
    assert len(data.splitlines()) == 6
    first = json.loads(data.splitlines()[0])
    assert (first["step"], first["alarm"]) == (6, "gap")
    assert first.keys() == {"step", "alarm", "finding", "cause", "next_step"}


def test_the_documentation_repeats_every_rule_word_for_word():
    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    for alarm in ALARMS:
        assert f"`{alarm.name}`" in text
        assert alarm.when in text, f"docs/health.md does not say of {alarm.name}: {alarm.when}"
