"""Generated tasks, the catalogue, and mixtures."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from plait.config import EvaluationConfig, ReasoningGymTask, RowsTask
from plait.data.catalogue import known_tasks, suggest
from plait.data.mixture import Mixture
from plait.data.reasoning_gym_task import HASH_SEED_DEPENDENT
from plait.data.task import TaskReport, split_counts
from plait.data.tasks import build_tasks
from plait.errors import ConfigError
from plait.specs.make_reasoning_gym_tasks import catalogue_of_package

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 different questions


def build(tmp_path, *tasks, run_seed=1, num_prompts=16, eval_seed=0):
    evaluation = EvaluationConfig(num_prompts=num_prompts, seed=eval_seed)
    return build_tasks(tasks, run_seed=run_seed, eval_config=evaluation, recipe_dir=tmp_path)


def gym(task="chain_sum", **settings):
    return ReasoningGymTask(source="reasoning_gym", task=task, **settings)


def questions(prompts):
    return [p.messages[0].content for p in prompts]


def refusal(tmp_path, *tasks, **settings):
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, *tasks, **settings)
    return str(caught.value)


def test_catalogue_is_that_of_the_package():
    assert known_tasks() == catalogue_of_package()
    assert list(known_tasks()) == sorted(known_tasks())
    assert known_tasks()["chain_sum"]["category"] == "arithmetic"
    assert set(known_tasks()) >= HASH_SEED_DEPENDENT


def test_suggestions():
    assert suggest("chain_sums")[0] == "chain_sum"
    assert suggest("chainsum")[0] == "chain_sum"
    assert "simple_geometry" in suggest("geometry")
    assert suggest("qqqqqq") == []
    assert suggest("") == []


def test_prompts_are_reproducible_in_any_order(tmp_path):
    task = build(tmp_path, gym()).tasks[0]
    wanted = [5000, 3, 0, 1023, 1024, 3]
    first = [task.train_prompt(i) for i in wanted]
    again = build(tmp_path, gym()).tasks[0]
    assert [again.train_prompt(i) for i in wanted[::-1]] == first[::-1]
    assert first[1].id == "chain_sum/3"
    assert (first[1].verifier, first[1].payload["dataset"]) == ("reasoning_gym", "chain_sum")
    assert first[1].payload["entry"]["answer"] == first[1].answer
    other = build(tmp_path, gym(), run_seed=2).tasks[0]
    assert questions(other.train_prompt(i) for i in range(20)) != questions(task.train_prompt(i) for i in range(20))


def test_neighbouring_seeds_share_nothing(tmp_path):
    """reasoning-gym seeds instance i with seed + i: taking the seeds as they are would repeat nearly everything."""
    long = {"min_terms": 6, "min_digits": 4}
    seen = set()
    for seed in (0, 1, 2):
        mixture = build(tmp_path, gym(params=long), run_seed=seed, eval_seed=seed, num_prompts=50)
        new = set(questions(mixture.eval_prompts(50))) | set(questions(mixture.prompt(i) for i in range(50)))
        assert len(new) == 100
        assert not new & seen
        seen |= new


def test_evaluation_does_not_depend_on_the_run_seed(tmp_path):
    first, second = (build(tmp_path, gym(), run_seed=seed).eval_prompts(16) for seed in (1, 2))
    assert first == second
    assert build(tmp_path, gym(), eval_seed=1).eval_prompts(16) != first
    assert build(tmp_path, gym(), num_prompts=40).eval_prompts(16) == first


def test_training_never_meets_an_evaluation_question(tmp_path):
    mixture = build(tmp_path, gym(params=ONE_DIGIT), num_prompts=60)
    held_out = questions(mixture.eval_prompts(60))
    assert len(set(held_out)) == 60
    trained = [mixture.prompt(i) for i in range(400)]
    assert not set(held_out) & set(questions(trained))
    report = mixture.reports()[0]
    assert 60 < report.dropped_overlap < 200  # 60 of the 200 questions are held out: about 30 % of 400
    assert (report.eval_rows, report.train_rows, report.rows) == (60, None, None)
    assert [mixture.prompt(i) for i in range(400)] == trained
    assert mixture.reports()[0].dropped_overlap == report.dropped_overlap


def test_a_tiny_space_of_instances_gives_an_error_not_a_loop(tmp_path):
    digits = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # the questions 0 to 9
    text = refusal(tmp_path, gym(params=digits), num_prompts=11)
    assert "had only 10" in text
    assert "at most 5" in text
    full = build(tmp_path, gym(params=digits), num_prompts=10)
    with pytest.raises(ConfigError, match="were all held out"):
        full.prompt(0)
    with pytest.raises(ConfigError, match=r"evaluation\.num_prompts"):
        full.check_trainable()
    nine = build(tmp_path, gym(params=digits), num_prompts=9)
    assert len(set(questions(nine.prompt(i) for i in range(30)))) == 1
    nine.check_trainable()


def test_rows_with_generated_evaluation_questions_are_left_out(tmp_path):
    question = questions(build(tmp_path, gym()).eval_prompts(1))[0]
    lines = [f'{{"prompt": {text!r}, "answer": "1"}}'.replace("'", '"') for text in (question, "a", "b")]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    rows = RowsTask(source="rows", path="mine.jsonl", holdout_share=0.0)
    assert build(tmp_path, gym(), rows, num_prompts=40).tasks[1].report.dropped_overlap == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "chain_sums"}, "Did you mean chain_sum"),
        ({"task": "qqqq"}, "None has a similar name"),
        ({"task": "composite"}, "not a task"),
        ({"params": {"min_term": 2}}, "Did you mean min_terms?"),
        ({"params": {"qqqq": 2}}, "It has min_terms, max_terms"),
        ({"params": {"seed": 2}}, "set by the run"),
        ({"params": {"size": 2}}, "set by the run"),
        ({"params": {"min_terms": 0}}, "min_terms must be positive"),
        ({"params": {"min_terms": 9}}, "min_terms = 9"),
        ({"params": {"min_terms": "two"}}, "TypeError"),
        ({"params": {"min_terms": 2.5}}, "cannot be made"),
        ({"params": {"min_terms": None}}, "cannot be made"),
        ({"name": "a/b"}, '"/"'),
        ({"name": " "}, "empty"),
    ],
)
def test_bad_tasks(tmp_path, settings, said):
    assert said in refusal(tmp_path, gym(**{"task": "chain_sum", **settings}))


def test_names_must_differ(tmp_path):
    assert 'both named "chain_sum"' in refusal(tmp_path, gym(), gym(params=ONE_DIGIT))
    (tmp_path / "chain_sum.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    assert "tasks 0 and 1 are both named" in refusal(tmp_path, gym(), RowsTask(source="rows", path="chain_sum.jsonl"))
    assert build(tmp_path, gym(), gym(name="other")).prompt(1).task in ("chain_sum", "other")


@pytest.mark.parametrize("task", ["acre", "word_ladder", "list_functions", "pool_matrix", "gsm_symbolic"])
def test_tasks_with_sizes_and_states_of_their_own(tmp_path, task):
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).random_sample()
    mixture = build(tmp_path, gym(task), num_prompts=4)
    prompts = [mixture.prompt(i) for i in (30_000, 2)]
    assert (random.random(), np.random.random_sample()) == expected  # the global generators were left alone
    assert [mixture.prompt(i) for i in (30_000, 2)] == prompts


def test_failing_instances_are_replaced(tmp_path, monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    original = ChainSumDataset.__getitem__

    def sometimes(self, idx):
        if idx % 3 == 1:
            raise RuntimeError("no luck")
        return original(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", sometimes)
    mixture = build(tmp_path, gym())
    prompts = [mixture.prompt(i) for i in range(12)]
    assert prompts == [mixture.prompt(i) for i in range(12)]
    monkeypatch.setattr(ChainSumDataset, "__getitem__", lambda self, idx: 1 / 0)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        mixture.prompt(500)
    assert "ZeroDivisionError" in refusal(tmp_path, gym())


def test_instances_are_the_same_in_another_process(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path; from plait.data.tasks import build_tasks; import plait.config as c, hashlib\n"
        "names = 'chain_sum', 'pool_matrix', 'acre'\n"
        "tasks = tuple(c.ReasoningGymTask(source='reasoning_gym', task=name) for name in names)\n"
        "m = build_tasks(tasks, run_seed=1, eval_config=c.EvaluationConfig(num_prompts=6), recipe_dir=Path())\n"
        "print(hashlib.sha256(repr([m.prompt(i) for i in range(30)] + m.eval_prompts(6)).encode()).hexdigest())"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1


def test_a_note_where_instances_depend_on_the_hash_seed(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED" in build(tmp_path, gym("word_ladder"), num_prompts=2).reports()[0].notes[0]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert build(tmp_path, gym("word_ladder"), num_prompts=2).reports()[0].notes == ()


# --- mixtures ----------------------------------------------------------------------------------------------


class Counting:
    """A task whose prompts are their index."""

    num_train = None
    held_out = frozenset()

    def __init__(self, name):
        self.name = name
        self.report = TaskReport(name, None, None, 0)

    def train_prompt(self, index):
        return self.name, index

    def eval_prompts(self, limit):
        return [(self.name, f"eval {i}") for i in range(limit)]


def mix(*weights, seed=1):
    return Mixture([Counting("abcdef"[i]) for i in range(len(weights))], weights, seed)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.7, 0.2, 0.1), (1.0, 1e-3), (1 / 3, 2 / 3), (5.0,)])
def test_counts_follow_the_weights_in_every_window(weights):
    mixture = mix(*weights)
    names = [mixture.prompt(n)[0] for n in range(600)]
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        counts = np.cumsum([name == "abcdef"[i] for name in names])
        deviation = counts - share * np.arange(1, 601)
        assert abs(deviation).max() < len(weights)
        window = counts[32:] - counts[:-32]
        assert abs(window - 32 * share).max() <= 2


def test_three_to_one_by_hand():
    """Shares 3 and 1 of 4: a is behind by 3, then 2, then b by 3 against a's 1 (or so), then a again."""
    names = "".join(mix(3.0, 1.0).prompt(n)[0] for n in range(8))
    assert names[:4] == names[4:]
    assert sorted(names[:4]) == list("aaab")


