"""Rows: what is read, what is refused with which words, and what is held out."""

import json
import os
import random
import subprocess
import sys

import pytest

from plait.batch import Message, Prompt
from plait.config import EvaluationConfig, RowsTask
from plait.data.row_checks import KNOWN_FIELDS, RowChecker
from plait.data.row_files import RawRow
from plait.data.tasks import build_tasks
from plait.errors import ConfigError, DataError
from plait.rewards.verifier import VerifierSample, load_row_verifier

ROW = {"prompt": "What is 3+4?", "answer": "7"}


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def load(path, *, run_seed=1, num_prompts=64, **settings):
    config = RowsTask(source="rows", path=path.name, **settings)
    evaluation = EvaluationConfig(num_prompts=num_prompts)
    return build_tasks((config,), run_seed=run_seed, eval_config=evaluation, recipe_dir=path.parent).tasks[0]


def load_rows(tmp_path, *rows, **settings):
    return load(write(tmp_path / "rows.jsonl", rows), **settings)


def refusal(tmp_path, *rows, **settings):
    with pytest.raises(DataError) as caught:
        load_rows(tmp_path, *rows, **settings)
    return str(caught.value)


def many(count, **fields):
    return [{"prompt": f"What is {i}+1?", "answer": str(i + 1), **fields} for i in range(count)]


# --- field cases D01 to D15 -------------------------------------------------------------------------------


def test_d01_missing_gold(tmp_path):
    text = refusal(tmp_path, ROW, {"prompt": "What is 3+4?"})
    assert "row 1" in text
    assert 'the field "answer" is missing' in text
    assert '"answer_rule"' in text  # the expected names


@pytest.mark.parametrize("gold", ["", "   ", "\n"])
def test_d02_empty_gold(tmp_path, gold):
    assert "empty" in refusal(tmp_path, {**ROW, "answer": gold})


def test_d04_null_prompt(tmp_path):
    text = refusal(tmp_path, ROW, {"prompt": None, "answer": "7"})
    assert "row 1" in text
    assert "null" in text


def test_d05_unknown_verifier(tmp_path):
    text = refusal(tmp_path, {**ROW, "verifier": "my_mathh"})
    assert "my_mathh" in text
    assert "answer, exact, numeric, format" in text
    with pytest.raises(ConfigError, match='Did you mean "numeric"'):
        load_rows(tmp_path, ROW, verifier="numric")


def test_d09_duplicates_are_two_groups(tmp_path):
    task = load_rows(tmp_path, ROW, ROW)
    assert {task.train_prompt(0).id, task.train_prompt(1).id} == {"rows/0@0", "rows/1@0"}
    assert task.report.duplicates == 1
    assert task.report.rows == task.report.train_rows == 2


def test_d11_several_golds(tmp_path):
    row = {"prompt": "Give a root of x^2=4.", "answer": ["2", "-2"], "answer_rule": "any"}
    prompt = load_rows(tmp_path, row).train_prompt(0)
    assert prompt.answer == ["2", "-2"]
    assert prompt.payload["answer_rule"] == "any"
    del row["answer_rule"]
    assert '"any" or "all"' in refusal(tmp_path, row)


def test_d14_ambiguous_comma(tmp_path):
    prompt = load_rows(tmp_path, {"prompt": "How many?", "answer": "1,250", "answer_type": "tuple"}).train_prompt(0)
    assert prompt.payload == {"answer_type": "tuple"}
    assert load_rows(tmp_path, {"prompt": "How many?", "answer": "1,250"}).train_prompt(0).answer == "1,250"


