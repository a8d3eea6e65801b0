"""Algorithms in whole runs: what a critic, a reward model and a controller add to a run on disk and to its resuming."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.errors import ConfigError
from plait.jobs.train import resume, train
from plait.recipe import load_run_config

PPO = (
    "algorithm.name=ppo",
    "algorithm.kl_coefficient=0.05",
    "algorithm.adaptive_kl.target=0.5",
    "algorithm.adaptive_kl.horizon=64",
    "algorithm.critic.learning_rate=2e-2",
    "batch.num_sequences_per_minibatch=8",
    "batch.num_epochs_per_step=2",
)
SHARED = (
    "algorithm.name=ppo",
    "algorithm.critic.kind=shared_trunk",
    "batch.num_sequences_per_minibatch=8",
    "batch.num_epochs_per_step=2",
)


def run(config, **more):
    return train(config, recipe_dir=Path.cwd(), progress=False, **more)


def steps(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def tensors(folder):
    newest = max((Path(folder) / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    return {path.stem: load_file(path) for path in newest.glob("*.safetensors")}


def state(folder):
    newest = max((Path(folder) / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    return json.loads((newest / "state.json").read_text())


@pytest.mark.parametrize("algorithm", [PPO, SHARED], ids=["own critic", "shared trunk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_resumed_equals_never_stopped(toy, algorithm, dtype):
    settings = (*algorithm, f"model.compute_dtype={dtype}", "optimizer.schedule=cosine", "train.num_steps=4")
    run(toy(*settings), run_dir=Path("whole"))
    run(toy(*settings), run_dir=Path("cut"))
    for name in ("step-4", "best.json"):
        path = Path("cut/checkpoints") / name
        assert path.exists()
    _cut_after("cut", 2, toy(*settings))
    assert resume(Path("cut"), progress=False).steps == 4
    first, second = tensors("whole"), tensors("cut")
    assert first.keys() == second.keys() >= {"policy", "optimizer"}
    expected = {"critic", "critic_optimizer"} if algorithm is PPO else {"value_head"}
    assert expected <= first.keys()
    for stem, named in first.items():
        assert all(torch.equal(tensor, second[stem][name]) for name, tensor in named.items()), stem
    assert state("whole")["kl_coefficient"] == state("cut")["kl_coefficient"]
    timed = ("time", "throughput/", "memory/")
    for a, b in zip(steps("whole"), steps("cut"), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }


def _cut_after(folder, step, config):
    """Make the run again, stopped after a step as by a signal."""
    import shutil

    from plait.jobs import stop

    shutil.rmtree(folder)

    def reason(_):
        path = Path(folder) / "metrics.jsonl"
        done = sum('"train"' in line for line in path.read_text().splitlines()) if path.exists() else 0
        return "SIGTERM" if done >= step else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop.StopRequest, "reason", property(reason))
        assert run(config, run_dir=Path(folder)).steps == step


def test_ppo_logs_its_critic_and_its_kl(toy):
    result = run(toy(*PPO, "train.num_steps=3"))
    made = steps(result.run_dir)
    names = {"loss/value", "value/mean", "value/return_mean", "critic/grad_norm", "kl/coefficient", "kl/per_sample"}
    assert all(names <= record.keys() for record in made)
    assert all(record["critic/updates_applied"] == record["updates_applied"] == 4 for record in made)
    assert made[0]["value/mean"] == 0.0  # the head begins at zero
    assert made[-1]["value/mean"] > 0.05
    # Under its target of 0.5 nat the KL is too small, so the coefficient falls by 20 % of 16 / 64 a step.
    assert made[0]["kl/coefficient"] == 0.05
    assert made[1]["kl/coefficient"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 64))
    plan = json.loads((result.run_dir / "plan.json").read_text())
    assert {"value", "update_critic"} <= {stage["name"] for stage in plan["stages"]}
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["algorithm"]["returns"]["lambda_policy"] == 0.95


def test_the_critic_alone_is_trained_in_its_first_steps(toy):
    settings = ("algorithm.name=vapo", "algorithm.critic.pretraining_steps=2", "train.num_steps=3")
    result = run(toy(*settings, "checkpoint.every_steps=1", "checkpoint.keep=9"))
    folders = [result.run_dir / "checkpoints" / f"step-{n}" for n in (1, 2, 3)]
    policies = [load_file(folder / "policy.safetensors") for folder in folders]
    critics = [load_file(folder / "critic.safetensors") for folder in folders]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    assert not all(torch.equal(policies[1][name], policies[2][name]) for name in policies[0])
    assert not all(torch.equal(critics[0][name], critics[1][name]) for name in critics[0])
    assert [record["updates_applied"] for record in steps(result.run_dir)] == [0, 0, 1]


def test_the_critic_learns_to_explain_returns(toy):
    settings = ("algorithm.name=ppo", "algorithm.returns.lambda_critic=1.0", "optimizer.learning_rate=1e-5")
    result = run(
        toy(
            *settings,
            "algorithm.critic.learning_rate=1e-2",
            "algorithm.critic.value_loss=plain",
            "batch.num_epochs_per_step=4",
            "train.num_steps=15",
        )
    )
    made = steps(result.run_dir)
    assert made[0]["loss/value"] > 2 * made[-1]["loss/value"]
    assert abs(made[-1]["value/mean"] - made[-1]["value/return_mean"]) < 0.15


def test_ppo_with_a_shared_trunk_leaves_a_plain_language_model(toy):
    from transformers import AutoModelForCausalLM

    result = run(toy(*SHARED, "train.num_steps=2"))
    exported = AutoModelForCausalLM.from_pretrained(result.run_dir / "model")
    masters = tensors(result.run_dir)
    assert masters["policy"].keys() == dict(exported.named_parameters()).keys()
    assert {"value_head.linear.weight", "value_head.linear.bias"} == masters["value_head"].keys()
    assert masters["value_head"]["value_head.linear.weight"].abs().max() > 0
    assert all(record["loss/value"] > 0 for record in steps(result.run_dir))


def test_a_critic_of_another_family_is_refused(toy, tiny_model, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 5000, "content": "<other>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.path: the tokenizer"):
        run(toy("algorithm.name=ppo", f"algorithm.critic.path={other}", "evaluation.at_start=false"))


def test_greedy_completions_are_scored_and_counted(toy):
    result = run(toy("algorithm.name=remax", "train.num_steps=2"))
    for record in steps(result.run_dir):
        assert record["sampling_rounds"] == 2
        assert 0 <= record["reward/greedy_mean"] <= 1


def test_shaping_is_logged_part_by_part(toy):
    result = run(
        toy(
            "algorithm.shaping.overlong_buffer_share=0.5",
            "algorithm.shaping.length_weight=0.1",
            "algorithm.shaping.format_weight=0.2",
            "train.num_steps=1",
        )
    )
    (record,) = steps(result.run_dir)
    parts = sum(record[f"shaping/{kind}"] for kind in ("overlong", "length", "format"))
    assert record["reward/mean"] == pytest.approx(record["reward/unshaped_mean"] + parts, abs=1e-9)
    # The random model hardly ever ends, so almost all are at the limit: -1 each.
    assert record["shaping/overlong"] < -0.5
    # Never the right format: a fifth of the score is lost.
    assert record["shaping/format"] == pytest.approx(-0.2 * record["reward/unshaped_mean"], abs=1e-9)


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    """A random sequence classifier with one label and the policy's tokenizer."""
    import shutil

    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "helpful"
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for path in Path(tiny_model).glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def recipe_with(model, weight=0.5):
    """The toy recipe, and a reward model."""
    text = Path("toy.toml").read_text() + f'\n[[reward_models]]\npath = "{model}"\nweight = {weight}\n'
    Path("rewarded.toml").write_text(text)
    return "rewarded.toml"


