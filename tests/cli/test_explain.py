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
    # In turns, except that answers are checked on the host while the devices score them.
    seconds = {stage["name"]: stage["time_s"] for stage in found["stages"]}
    beside = min(seconds["score_verifier"], seconds["old_logprob"])
    assert totals["time_s"] == totals["step_s"] == pytest.approx(sum(seconds.values()) - beside)
    assert found["placement"] == "hybrid"
    busy = sum(seconds[name] for name in ("generate", "old_logprob", "update_policy", "sync_weights"))
    assert found["pools"]["main"]["idle_share"] == pytest.approx(1 - busy / totals["time_s"])
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


DISAGGREGATED = """
[plan.pools]
train = 8
rollout = 8
[plan.place]
generate = "rollout"
[plan.layout]
generate = "dp8"
policy = "fsdp8:full"
"""


def steps_of(tmp_path, plan, *options):
    path = tmp_path / "plan.toml"
    path.write_text(DISAGGREGATED + plan)
    return explained(
        "--model", "Qwen3-8B", "--cluster", "2x8xH100", "--minibatch", "128", "--plan", str(path), *options
    )


def test_schedules_overlap_steps_and_keep_a_shadow_copy(tmp_path):
    found = {
        "sync": steps_of(tmp_path, "", "--steps", "6"),
        "one": steps_of(tmp_path, '[plan.schedule]\nkind = "one_step_off_policy"\n', "--steps", "6"),
        "async": steps_of(tmp_path, '[plan.schedule]\nkind = "fully_async"\nmax_staleness = 3\n', "--steps", "6"),
    }
    assert {name: one["placement"] for name, one in found.items()} == dict.fromkeys(found, "disaggregated")
    seconds = {stage["name"]: stage["time_s"] for stage in found["sync"]["stages"]}
    rest = max(seconds["score_verifier"], seconds["old_logprob"]) + seconds["advantage"] + seconds["update_policy"]
    step_s = seconds["generate"] + rest + seconds["sync_weights"]
    assert found["sync"]["totals"]["time_s"] == pytest.approx(6 * step_s)
    # Six generations in a row, and what follows the last one.
    late = found["async"]["totals"]["time_s"]
    assert late == pytest.approx(6 * seconds["generate"] + rest + seconds["sync_weights"], rel=1e-3)
    assert late <= found["one"]["totals"]["time_s"] < found["sync"]["totals"]["time_s"]
    weights = 2 * 8_190_735_360
    resting = {name: one["pools"]["rollout"]["held"][0]["bytes"] for name, one in found.items()}
    assert resting == {"sync": weights, "one": 2 * weights, "async": 2 * weights}


def test_fused_passes_run_while_the_engine_generates(tmp_path):
    apart = steps_of(tmp_path, "")
    fused = steps_of(tmp_path, '[plan.fuse]\nold_logprob = "sample"\n')
    seconds = {stage["name"]: stage["time_s"] for stage in apart["stages"]}
    assert apart["totals"]["work_op"] == fused["totals"]["work_op"]
    gain = apart["totals"]["time_s"] - fused["totals"]["time_s"]
    assert gain == pytest.approx(
        max(seconds["old_logprob"], seconds["score_verifier"]) - seconds["score_verifier"], rel=0.01
    )
    # One update per step needs no old_logprob.
    single = run("--model", "Qwen3-8B", "--cluster", "2x8xH100", "--plan", str(tmp_path / "plan.toml"))
    assert single.exit_code == EXIT_CONFIG
    assert "names no stage" in single.output


def test_a_shared_trunk_costs_its_head():
    common = ("--model", "Qwen3-8B", "--cluster", "8xH100", "--algorithm", "ppo", "--minibatch", "128")
    own, shared = explained(*common, "--critic", "independent"), explained(*common, "--critic", "shared_trunk")
    assert "update_critic" not in {stage["name"] for stage in shared["stages"]}
    work = {one: {stage["name"]: stage["work_op"] for stage in which["stages"]} for one, which in
            (("own", own), ("shared", shared))}  # fmt: skip
    # Of 4,096 numbers forward and twice backward per token, against eight billion parameters.
    assert 1 < work["shared"]["update_policy"] / work["own"]["update_policy"] < 1 + 1e-5
    assert 1 < work["shared"]["value"] / work["own"]["old_logprob"] < 1 + 1e-5
    assert shared["memory"]["peak_bytes"] < own["memory"]["peak_bytes"]