def test_d15_prefilled_reasoning(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\n"}]
    for key in ("prompt", "messages"):
        prompt = load_rows(tmp_path, {key: chat}, verifier="format").train_prompt(0)
        assert prompt.messages == (Message("user", "2+2?"),)
        assert prompt.prefix == "<think>\n"


# --- families of bad rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "answer": "b"', "not valid JSON"),
        ('{"prompt": "a", "answer": "b"} x', "Extra data"),
        ('{"prompt": "a", "answer": "b"}{"prompt": "a"}', "Extra data"),
        ("{'prompt': 'a'}", "not valid JSON"),
        ('{"prompt": "a", "answer": NaN}', "NaN is not a JSON value"),
        ('{"prompt": "a", "answer": -Infinity}', "Infinity"),
        ('{"prompt": "a", "answer": 1e999}', "finite"),
        ('{"prompt": "a", "answer": "1", "answer": "2"}', '"answer" is given more than once'),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "JSON list"),
        ("3", "JSON int"),
        ("null", "JSON NoneType"),
        ('"text"', "JSON str"),
        ("prompt,answer", "not valid JSON"),
        ("\x00", "not valid JSON"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, said):
    text = refusal(tmp_path, ROW, line)
    assert "rows.jsonl:2 (row 1)" in text
    assert said in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, '"prompt" is missing'),
        ({"question": "a", "answer": "b"}, 'Found "question", "answer"'),
        ({"promt": "a", "answer": "b"}, 'Rename "promt" to "prompt"'),
        ({"prompt": "a", "answers": "b"}, 'Rename "answers" to "answer"'),
        ({"prompt": "", "answer": "b"}, '"prompt": is empty'),
        ({"prompt": " \n", "answer": "b"}, '"prompt": is empty'),
        ({"prompt": 3, "answer": "b"}, "is a int; expected text or a list"),
        ({"prompt": True, "answer": "b"}, "is a bool"),
        ({"prompt": {"role": "user", "content": "a"}, "answer": "b"}, "is a dict"),
        ({"prompt": "\ud800", "answer": "b"}, "surrogate"),
        ({"prompt": [], "answer": "b"}, "no message of the user"),
        ({"prompt": ["a"], "answer": "b"}, "prompt[0]"),
        ({"prompt": [[{"role": "user", "content": "a"}]], "answer": "b"}, "is a list; expected an object"),
        ({"prompt": [None], "answer": "b"}, "NoneType"),
        ({"prompt": [{"role": "user"}], "answer": "b"}, 'lacks "content"'),
        ({"prompt": [{"content": "a"}], "answer": "b"}, 'lacks "role"'),
        ({"prompt": [{"from": "human", "value": "a"}], "answer": "b"}, 'has "from"'),
        ({"prompt": [{"role": "human", "content": "a"}], "answer": "b"}, "system, user, assistant"),
        ({"prompt": [{"role": "User", "content": "a"}], "answer": "b"}, "'User'"),
        ({"prompt": [{"role": 1, "content": "a"}], "answer": "b"}, "a int"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "b"}, "is empty"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "b"}, 'lacks "content"'),
        ({"prompt": [{"role": "user", "content": [{"text": "a"}]}], "answer": "b"}, "is a list, not text"),
        ({"prompt": [{"role": "system", "content": "a"}], "answer": "b"}, "no message of the user"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": "b"}, "before the assistant's"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "answer": "b"},
            "not the first message",
        ),
        ({"messages": "a", "answer": "b"}, "expected a list of messages"),
        ({"messages": None, "answer": "b"}, "null"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "answer": "b"}, 'beside "prompt"'),
        ({"prompt": "a", "answer": None}, "null"),
        ({"prompt": "a", "answer": True}, "bool"),
        ({"prompt": "a", "answer": {"value": 1}}, "dict"),
        ({"prompt": "a", "answer": []}, "empty list"),
        ({"prompt": "a", "answer": [], "answer_rule": "any"}, "empty list"),
        ({"prompt": "a", "answer": ["1", None], "answer_rule": "any"}, "NoneType"),
        ({"prompt": "a", "answer": ["1", ""], "answer_rule": "any"}, "empty answer"),
        ({"prompt": "a", "answer": [["1"]], "answer_rule": "all"}, "list"),
        ({"prompt": "a", "answer": ["1", False], "answer_rule": "all"}, "bool"),
        ({"prompt": "a", "answer": ["1", "2"], "answer_rule": "some"}, "any, all"),
        ({"prompt": "a", "answer": ["1", "2"], "answer_rule": True}, "a bool"),
        ({"prompt": "a", "answer": "1", "answer_rule": "any"}, "not a list"),
        ({"prompt": "a", "answer": "\udc00"}, "surrogate"),
        ({"prompt": "a", "answer": ["b", "\udc00"], "answer_rule": "any"}, "surrogate"),
        ({"prompt": "a", "answer": "1", "answer_type": "numbr"}, "auto, number, tuple, text"),
        ({"prompt": "a", "answer": "1", "answer_type": 3}, "a int"),
        ({"prompt": "a", "answer": "seven", "answer_type": "number"}, "cannot be read as a number"),
        ({"prompt": "a", "answer": "7", "answer_type": "tuple"}, "cannot be read as a tuple"),
        ({"prompt": "a", "answer": "seven", "verifier": "numeric"}, "cannot be read as a number"),
        ({"prompt": "a", "answer": "1", "verifier": 3}, "not a name"),
        ({"prompt": "a", "answer": "1", "verifier": ""}, "no verifier of that name"),
        ({"prompt": "a", "answer": "1", "verifier": "reasoning"}, "Known are"),
        ({"prompt": "a", "answer": "1", "verifier": "no_module:f"}, 'no module "no_module"'),
        ({"prompt": "a", "answer": "1", "id": ""}, '"id": is empty'),
        ({"prompt": "a", "answer": "1", "id": 1.5}, "is a float"),
        ({"prompt": "a", "answer": "1", "id": True}, "is a bool"),
        ({"prompt": "a", "answer": "1", "id": ["x"]}, "is a list"),
        ({"prompt": "a", "answer": "1", "id": "0"}, "also the id of rows.jsonl:1 (row 0)"),
        ({"prompt": "a", "answer": "1", "id": 0}, "also the id of"),
    ],
)
def test_bad_rows(tmp_path, row, said):
    text = refusal(tmp_path, ROW, row)
    assert "rows.jsonl:2 (row 1)" in text
    assert said in text
    assert "1 bad row. Nothing was started" in text


