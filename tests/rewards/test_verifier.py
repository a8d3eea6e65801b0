"""Verifiers and their faults: a fault costs its sample; a broken contract stops the run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plait.batch import Message, Prompt, Sample, Verdict
from plait.errors import ConfigError, VerifierContractError
from plait.rewards import verifier as v


def make_prompt(verifier="answer", answer="4", prefix="", **payload):
    return Prompt("p", "t", (Message("user", "2+2?"),), answer, verifier, payload, prefix)


def make_sample(text, prompt=None, number=0, finish="stop"):
    empty = np.zeros(0)
    prompt = prompt or make_prompt()
    ids, mask = empty.astype(np.int32), empty.astype(bool)
    return Sample(f"s{number}", prompt, (), ids, empty.astype(np.float32), ids, mask, finish, 0, text)


def write_module(folder, body, name="mine"):
    (folder / f"{name}.py").write_text("from plait.rewards.verifier import ABSTAIN, Abstain, Failed\n" + body)


def score_with(tmp_path, body, texts=("a", "b", "c")):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a new one each time: Python imports a file once
    folder.mkdir()
    write_module(folder, body)
    prompt = make_prompt("mine:judge", None)
    return v.Scorer(folder).score([make_sample(text, prompt, i) for i, text in enumerate(texts)])


def kinds(verdicts):
    return [(verdict.kind, verdict.score, verdict.detail) for verdict in verdicts]


def test_scores_keep_the_order_of_mixed_verifiers():
    exact, number = make_prompt("exact", "4"), make_prompt("numeric", "4")
    samples = [make_sample("4.0", number), make_sample("4.0", exact), make_sample("4", exact), make_sample("5", number)]
    details = [verdict.detail for verdict in v.Scorer().score(samples)]
    assert details == ["correct", "wrong", "correct", "wrong"]
    assert v.Scorer().score([]) == []


@pytest.mark.parametrize("text", ["", "  \n", "<think>4", "<think>so 4</think>", "\\boxed{4"])
def test_no_answer_scores_zero(text):
    assert kinds(v.Scorer().score([make_sample(text)])) == [("scored", 0.0, "no_answer")]


def test_format_with_a_prefilled_tag():
    """D15."""
    prompt = make_prompt("format", None, prefix="<think>\n")
    texts = ["2+2 first.</think>\nThe answer is 4.", "</think>4", "2+2 first.</think>", "2+2 first."]
    scores = [verdict.score for verdict in v.Scorer().score([make_sample(t, prompt) for t in texts])]
    assert scores == [1.0, 0.0, 0.0, 0.0]
    in_text = Prompt("p", "t", (Message("user", "2+2?\n<think>\n"),), None, "format")
    assert v.Scorer().score([make_sample(texts[0], in_text)])[0].score == 1.0
    assert v.Scorer().score([make_sample("4", make_prompt("format", None))])[0].score == 0.0


def test_what_a_verifier_sees():
    sample = v.to_verifier_sample(make_sample("ok</think>4", make_prompt(prefix="<think>"), 3, "length"))
    assert (sample.id, sample.completion, sample.answer, sample.truncated) == ("s3", "<think>ok</think>4", "4", True)


def test_several_golds_and_types_come_from_the_payload():
    prompt = make_prompt("answer", ["2", "-2"], answer_rule="any")
    details = [x.detail for x in v.Scorer().score([make_sample("-2", prompt), make_sample("2 or -2", prompt)])]
    assert details == ["correct", "wrong"]
    pair = make_prompt("answer", "1,250", answer_type="tuple", answer_rule=None)
    assert [x.score for x in v.Scorer().score([make_sample("1250", pair), make_sample("(1,250)", pair)])] == [0.0, 1.0]


@pytest.mark.parametrize("gold", [None, "", [], ["2"], True, float("nan"), {"a": 1}])
def test_a_gold_that_cannot_be_used_fails_and_is_not_graded(gold):
    verdict = v.Scorer().score([make_sample("4", make_prompt("answer", gold))])[0]
    assert verdict.kind == "failed"
    assert verdict.reason


def test_user_function_results(tmp_path):
    body = """