def test_a_reward_model_scores_beside_the_verifier(toy, reward_model):
    toy()
    config = load_run_config(recipe_with(reward_model), ["train.num_steps=2", "verifiers.weight=2.0"])
    result = run(config)
    for record in steps(result.run_dir):
        parts = 2.0 * record["reward/verifier_mean"] + 0.5 * record["reward_model/helpful"]
        assert record["reward/mean"] == pytest.approx(parts, abs=1e-6)
        assert record["time/score_reward_s"] > 0


def test_its_scores_are_those_of_transformers(toy, reward_model):
    from transformers import AutoModelForSequenceClassification

    from plait.jobs.sample import sample
    from plait.models.load import load_reward_model, load_tokenizer
    from plait.roles.reward import RewardModel

    samples = sample(toy(), num_prompts=4, num_samples=2, recipe_dir=Path.cwd())
    model = load_reward_model(str(reward_model), load_tokenizer("starter"), dtype=torch.float32, device="cpu")
    ours = RewardModel("helpful", 1.0, model).scores(samples, max_tokens=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    for one, score in zip(samples, ours, strict=True):
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids_R.tolist()]])
        with torch.no_grad():
            assert score == pytest.approx(theirs(ids).logits.item(), abs=1e-5)


def test_a_score_that_is_not_finite_fails_its_sample_with_the_reason(toy, reward_model, tmp_path):
    import shutil

    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    shutil.copytree(reward_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], torch.nan)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    toy()
    result = run(load_run_config(recipe_with(broken), ["train.num_steps=1"]))
    (record,) = steps(result.run_dir)
    assert (record["verdict/failed"], record["updates_applied"]) == (1.0, 0)
    stored = json.loads((result.run_dir / "samples.jsonl").read_text().splitlines()[0])
    assert stored["verdict"]["reason"] == 'reward model "broken" gave nan'
    assert stored["reward"] == 0
    assert stored["reward_parts"].keys() == {"verifier", "broken"}


def test_the_reward_may_be_the_models_alone(toy, reward_model):
    toy()
    result = run(load_run_config(recipe_with(reward_model, 1.0), ["train.num_steps=1", "verifiers.weight=0"]))
    (record,) = steps(result.run_dir)
    assert record["reward/mean"] == pytest.approx(record["reward_model/helpful"], abs=1e-6)
    assert 0 <= record["reward/verifier_mean"] <= 1  # accuracy stays the verifier's


def test_what_is_no_reward_model_is_refused(toy, tiny_model, reward_model):
    toy()
    with pytest.raises(ConfigError, match=r"reward_models\.0\.path: .* holds Qwen3ForCausalLM, expected a sequence"):
        load_run_config(recipe_with(tiny_model))
    with pytest.raises(ConfigError, match="sum to 0, so nothing is rewarded"):
        load_run_config(recipe_with(reward_model, -1.0))
