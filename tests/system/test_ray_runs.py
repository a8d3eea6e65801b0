"""The same recipe on Ray: equal to one process, resumed in other layouts, ended by a first failure."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from safetensors.torch import load_file

from plait.errors import NonFiniteError, WorkerError
from plait.jobs.train import resume, train

FP32 = ("model.compute_dtype=float32", "optimizer.learning_rate=0.01")


def ranks(words, count):
    return (f'plan.layout.policy="{words}"', f"plan.pools.main={count}")


def go(config, name, **more):
    return train(config, run_dir=Path(name), recipe_dir=Path.cwd(), progress=False, **more)


def rewards(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["reward/mean"], r["tokens_generated"]) for r in records if r["kind"] == "train"]


def grad_norms(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r["grad_norm"] for r in records if r["kind"] == "train"]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture
def whole(toy):
    """The run of one process that the others are compared with."""
    return go(toy("train.num_steps=4", "checkpoint.every_steps=2", "checkpoint.keep=9", *FP32), "whole").run_dir


@pytest.mark.parametrize(("words", "count"), [("dp2", 2), ("fsdp2:zero2", 2), ("cp2", 2), ("pp2", 2)])
def test_a_run_over_ranks_is_the_run_of_one_process(toy, whole, words, count):
    made = go(toy("train.num_steps=4", *FP32, *ranks(words, count)), "split")
    assert made.steps == 4
    assert rewards(made.run_dir) == rewards(whole)
    assert grad_norms(made.run_dir) == pytest.approx(grad_norms(whole), rel=1e-4)
    for name, tensor in weights(whole).items():
        assert (weights(made.run_dir)[name].float() - tensor.float()).abs().max() < 1e-2, name  # exported in bf16


def test_one_process_goes_on_over_ranks_and_back(toy, whole):
    """Steps 1, 2 in one process, 3 over fsdp2, 4 in one process again."""
    folder = go(toy("train.num_steps=2", "checkpoint.every_steps=1", *FP32), "mixed").run_dir
    resume(
        folder,
        ["train.num_steps=3", *ranks("fsdp2", 2)],
        accepted=["plan", "train.num_steps"],
        progress=False,
    )
    resume(
        folder,
        ["train.num_steps=4", "plan.layout={}", "plan.pools.main=1"],
        accepted=["plan", "train.num_steps"],
        progress=False,
    )
    assert rewards(folder) == rewards(whole)
    assert grad_norms(folder) == pytest.approx(grad_norms(whole), rel=1e-4)


def test_ppo_with_a_critic_and_a_reference_of_another_layout(toy):
    """The critic over fsdp2, policy and reference over dp2; step 3 in one process."""
    more = (
        "algorithm.name=ppo",
        "algorithm.kl_estimator=k3",
        "algorithm.kl_in=loss",
        "algorithm.kl_coefficient=0.01",
        *FP32,
    )
    alone = go(toy("train.num_steps=3", *more), "alone").run_dir
    layouts = (*ranks("dp2", 2), 'plan.layout.critic="fsdp2"')
    folder = go(toy("train.num_steps=2", "checkpoint.every_steps=1", *more, *layouts), "apart").run_dir
    back = ["train.num_steps=3", "plan.layout={}", "plan.pools.main=1"]
    resume(folder, back, accepted=["plan", "train.num_steps"], progress=False)
    assert rewards(folder) == rewards(alone)
    assert grad_norms(folder) == pytest.approx(grad_norms(alone), rel=1e-4)


def test_a_rank_that_dies_ends_the_run_and_the_checkpoint_resumes(toy, whole, monkeypatch):
    from plait.executor.ray_executor import RayWorkers

    original, pids, started = RayWorkers.update_policy, [], []

    def killing(self, inputs, *, step):
        pids[:] = self._all("process")
        if step == 3:
            os.kill(pids[1], signal.SIGKILL)
            started.append(time.monotonic())
        return original(self, inputs, step=step)

    config = toy("train.num_steps=4", "checkpoint.every_steps=1", *FP32, *ranks("dp2", 2))
    with monkeypatch.context() as patch:
        patch.setattr(RayWorkers, "update_policy", killing)
        with pytest.raises(WorkerError, match="rank 1 failed in update_policy"):
            go(config, "killed")
    assert time.monotonic() - started[0] < 60
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a rank outlived its run"
    resume(Path("killed"), progress=False)
    assert rewards(Path("killed")) == rewards(whole)


def test_a_mistake_of_the_user_comes_through_as_itself(toy):
    """Each rank raises the same error, and the run ends with it, not with a report on actors."""
    wild = ("optimizer.learning_rate=1e30", "train.max_nonfinite_updates=1")
    config = toy("train.num_steps=4", "model.compute_dtype=float32", *wild, *ranks("dp2", 2))
    with pytest.raises(NonFiniteError, match="not finite"):
        go(config, "wild")