def test_reasoning_gym_scorer_is_not_for_rows(tmp_path):
    assert "no verifier of that name" in refusal(tmp_path, {**ROW, "verifier": "reasoning_gym"})
    with pytest.raises(ConfigError, match="no verifier of that name"):
        load_rows(tmp_path, ROW, verifier="reasoning_gym")


def test_all_bad_rows_are_reported_at_once(tmp_path):
    rows = [*many(5), *({"prompt": f"q{i}", "answer": ""} for i in range(57)), {"prompt": "", "answer": None}]
    text = refusal(tmp_path, *rows)
    assert text.count("is empty") == 20
    assert "58 bad rows, the first 20 are listed above" in text
    both = refusal(tmp_path, {"prompt": "", "answer": ""})
    assert 'field "prompt"' in both
    assert 'field "answer"' in both


def test_faults_of_both_files_and_all_tasks_are_reported_together(tmp_path):
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"answer": "a"}])
    write(tmp_path / "c.jsonl", ["{"])
    tasks = (
        RowsTask(source="rows", path="a.jsonl", eval_path="b.jsonl"),
        RowsTask(source="rows", path="c.jsonl"),
        RowsTask(source="rows", path="d.jsonl"),
    )
    with pytest.raises(DataError) as caught:
        build_tasks(tasks, run_seed=1, eval_config=EvaluationConfig(), recipe_dir=tmp_path)
    for name in ("a.jsonl:1", "b.jsonl:1", "c.jsonl:1", "d.jsonl: there is no such file"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b"\n \r\n\n", "has no rows"),
        ("rows.jsonl", b"\xef\xbb\xbf", "has no rows"),
        ("rows.jsonl", '{"prompt": "a", "answer": "b"}'.encode("utf-16"), "UTF-16"),
        ("rows.jsonl", b'{"prompt": "\xff", "answer": "b"}', "not UTF-8"),
        ("rows.csv", b"prompt,answer\na,b\n", '".csv"'),
        ("rows", b"{}", "is expected"),
        ("rows.parquet", b"PAR1 nonsense", "cannot be read as Parquet"),
        ("rows.parquet", b"", "cannot be read as Parquet"),
    ],
)
def test_bad_files(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(path)
    assert said in str(caught.value)
    assert name in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    write(tmp_path / "train.jsonl", [ROW])
    with pytest.raises(DataError, match=r'Did you mean "train\.jsonl"'):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="does not exist either"):
        load(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        load(tmp_path / "folder.jsonl")


def test_random_rows_are_accepted_or_refused_and_nothing_else():
    """Any JSON value in any field: each row is either usable by its verifier, or has a violation with its place."""
    source = random.Random(3)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    numbers = [0, -3, 2.5, True, 10**40]
    texts = ["", " ", "7", "1,250", "x y", "\ud800", "any", "all", "tuple", "number", "text", "exact", "numeric", "a:b"]
    values = [None, *numbers, *texts, [], {}, ["2", "-2"], [2, [3]], [None], [{}], chat, chat[1:], "answer", "format"]
    checker = RowChecker("answer", lambda name: load_row_verifier(name, None))
    num_accepted = 0
    for index in range(4000):
        fields = {name: source.choice(values) for name in KNOWN_FIELDS if source.random() < 0.15}
        fields |= {} if source.random() < 0.2 else {"prompt": "q"}
        fields |= {} if source.random() < 0.3 else {"answer": source.choice(["7", 2, ["2", "-2"]])}
        before = len(checker.violations)
        row = checker.check(RawRow(index, f"file (row {index})", fields))
        assert (row is None) == (len(checker.violations) > before)
        assert all(f"(row {index})" in violation.where for violation in checker.violations[before:])
        if row is None:
            continue
        num_accepted += 1
        assert row.messages[-1].role in ("user", "system")
        if row.verifier in ("answer", "exact", "numeric"):
            golds = row.answer if isinstance(row.answer, list) else [row.answer]
            given = ", ".join(map(str, golds)) if row.payload.get("answer_rule") == "all" else str(golds[0])
            prompt = Prompt("p", "t", row.messages, row.answer, row.verifier, row.payload)
            sample = VerifierSample("s", prompt, given, given.strip(), False)
            assert load_row_verifier(row.verifier, None)([sample]) == [1.0], row
    assert 300 < num_accepted < 3000


# --- rows that are accepted -------------------------------------------------------------------------------


def test_unicode_separators_bom_crlf_and_blank_lines(tmp_path):
    odd = "a\u2028b\u2029c\x0bd\x85e\u200f \U0001f600"
    lines = [json.dumps({"prompt": odd + str(i), "answer": odd}, ensure_ascii=False) for i in range(3)]
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\n  \n".join(lines).encode())
    task = load(tmp_path / "rows.jsonl", holdout_share=0.0)
    assert {task.train_prompt(i).messages[0].content for i in range(3)} == {odd + str(i) for i in range(3)}


@pytest.mark.parametrize("gold", [7, 7.5, -0.25, 10**30, "7", " 7 ", "9" * 5000, "a\nb"])
def test_golds_keep_their_type(tmp_path, gold):
    prompt = load_rows(tmp_path, {"prompt": "q", "answer": gold}).train_prompt(0)
    assert prompt.answer == gold
    assert type(prompt.answer) is type(gold)


def test_ids_payload_and_null_fields(tmp_path):
    nulls = dict.fromkeys(("answer_type", "answer_rule", "verifier", "messages"))
    row = {**ROW, "id": "x/1", "level": [3], **nulls}
    prompt = load_rows(tmp_path, row).train_prompt(2)
    assert prompt.id == "rows/x/1@2"
    assert prompt.payload == {"answer_type": None, "answer_rule": None, "level": [3]}
    assert prompt.verifier == "answer"


def test_chats(tmp_path):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?", "name": None},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    prompt = load_rows(tmp_path, {"messages": chat, "answer": 4}).train_prompt(0)
    assert [m.role for m in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.prefix == ""


def test_golds_are_optional_where_nothing_needs_them(tmp_path):
    (tmp_path / "judges.py").write_text("def judge(samples): return [0.0 for _ in samples]")
    prompt = load_rows(tmp_path, {"prompt": "q"}, verifier="judges:judge").train_prompt(0)
    assert (prompt.answer, prompt.verifier) == (None, "judges:judge")
    gold = {"any": ["thing", None, True]}
    assert load_rows(tmp_path, {"prompt": "q", "answer": gold}, verifier="judges:judge").train_prompt(0).answer == gold
    assert load_rows(tmp_path, {"prompt": "q", "verifier": "format"}).train_prompt(0).answer is None
    assert "empty" in refusal(tmp_path, {"prompt": "q", "answer": ""}, verifier="judges:judge")


def test_a_field_that_is_nearly_one_with_a_meaning_is_noted(tmp_path):
    notes = load_rows(tmp_path, {**ROW, "answer_typ": "tuple", "source": "book"}).report.notes
    assert 'if you meant "answer_type", rename it' in notes[0]
    assert not any("source" in note for note in notes)


def test_huge_prompts_are_left_to_the_caller(tmp_path):
    text = "word " * 200_000
    assert load_rows(tmp_path, {"prompt": text, "answer": "1"}).train_prompt(0).messages[0].content == text


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    rows = [
        {"prompt": "a", "messages": None, "answer": "1", "answer_type": None, "level": 2},
        {"prompt": None, "messages": chat, "answer": "1,2", "answer_type": "tuple", "level": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    task = load(tmp_path / "rows.parquet", holdout_share=0.0)
    prompts = {p.id: p for p in (task.train_prompt(0), task.train_prompt(1))}
    assert prompts["rows/0@0"].payload == {"answer_type": None, "level": 2}
    assert prompts["rows/1@0"].prefix == "<think>"
    bad = [{"prompt": "a", "answer": float("nan")}, {"prompt": "a", "answer": None}, {"prompt": None, "answer": 1.0}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "rows.parquet")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "rows.parquet")
    for said in ("(row 0)", "finite", "(row 1)", "(row 2)", "null", "3 bad rows"):
        assert said in str(caught.value)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"plait\[parquet\]"):
        load(tmp_path / "rows.parquet")


# --- holding out, order, reproducibility -------------------------------------------------------------------


def questions(prompts):
    return {p.messages[0].content for p in prompts}


def all_train(task):
    return [task.train_prompt(i) for i in range(task.num_train)]


def test_holdout_depends_on_the_rows_only(tmp_path):
    rows = many(200)
    first = load_rows(tmp_path, *rows)
    held_out = questions(first.eval_prompts(200))
    assert 5 <= len(held_out) <= 40  # 20 expected, standard deviation 4.2
    assert not held_out & questions(all_train(first))
    assert len(held_out) + first.num_train == 200
    other = load_rows(tmp_path, *rows[::-1], run_seed=9)
    assert questions(other.eval_prompts(200)) == held_out
    more = load_rows(tmp_path, *rows, *[{**r, "prompt": "More: " + r["prompt"]} for r in rows])
    assert held_out <= questions(more.eval_prompts(400))
    twice = load_rows(tmp_path, *rows, *rows)
    assert questions(twice.eval_prompts(400)) == held_out
    assert not held_out & questions(all_train(twice))
    assert twice.report.duplicates == 200


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.999])
def test_small_files_have_both_sides(tmp_path, count, share):
    task = load_rows(tmp_path, *many(count), holdout_share=share)
    assert task.num_train >= 1
    assert len(task.eval_prompts(64)) >= 1


