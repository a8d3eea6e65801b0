"""Verifiers that hang, crash, exit, eat memory, print or fork cost their own sample and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from plait.batch import Message, Prompt, Sample
from plait.errors import ConfigError, VerifierContractError, VerifierFailureError
from plait.rewards.pool import VerifierPool

pytestmark = pytest.mark.timeout(60)

MARK = "PLAIT_TEST_MARK"
MEMORY_BYTES = 768 * 2**20

FAULTS = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path

def burn():
    while True: pass

def backtrack():  # holds the interpreter's lock all the time
    re.match("(a+)+$", "a" * 60 + "b")

def allocate():
    kept = []
    while True: kept.append(bytearray(2**20))

def allocate_small():
    kept = []
    while True: kept.append(len(kept))

def overflow():
    sys.setrecursionlimit(10**9)
    eval("(" * 90 + ")" * 90)
    ctypes.PYFUNCTYPE(ctypes.c_int)(overflow)()

def print_gigabyte():
    for _ in range(1024):
        print("x" * 2**20)
        print("x" * 1000, file=sys.stderr)

def fork_survivor():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)

def orphan():  # in a session of its own, and its parent is gone
    subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen("
        "[sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)"])

def fork_and_hang():
    fork_survivor()
    orphan()
    time.sleep(1000)

def stop_warden():
    os.kill(os.getppid(), signal.SIGSTOP)
    fork_and_hang()

def interrupt(): raise KeyboardInterrupt

ACTIONS = {
    "sleep": lambda: time.sleep(1000),
    "burn": burn,
    "backtrack": backtrack,
    "allocate": allocate,
    "allocate_small": allocate_small,
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "raise": lambda: {}["gold"],
    "interrupt": interrupt,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "overflow": overflow,
    "close": lambda: os.closerange(3, 1000),
    "kill_warden": lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(1000),
    "print": print_gigabyte,
    "fork": fork_survivor,
    "orphan": orphan,
    "both_return": lambda: os.fork(),
    "fork_and_hang": fork_and_hang,
    "stop_warden": stop_warden,
    "touch": lambda: Path(os.environ["PLAIT_TOUCH"]).touch(),
}

def judge(samples):
    for sample in samples:
        for word in (sample.answer or "").split():
            if word in ACTIONS: ACTIONS[word]()
    return [1.0 for _ in samples]
"""


def make_sample(text, number, verifier="faulty:judge"):
    prompt = Prompt(f"p{number}", "t", (Message("user", "?"),), "4", verifier)
    none = np.zeros(0, np.int32)
    mask, logprobs = none.astype(bool), none.astype(np.float32)
    return Sample(f"s{number}", prompt, (), none, logprobs, none, mask, "stop", 0, text)


def samples_of(*texts, verifier="faulty:judge"):
    return [make_sample(text, number, verifier) for number, text in enumerate(texts)]