def judge(samples):
    return [1, 0.5, True, False, -1.5, ABSTAIN, Abstain, Abstain("unsure"), Failed("no tool")][:len(samples)]
"""
    verdicts = score_with(tmp_path, body, "abcdefghi")
    assert kinds(verdicts)[:5] == [
        ("scored", 1.0, "correct"), ("scored", 0.5, "partial"), ("scored", 1.0, "correct"),
        ("scored", 0.0, "wrong"), ("scored", -1.5, "wrong"),
    ]  # fmt: skip
    assert [verdict.kind for verdict in verdicts[5:]] == ["abstained", "abstained", "abstained", "failed"]
    assert verdicts[7].reason == "unsure"
    assert verdicts[8].reason == "no tool"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("None", "None"),
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("'1.0'", "text '1.0'"),
        ("[1.0]", "list"),
        ("1j", "complex"),
        ("10**400", "too large"),
        ("object()", "object"),
        ("{'score': 1}", "dict"),
        ("__import__('plait.batch').batch.Verdict('good', 1.0)", "good"),
        ("__import__('plait.batch').batch.Verdict('scored', None)", "score"),
        ("__import__('plait.batch').batch.Verdict('scored', float('nan'))", "nan"),
        ("__import__('plait.batch').batch.Verdict('scored', 1.0, parts={'a': None})", '"a"'),
        ("__import__('plait.batch').batch.Verdict('scored', 1.0, parts=None)", "parts"),
        ("__import__('plait.batch').batch.Verdict('scored', 1.0, detail='fine')", "fine"),
    ],
)
def test_invalid_results_fail_alone(tmp_path, result, said):
    verdicts = score_with(tmp_path, f"def judge(samples): return [1.0, {result}, 0.0]")
    assert [verdict.kind for verdict in verdicts] == ["scored", "failed", "scored"]
    assert said in verdicts[1].reason
    assert verdicts[1].score == 0.0


def test_numpy_results_and_own_verdicts(tmp_path):
    scored = score_with(tmp_path, "import numpy as np\ndef judge(samples): return np.array([1.0, 0.0, np.nan])")
    assert [verdict.kind for verdict in scored] == ["scored", "scored", "failed"]
    body = "from plait.batch import Verdict\ndef judge(samples): return [Verdict('scored', 1, parts={'x': 1})] * 3"
    assert score_with(tmp_path, body)[0] == Verdict("scored", 1.0, detail="correct", parts={"x": 1.0})


@pytest.mark.parametrize(
    "error", ["raise KeyError('x')", "raise SystemExit(3)", "1 / 0", "assert False", "judge(samples)"]
)
def test_only_the_raising_sample_fails(tmp_path, error):
    body = f"""
def judge(samples):
    for sample in samples:
        if sample.answer == "b":
            {error}
    return [1.0 for _ in samples]