def test_indices_count_up_without_gaps_and_n_is_the_whole_state():
    mixture = mix(0.5, 0.3, 0.2)
    prompts = [mixture.prompt(n) for n in range(100)]
    for name in "abc":
        indices = [index for task, index in prompts if task == name]
        assert indices == list(range(len(indices)))
    assert mix(0.5, 0.3, 0.2).prompt(99) == prompts[99]
    assert mix(5.0, 3.0, 2.0).prompt(99) == prompts[99]
    with pytest.raises(ValueError, match="-1"):
        mixture.prompt(-1)


def test_evaluation_is_split_by_weights_with_one_each_at_least():
    assert split_counts(10, [0.7, 0.2, 0.1]) == [7, 2, 1]
    assert split_counts(64, [1.0]) == [64]
    assert split_counts(3, [1.0, 1.0]) in ([2, 1], [1, 2])
    assert split_counts(10, [1.0, 1e-6]) == [10, 1]
    assert split_counts(1, [1.0, 1.0, 1.0]) == [1, 1, 1]
    for total in range(1, 60):  # a larger total gives no task less
        smaller, larger = split_counts(total, [0.5, 0.3, 0.2]), split_counts(total + 1, [0.5, 0.3, 0.2])
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))
    assert len(mix(3.0, 1.0).eval_prompts(8)) == 8


def test_prompt_ids_are_unique_over_tasks_and_uses(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n".join(f'{{"prompt": "q{i}", "answer": "1"}}' for i in range(20)))
    tasks = gym(), gym("simple_geometry", weight=2.0), RowsTask(source="rows", path="mine.jsonl")
    mixture = build(tmp_path, *tasks)
    prompts = [*(mixture.prompt(n) for n in range(200)), *mixture.eval_prompts(16)]
    assert len({p.id for p in prompts}) == len(prompts)
    assert {p.id.split("/")[0] for p in prompts} == {"chain_sum", "simple_geometry", "mine"}