def marked():
    """Processes that inherited this test's mark."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if MARKED.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass
    return found


def wait_until(condition, limit_s):
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.01)


MARKED = f"{MARK}={uuid.uuid4()}"


def children():
    """Processes whose parent is this one, zombies included; other tests of the session may keep some."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """No process, zombie, thread or descriptor is left by a test."""
    monkeypatch.setenv(*MARKED.split("="))
    num_fds, own = len(os.listdir("/proc/self/fd")), children()
    yield
    assert marked() == []
    assert children() <= own  # not even a zombie
    assert "verifier-supervisor" not in [thread.name for thread in threading.enumerate()]
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.fixture
def open_pool(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTS)

    def make(timeout_s=1.0, num_workers=2, **changes):
        settings = {"memory_bytes": MEMORY_BYTES, "start_timeout_s": 20.0} | changes
        return VerifierPool(tmp_path, num_workers=num_workers, timeout_s=timeout_s, **settings)

    return make


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sleep", "no result within 0.5 s; the worker was stopped and replaced"),
        ("burn", "no result within 0.5 s; the worker was stopped and replaced"),
        ("backtrack", "no result within 0.5 s; the worker was stopped and replaced"),
        ("allocate", "more memory than 768 MiB"),
        ("os._exit", "the worker died (exit status 3)"),
        ("sys.exit", "SystemExit: 3"),
        ("raise", "KeyError: 'gold' (faulty.py"),
        ("interrupt", "KeyboardInterrupt"),
        ("segfault", "the worker died (signal 11, SIGSEGV)"),
        ("abort", "the worker died (signal 6, SIGABRT)"),
        ("overflow", "the worker died (signal 11, SIGSEGV)"),
        ("close", "the worker died (exit status 1)"),
        ("kill_warden", "the worker died (signal 9, SIGKILL)"),
        ("fork_and_hang", "no result within 0.5 s; the worker was stopped and replaced"),
    ],
)
def test_a_fault_costs_its_sample_only(open_pool, fault, said):
    with open_pool(timeout_s=0.5 if "0.5 s" in said else 10.0, num_workers=1) as pool:
        verdicts = pool.score(samples_of("a", "b", fault, "c", "d"))
        assert [verdict.kind for verdict in verdicts] == ["scored", "scored", "failed", "scored", "scored"]
        assert said in verdicts[2].reason
        assert verdicts[2].score == 0.0
        assert pool.score(samples_of("a"))[0].score == 1.0


def test_memory_filled_by_small_objects(open_pool):
    with open_pool(timeout_s=20.0, num_workers=1, memory_bytes=400 * 2**20) as pool:
        verdicts = pool.score(samples_of("a", "allocate_small"))
        assert verdicts[0].score == 1.0
        assert verdicts[1].kind == "failed"
        assert "more memory than 400 MiB" in verdicts[1].reason


@pytest.mark.parametrize("burden", ["print", "fork", "orphan", "both_return"])
def test_printing_and_forking_cost_nothing(open_pool, burden):
    with open_pool(timeout_s=20.0, num_workers=1) as pool:
        assert [v.score for v in pool.score(samples_of("a", burden, "b"))] == [1.0, 1.0, 1.0]
        assert [v.score for v in pool.score(samples_of("a", "b"))] == [1.0, 1.0]


def test_a_stopped_warden_is_ended_by_force(open_pool):
    started = time.monotonic()
    with open_pool(timeout_s=0.5, num_workers=1) as pool:
        assert "no result within 0.5 s" in pool.score(samples_of("stop_warden"))[0].reason
        assert pool.score(samples_of("a"))[0].score == 1.0
    # What left the family while its warden stood still cannot be found by anybody any more.
    for pid in marked():
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not marked(), 5)
    assert time.monotonic() - started < 15


def test_b06_four_of_a_hundred_hang(open_pool):
    timeout_s, num_workers = 2.0, 2
    samples = samples_of(*["sleep" if number % 25 == 3 else "a" for number in range(100)])
    with open_pool(timeout_s, num_workers) as pool:
        pool.prepare(["faulty:judge"])
        started = time.monotonic()
        verdicts = pool.score(samples)
        seconds = time.monotonic() - started
        assert [v.kind == "failed" for v in verdicts] == [number % 25 == 3 for number in range(100)]
        assert seconds < 4 * timeout_s / num_workers + 4.0
        slowest = pool.slowest(5)
        assert {time.sample_id for time in slowest[:4]} == {"s3", "s28", "s53", "s78"}
        assert slowest[3].seconds >= timeout_s > slowest[4].seconds
        assert pool.busy_s >= 4 * timeout_s
        assert pool.times_by_verifier()[0].num_samples == 100


def test_many_faults_at_once_from_another_thread(open_pool):
    faults = ["sleep", "os._exit", "raise", "segfault", "fork_and_hang", "allocate"]
    samples = samples_of(*[faults[n // 5] if n % 5 == 2 else "a" for n in range(30)])
    kinds = []

    def score():
        with open_pool() as pool:
            kinds.extend(verdict.kind for verdict in pool.score(samples))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(timeout=40)
    assert kinds == ["failed" if n % 5 == 2 else "scored" for n in range(30)]


def test_threads_that_come_and_go_share_a_pool(open_pool):
    with open_pool() as pool:
        for number in range(3):  # the thread that first used the pool is gone when the next one comes
            thread = threading.Thread(target=pool.submit, args=([make_sample("a", number)],))
            thread.start()
            thread.join(timeout=5)
        time.sleep(0.3)
        assert [(i, v.score) for i, v in pool.collect().items()] == [("s0", 1.0), ("s1", 1.0), ("s2", 1.0)]


@pytest.mark.parametrize("is_forked", [False, True])
def test_workers_die_with_a_parent_killed_by_sigkill(tmp_path, open_pool, monkeypatch, is_forked):
    """Also when another child of the parent holds the pipes open."""
    open_pool()  # writes the verifier
    touched, forked = tmp_path / "touched", tmp_path / "forked"
    monkeypatch.setenv("PLAIT_TOUCH", str(touched))
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_verifier_workers import VerifierPool, samples_of
with VerifierPool(Path({str(tmp_path)!r}), num_workers=2, timeout_s=500.0, memory_bytes={MEMORY_BYTES}) as pool:
    pool.prepare(["faulty:judge"])
    if {is_forked} and os.fork() == 0:
        Path({str(forked)!r}).write_text(str(os.getpid()))
        time.sleep(1000)
    pool.score(samples_of("fork orphan touch backtrack"))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    holders = []
    try:
        wait_until(touched.exists, 20)
        if is_forked:
            wait_until(lambda: forked.exists() and forked.read_text(), 5)
            holders = [int(forked.read_text())]
        assert len(marked()) >= 5
    finally:
        parent.kill()
        parent.wait(timeout=5)
    wait_until(lambda: set(marked()) == set(holders), 5)
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not marked(), 5)


def test_close_ends_what_is_running(open_pool):
    with open_pool(timeout_s=500.0) as pool:
        pool.prepare(["faulty:judge"])
        pool.submit(samples_of("fork_and_hang", "burn"))
        time.sleep(0.3)
        started = time.monotonic()
    assert time.monotonic() - started < 4
    pool.close()
    with pytest.raises(VerifierFailureError, match="closed"):
        pool.collect()
    with pytest.raises(VerifierFailureError, match="closed"):
        pool.submit(samples_of("a"))
    open_pool().close()  # one that was never opened
    with pytest.raises(AssertionError, match="with"):
        open_pool().submit(samples_of("a"))


def test_what_a_worker_may_use(open_pool, tmp_path):
    (tmp_path / "limits.py").write_text("""
