"""plait explain: JSON for programs, a table for people, mistakes all at once, and how long it takes."""

import json
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plait.cli import EXIT_CONFIG, app
from plait.cost.model_catalogue import find_model, shipped_models

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, ["explain", *arguments])


def explained(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("model", sorted(shipped_models()))
def test_every_model_has_its_exact_parameters(model):
    found = explained("--model", model, "--cluster", "32x8xH200")
    assert found["model"]["parameters"] == find_model(model).num_parameters
    assert sum(found["model"]["parts"].values()) == found["model"]["parameters"]


def test_published_parameters_and_the_stages_of_grpo():
    found = explained("--model", "Qwen3-8B", "--cluster", "8xH100", "--minibatch", "128")
    assert found["model"]["parameters"] == 8_190_735_360
    names = [stage["name"] for stage in found["stages"]]
    assert names == ["generate", "score_verifier", "old_logprob", "advantage", "update_policy", "sync_weights"]
    for stage in found["stages"]:
        assert stage["low_s"] <= stage["time_s"] <= stage["high_s"]
        assert stage["least_s"] <= stage["low_s"]
    assert found["memory"]["fits"] is True
    assert found["memory"]["peak_bytes"] == max(stage["memory_bytes"] for stage in found["stages"])
    totals = found["totals"]
    assert totals["work_op"] == pytest.approx(sum(stage["work_op"] for stage in found["stages"]))
    assert totals["time_s"] == pytest.approx(sum(stage["time_s"] for stage in found["stages"]))
    assert totals["least_s"] <= totals["low_s"]
    assert totals["parallelism"] == pytest.approx(totals["work_op"] / totals["depth_op"])


def test_ppo_has_a_critic_and_pools_keep_models_apart(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[plan.pools]\ntrain = 8\nrollout = 8\n[plan.place]\ngenerate = "rollout"\n'
        '[plan.layout]\ngenerate = "dp4tp2"\npolicy = { degrees = "fsdp4tp2", sp = true, recompute = "full" }\n'
        'critic = "fsdp8:full"\n'
    )
    common = ("--model", "Qwen2.5-7B", "--cluster", "2x8xH100", "--algorithm", "ppo", "--minibatch", "256")
    found = explained(*common, "--plan", str(plan))
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["update_critic"]["layout"] == "fsdp8:full"
    assert stages["update_policy"]["layout"] == "fsdp4tp2:sp:full"
    assert stages["generate"]["pool"] == "rollout"
    assert stages["generate"]["memory"]["other_state"] == 0
    assert stages["update_policy"]["memory"]["other_state"] > 0
    # Weights travel to other devices: all that the engine needs.
    assert stages["sync_weights"]["sent_bytes"] > 0


def test_all_mistakes_at_once_each_with_numbers_and_a_remedy():
    result = run(
        "--model", "Qwen3-8B", "--cluster", "8xH100", "--plan", "policy=fsdp4tp16:sp,generate=pp2dp4",
        "--max-response-tokens", "90000", "--microbatch-tokens", "100",
    )  # fmt: skip
    assert result.exit_code == EXIT_CONFIG
    lines = result.output.splitlines()
    for words in (
        "= 64 devices, and the pool has 8",
        "tp 16 is above the 8 key/value heads",
        "pp 2 is for training passes",
        "tokens, and Qwen3-8B has 40960 positions",
    ):
        assert any(words in line for line in lines), words
    result = run(
        "--model", "Qwen3-8", "--cluster", "8xH1000", "--algorithm", "grop", "--dtype", "bf17", "--prompts", "0"
    )
    assert result.exit_code == EXIT_CONFIG
    for words in ("Nearest: ", 'no device "H1000"', 'no algorithm "grop"', 'no dtype "bf17"', "prompts is 0"):
        assert words in result.output, words


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("fsdp7", "Set dp_shard to 8, or use 7 devices"),
        ("fsdp8:fast", 'cannot read "fast"'),
        ("fsdp8:sp", "sp splits activations over tp, and tp is 1"),
        ("polcy=fsdp8", "it names neither a stage nor a role"),
        ("pp40fsdp2", "36 layers"),
        ("fsdp8ep4", "the model has none"),
        ("nowhere.toml", "cannot be read"),
    ],
)
def test_plans_that_cannot_be(plan, words):
    result = run("--model", "Qwen3-8B", "--cluster", "8xH100", "--plan", plan)
    assert result.exit_code == EXIT_CONFIG
    assert words in result.output


def test_a_microbatch_holds_the_longest_sequence_and_a_pipeline_is_filled():
    common = ("--model", "Qwen3-8B", "--cluster", "8xH100", "--prompt-tokens", "100", "--max-response-tokens", "5000")
    result = run(*common, "--plan", "fsdp8", "--microbatch-tokens", "1024")
    assert "microbatches of 1024 tokens cannot hold the longest sequence of 5100" in result.output
    result = run(*common, "--plan", "pp8", "--prompts", "2", "--samples-per-prompt", "2", "--microbatch-tokens", "8192")
    assert "1f1b over 8 stages needs as many microbatches" in result.output


def test_a_folder_with_missing_fields(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    result = run("--model", str(tmp_path), "--cluster", "1xH100")
    assert result.exit_code == EXIT_CONFIG
    for field in ("num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert field in result.output


def test_the_table_is_readable_in_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    plans = (
        ("starter", "cpu", None),
        ("Qwen3-8B", "8xH100", None),
        ("Llama-3.1-70B", "4x8xH100", "fsdp8tp4:sp:full"),
        ("DeepSeek-V3", "32x8xH100", "policy=fsdp16pp16ep16:zero1:full,generate=dp8tp32"),
    )
    for model, cluster, plan in plans:
        options = ("--plan", plan, "--prompts", "512") if plan else ()
        result = run("--model", model, "--cluster", cluster, *options)
        assert result.exit_code == 0, result.output
        assert max(len(line.rstrip()) for line in result.output.splitlines()) <= 100
        for words in ("W op", "D op", "rounds", "bottleneck", "Brent", "at peak rates", "W/D", "per device"):
            assert words in result.output, words


def test_formulas_are_printed():
    result = run("--model", "Llama-3.1-8B", "--cluster", "8xH100", "--symbolic")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    # 2 x matrices, 2 N H s^2 for a causal sequence's scores and sums; KV 2 M H L; 18 bytes of state.
    for words in ("6 B D F L s", "2 B H L N s^2", "18 P/z", "bytes of KV cache read and written", "(B + F) (p - 1)/v"):
        assert words in text, words
    listed = json.loads(run("--model", "DeepSeek-V3", "--cluster", "8xH100", "--symbolic", "--json").output)
    assert any(formula["what"].startswith("expert parallelism") for formula in listed["formulas"])


def test_it_answers_in_under_a_second_and_loads_nothing_heavy():
    code = (
        "import sys; from plait.cli import app\n"
        "try: app(['explain', '--model', 'DeepSeek-V3', '--cluster', '32x8xH100', '--json'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'sympy', 'reasoning_gym'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor seconds: what a machine takes that does nothing else.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