"""
    verdicts = score_with(tmp_path, body)
    assert [verdict.kind for verdict in verdicts] == ["scored", "failed", "scored"]


def test_the_reason_names_error_and_place(tmp_path):
    body = "\n\ndef judge(samples):\n    return [{}['gold'] for s in samples]\n"
    assert score_with(tmp_path, body)[0].reason == "KeyError: 'gold' (mine.py:5 in <listcomp>)"
    long = "def judge(samples): raise ValueError('x\\n' * 10_000)"
    assert len(score_with(tmp_path, long)[0].reason) <= v.MAX_REASON_CHARS
    broken = "class E(Exception):\n    def __str__(self): raise ValueError\ndef judge(samples): raise E"
    assert score_with(tmp_path, broken)[0].kind == "failed"


def test_keyboard_interrupt_passes(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        score_with(tmp_path, "def judge(samples): raise KeyboardInterrupt")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("[1.0]", "returned 1 results for 3 samples"),
        ("[1.0] * 4", "returned 4 results for 3 samples"),
        ("[]", "returned 0 results for 3 samples"),
        ("None", "returned None instead of a list of 3 results"),
        ("1.0", "a float instead"),
        ("'abc'", "text 'abc' instead"),
        ("{1: 1.0, 2: 1.0, 3: 0.0}", "a dict instead"),
        ("(1.0 for _ in samples)", "a generator instead"),
    ],
)
def test_a_wrong_number_of_results_stops_the_run(tmp_path, result, said):
    calls = "calls = []\ndef judge(samples):\n    calls.append(1)\n"
    with pytest.raises(VerifierContractError, match="mine:judge") as caught:
        score_with(tmp_path, f"{calls}    return {result}")
    assert said in str(caught.value)
    assert len(v.load_verifier("mine:judge", tmp_path / "0").__globals__["calls"]) == 1  # no second try


def test_user_functions_see_samples_without_an_answer(tmp_path):
    body = "def judge(samples): return [1.0 if s.answer is None else 0.0 for s in samples]"
    assert kinds(score_with(tmp_path, body, ("", "4"))) == [("scored", 1.0, "correct"), ("scored", 0.0, "wrong")]
    zero = score_with(tmp_path, "def judge(samples): return [0.0 for s in samples]", ("", "4"))
    assert [verdict.detail for verdict in zero] == ["no_answer", "wrong"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("anser", 'Did you mean "answer"?'),
        ("my_mathh", "answer, exact, numeric, format"),
        ("mine:jugde", 'Did you mean "judge"?'),
        ("mine:number", "not a function"),
        ("mine:no_argument", "one argument"),
        ("mine:two", "one argument"),
        ("mine:later", "async"),
        ("mine:stream", "generator"),
        ("mine:Kind", "a class"),
        ("mine:", "module:function"),
        (":judge", "module:function"),
        ("a:b:c", "module:function"),
        ("../mine:judge", "module:function"),
        ("minee:judge", 'Did you mean "mine"?'),
        ("needs:judge", '"no_such_package", which is not installed'),
        ("broken:judge", "SyntaxError"),
        ("raises:judge", "ZeroDivisionError"),
    ],
)
def test_names_that_lead_nowhere(tmp_path, name, said):
    body = """
number = 3
def judge(samples): return [0.0 for _ in samples]
def no_argument(): return []
def two(samples, gold): return []
async def later(samples): return []
def stream(samples): yield 1
class Kind: pass
"""
    write_module(tmp_path, body)
    write_module(tmp_path, "import no_such_package", "needs")
    write_module(tmp_path, "def (", "broken")
    write_module(tmp_path, "1 / 0", "raises")
    with pytest.raises(ConfigError) as caught:
        v.load_verifier(name, tmp_path)
    assert said in str(caught.value)
    assert name in str(caught.value)


def test_modules_of_the_same_name_in_two_recipe_folders(tmp_path, monkeypatch):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_module(folder, f"def judge(samples): return [{number}.0 for _ in samples]")
        assert v.load_verifier("mine:judge", folder)([None]) == [float(number)]
    monkeypatch.chdir(tmp_path)
    write_module(tmp_path, "def judge(samples): return [7.0 for _ in samples]", "from_cwd")
    assert v.load_verifier("from_cwd:judge", None)([None]) == [7.0]


def test_a_module_must_not_take_a_name_in_use(tmp_path):
    write_module(tmp_path, "def judge(samples): return []", "json")
    with pytest.raises(ConfigError, match="Rename the file"):
        v.load_verifier("json:judge", tmp_path)


def test_controls():
    samples = [make_sample("4", number=i) for i in range(400)]
    scorer = v.Scorer(control="random", seed=5)
    scores = [verdict.score for verdict in scorer.score(samples)]
    assert set(scores) == {0.0, 1.0}
    assert 150 < sum(scores) < 250  # five standard deviations of a fair coin
    assert [verdict.score for verdict in scorer.score(samples[::-1])] == scores[::-1]
    assert [verdict.score for verdict in v.Scorer(control="random", seed=6).score(samples)] != scores
    assert {verdict.score for verdict in v.Scorer(control="constant").score(samples)} == {0.0}


def test_threads_give_the_same_verdicts():
    samples = [make_sample(text) for text in ("4", "4.0", "5", "", "9^9^9")]
    expected = v.Scorer().score(samples)
    scorer = v.Scorer()
    with ThreadPoolExecutor(4) as pool:
        for verdicts in pool.map(lambda _: scorer.score(samples), range(40)):
            assert verdicts == expected
    assert threading.active_count() >= 1