import os, resource, sys
from plait.rewards.verifier import Failed
def judge(samples):
    soft = [resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] for name in ("CORE", "AS", "FSIZE")]
    return [Failed(repr((soft, "torch" in sys.modules, os.environ.get("PYTHONPATH")))) for _ in samples]
""")
    with open_pool() as pool:
        verdict = pool.score(samples_of("a", verifier="limits:judge"))[0]
    assert verdict.reason == repr(([0, MEMORY_BYTES, 2**30], False, os.environ.get("PYTHONPATH")))


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("def judge(samples): return [1.0]", VerifierContractError, "returned 1 results for"),
        ("1 / 0", ConfigError, "ZeroDivisionError"),
        ("import no_such_package", ConfigError, "not installed"),
        ("def jugde(samples): return []", ConfigError, 'Did you mean "jugde"?'),
        ("import os; os._exit(4)", VerifierFailureError, "the worker died (exit status 4)"),
        ("import sys; sys.exit(4)", VerifierFailureError, "SystemExit: 4"),
        ("import time; time.sleep(1000)", VerifierFailureError, "no result within 2 s"),
        ("x = bytearray(2**34)", ConfigError, "MemoryError"),
    ],
)
def test_what_stops_the_run(open_pool, tmp_path, body, error, said):
    (tmp_path / "broken.py").write_text(body)
    with open_pool(start_timeout_s=2.0) as pool:
        pool.submit(samples_of(*"abcdefgh", verifier="broken:judge"))
        with pytest.raises(error) as caught:
            pool.collect()
        assert said in str(caught.value)
        with pytest.raises(error):  # for good
            pool.score(samples_of("a"))


def test_a_worker_that_cannot_start_says_why(open_pool, monkeypatch):
    with open_pool(memory_bytes=2**20) as pool, pytest.raises(VerifierFailureError) as caught:
        pool.prepare(["answer"])
    assert "verifiers.memory_bytes" in str(caught.value)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with open_pool() as pool, pytest.raises(VerifierFailureError, match="could not be started"):
        pool.prepare(["answer"])


def test_a_slow_import_is_not_held_against_the_first_sample(open_pool, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\ndef judge(samples): return [1.0 for _ in samples]")
    with open_pool(timeout_s=0.5) as pool:
        assert [v.score for v in pool.score(samples_of("a", "b", verifier="slow:judge"))] == [1.0, 1.0]


def test_what_earlier_samples_left_in_memory_is_not_held_against_a_sample(open_pool, tmp_path):
    """A cache that grows by 40 MiB per sample: with a limit of 400 MiB, no sample alone is too large."""
    (tmp_path / "leak.py").write_text("""
kept = []
def judge(samples):
    for sample in samples: kept.append(bytearray(40 * 2**20))
    return [1.0 for _ in samples]
""")
    with open_pool(timeout_s=5.0, memory_bytes=400 * 2**20) as pool:
        verdicts = pool.score(samples_of(*"abcdefghijklmnopqrstuvwxyz", verifier="leak:judge"))
    assert {(verdict.kind, verdict.score) for verdict in verdicts} == {("scored", 1.0)}


def test_a_slow_verifier_is_not_failed_for_being_batched(open_pool, tmp_path):
    """Each sample keeps its own limit of 1.5 s, though eight of them together exceed every limit."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef judge(samples):\n    time.sleep(0.3 * len(samples))\n    return [1.0 for _ in samples]"
    )
    with open_pool(timeout_s=1.5) as pool:
        verdicts = pool.score(samples_of(*"abcdefghijklmnop", verifier="slow:judge"))
    assert {verdict.kind for verdict in verdicts} == {"scored"}