@pytest.mark.parametrize("schedule", ["sync", "fully_async"])
@pytest.mark.parametrize(
    ("algorithm", "place"),
    [("grpo", ""), ("grpo", 'generate = "b"'), ("ppo", ""), ("ppo", 'generate = "b"'), ("ppo", 'critic = "b"')],
)
def test_stages_and_pools_hold_the_same(tmp_path, algorithm, schedule, place):
    """The sum of a stage's terms is what its pool holds meanwhile, by two ways of counting."""
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[plan]\nschedule = "{schedule}"\n[plan.pools]\na = 8\nb = 8\n[plan.place]\n{place}\n')
    found = explained(
        "--model", "Qwen3-8B", "--cluster", "2x8xH100", "--plan", str(plan), "--algorithm", algorithm, "--minibatch",
        "128",
    )  # fmt: skip
    held = {(name, one["stage"]): one["bytes"] for name, pool in found["pools"].items() for one in pool["held"]}
    stages = [stage for stage in found["stages"] if stage["memory"]]
    assert len(stages) >= 4
    for stage in stages:
        assert held[stage["pool"], stage["name"]] == pytest.approx(stage["memory_bytes"], rel=1e-9), stage["name"]


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


def test_layouts_are_checked_where_the_model_or_the_cluster_is_unknown():
    result = run("--model", "Qwen3-8B", "--cluster", "8xX100", "--plan", "fsdp3tp5", "--max-response-tokens", "99999")
    for words in ('no device "X100"', "tp 5 does not divide the 32 attention heads", "40960 positions"):
        assert words in result.output, words
    result = run("--model", "Qwen3-8", "--cluster", "8xH100", "--plan", "fsdp3tp5", "--response-cv", "nan")
    for words in ('no model "Qwen3-8"', "= 15 devices, and the pool has 8", "response_cv is nan"):
        assert words in result.output, words


def test_schedule_fusion_and_trunk_are_checked(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[plan.schedule]\nkind = "one_step_off_policy"\nmax_staleness = 4\n[plan.fuse]\nadvantage = "token"\n'
    )
    result = run("--model", "Qwen3-8B", "--cluster", "8xH100", "--plan", str(plan), "--critic", "shared_trunk")
    assert result.exit_code == EXIT_CONFIG
    for words in ("one_step_off_policy has max_staleness 1, not 4", "it is 'token'", "grpo has no critic"):
        assert words in result.output, words
    plan.write_text('[plan.layout]\ncritic = "fsdp8"\n[plan.fuse]\nadvantage = "sample"\nnothing = "step"\n')
    result = run(
        "--model", "Qwen3-8B", "--cluster", "8xH100", "--plan", str(plan), "--algorithm", "ppo", "--critic",
        "shared_trunk", "--minibatch", "4",
    )  # fmt: skip
    for words in ("shares the policy's trunk", "names no stage", "not made of whole groups of 8"):
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
        ("critic=fsdp8", "it names neither a stage nor a role"),
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


def test_formulas_of_the_asked_layouts_are_printed():
    result = run("--model", "Llama-3.1-8B", "--cluster", "8xH100", "--plan", "fsdp4tp2", "--symbolic")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    # Three gated matrices, three passes; a full cache of every sequence; ranks that share one copy.
    for words in ("18 B D F L s", "2 B H L M b s", "memory: optimizer", "/(t z)", "update_policy (fsdp4tp2)"):
        assert words in text, words
    listed = json.loads(run("--model", "DeepSeek-V3", "--cluster", "8xH100", "--symbolic", "--json").output)
    assert "r_kv rank of latent keys and values" in listed["legend"]
    assert any("F_e" in formula["expression"] for formula in listed["formulas"])


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