def test_one_row_is_for_training(tmp_path):
    task = load_rows(tmp_path, ROW)
    assert (task.num_train, task.eval_prompts(64)) == (1, [])
    assert "nothing is held out" in task.report.notes[0]


def test_nothing_held_out_and_everything_held_out(tmp_path):
    assert load_rows(tmp_path, *many(9), holdout_share=0.0).num_train == 9
    path = write(tmp_path / "rows.jsonl", many(9))
    config = RowsTask(source="rows", path=path.name, holdout_share=1.0)
    mixture = build_tasks((config,), run_seed=1, eval_config=EvaluationConfig(), recipe_dir=tmp_path)
    assert len(mixture.eval_prompts(64)) == 9
    with pytest.raises(ConfigError, match="no row is left for training"):
        mixture.check_trainable()
    with pytest.raises(ConfigError, match="no row is left for training"):
        mixture.prompt(0)


def test_overlap_with_the_evaluation_file_is_dropped_and_counted(tmp_path):
    write(tmp_path / "eval.jsonl", [{"prompt": "  What is\n3+1? ", "answer": "4"}, {"prompt": "other", "answer": "5"}])
    task = load_rows(tmp_path, *many(6), *many(6), eval_path="eval.jsonl", holdout_share=0.5)
    assert task.report.dropped_overlap == 2
    assert task.report.train_rows == task.num_train == 10
    assert task.report.eval_rows == 2
    assert "What is 3+1?" not in questions(all_train(task))
    assert any("holdout_share" in note for note in task.report.notes)


def test_a_prefix_does_not_hide_an_overlap(tmp_path):
    user = {"role": "user", "content": "q"}
    write(tmp_path / "eval.jsonl", [{"prompt": "q", "answer": "1"}])
    rows = [{"prompt": [user, {"role": "assistant", "content": "<think>"}], "answer": "1"}, ROW]
    task = load_rows(tmp_path, *rows, eval_path="eval.jsonl")
    assert task.report.dropped_overlap == 1


def test_another_tasks_held_out_prompts_are_left_out_too(tmp_path):
    write(tmp_path / "a.jsonl", many(40))
    write(tmp_path / "b.jsonl", many(80))
    shares = {"a.jsonl": 0.5, "b.jsonl": 0.05}
    tasks = tuple(RowsTask(source="rows", path=name, holdout_share=share) for name, share in shares.items())
    mixture = build_tasks(tasks, run_seed=1, eval_config=EvaluationConfig(num_prompts=2), recipe_dir=tmp_path)
    first, second = mixture.tasks
    assert not questions(first.eval_prompts(99)) & questions(all_train(second))
    assert second.report.dropped_overlap > 0


def test_every_epoch_has_every_row_once_in_a_new_order(tmp_path):
    task = load_rows(tmp_path, *many(50), holdout_share=0.0)
    epochs = [[task.train_prompt(50 * epoch + i).messages[0].content for i in range(50)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(len(set(epoch)) == 50 for epoch in epochs)
    assert len({task.train_prompt(i).id for i in range(150)}) == 150
    again = load_rows(tmp_path, *many(50), holdout_share=0.0)
    assert [again.train_prompt(i) for i in (120, 3, 77)] == [task.train_prompt(i) for i in (120, 3, 77)]
    other = load_rows(tmp_path, *many(50), holdout_share=0.0, run_seed=2)
    assert [other.train_prompt(i).messages[0].content for i in range(50)] != epochs[0]


def test_evaluation_prompts_are_nested_and_distinct_from_training_ids(tmp_path):
    task = load_rows(tmp_path, *many(100), holdout_share=0.5)
    assert task.eval_prompts(99)[:7] == task.eval_prompts(7)
    assert not {p.id for p in task.eval_prompts(99)} & {p.id for p in all_train(task)}
    assert task.eval_prompts(0) == []


def test_the_same_in_another_process(tmp_path):
    task = load_rows(tmp_path, *many(60))
    code = (
        "import sys; from pathlib import Path; from plait.data.tasks import build_tasks\n"
        "from plait.config import EvaluationConfig, RowsTask\n"
        "mixture = build_tasks((RowsTask(source='rows', path='rows.jsonl'),), run_seed=1, "
        "eval_config=EvaluationConfig(), recipe_dir=Path(sys.argv[1]))\n"
        "print([p.id for p in mixture.eval_prompts(64)], [mixture.prompt(i).id for i in range(90)])\n"
        "print(any(name in sys.modules for name in ('torch', 'reasoning_gym', 'pyarrow')))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    expected = f"{[p.id for p in task.eval_prompts(64)]} {[task.train_prompt(i).id for i in range(90)]}\nFalse\n"
    assert result.stdout == expected


# --- preferences ------------------------------------------------------------------------------------------

PAIR = {"prompt": "What is 3+4?", "answer": "7", "chosen": "3+4 = 7", "rejected": "8"}


def load_pairs(tmp_path, *rows, is_evaluated=True, **settings):
    path = write(tmp_path / "pairs.jsonl", rows)
    config = RowsTask(source="preferences", path=path.name, **settings)
    evaluation = EvaluationConfig(at_start=is_evaluated, at_end=is_evaluated)
    return build_tasks((config,), run_seed=1, eval_config=evaluation, recipe_dir=tmp_path).tasks[0]


def test_rows_of_preferences(tmp_path):
    others = [{**PAIR, "prompt": f"What is {i}+1?"} for i in range(9)]
    task = load_pairs(tmp_path, {**PAIR, "source": "mine"}, *others, holdout_share=0.3)
    prompts = [task.train_prompt(n) for n in range(task.num_train)]
    assert {prompt.preference for prompt in prompts} == {("3+4 = 7", "8")}
    assert all(not {"chosen", "rejected"} & prompt.payload.keys() for prompt in prompts)
    held_out = task.eval_prompts(9)
    assert held_out
    assert all(prompt.preference is None for prompt in held_out)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": None}, 'field "chosen": is null, not text'),
        ({"rejected": 8}, 'field "rejected": is a int, not text'),
        ({"rejected": [{"role": "assistant", "content": "8"}]}, 'field "rejected": is a list, not text'),
        ({"chosen": "  "}, 'field "chosen": is empty'),
        ({"chosen": "\ud800"}, "half of a surrogate pair"),
        ({"rejected": "3+4 = 7"}, 'is the same text as "chosen"'),
    ],
)
def test_bad_rows_of_preferences(tmp_path, row, said):
    with pytest.raises(DataError) as caught:
        load_pairs(tmp_path, PAIR, {**PAIR, **row})
    assert said in str(caught.value)
    assert "row 1" in str(caught.value)


def test_a_missing_answer_of_a_pair_is_found_under_its_other_name_with_all_other_faults(tmp_path):
    with pytest.raises(DataError) as caught:
        load_pairs(tmp_path, {"prompt": "a", "answer": "1", "chosn": "x", "rejected": "y"}, {"chosen": "x"})
    text = str(caught.value)
    assert 'the field "chosen" is missing. Rename "chosn" to "chosen".' in text
    assert 'and "chosen" and "rejected"' in text
    assert all(f'the field "{name}" is missing' in text for name in ("rejected", "prompt", "answer"))


def test_an_answer_is_needed_only_where_the_run_evaluates(tmp_path):
    bare = {name: PAIR[name] for name in ("prompt", "chosen", "rejected")}
    with pytest.raises(DataError, match='the field "answer" is missing'):
        load_pairs(tmp_path, bare)
    assert load_pairs(tmp_path, bare, is_evaluated=False).train_prompt(0).answer is None


def test_plain_rows_keep_what_preferences_would_read_as_payload(tmp_path):
    assert load_rows(tmp_path, PAIR).train_prompt(0).payload == {"chosen": "3+4 = 7", "rejected": "8"}
