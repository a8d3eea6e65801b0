"""Checkpoints are whole or not there: after damage to any byte and after a crash at any point."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from plait.errors import CheckpointError
from plait.telemetry import files
from plait.telemetry.checkpoint import Best, CheckpointStore


def tensors_of(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "policy": {"weight": torch.full((3, 4), value), "half": torch.tensor([value], dtype=torch.bfloat16)},
        "optimizer": {"step": torch.tensor(value), "rng": torch.arange(5, dtype=torch.uint8)},
    }


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, tensors_of(float(step)), {"cursor": step, "rng": [2**70, 1]})


def assert_is_step(store: CheckpointStore, path: Path, step: int) -> None:
    loaded = store.load(path)
    assert loaded.step == step
    assert loaded.state == {"cursor": step, "rng": [2**70, 1]}
    expected = tensors_of(float(step))
    assert loaded.tensors.keys() == expected.keys()
    for stem, named in expected.items():
        assert loaded.tensors[stem].keys() == named.keys()
        for name, tensor in named.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor)


def newest(store: CheckpointStore) -> tuple[int, Path]:
    found = store.latest().newest
    assert found is not None
    return found


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.root.iterdir()}


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest().newest is None
    path = save(store, 7)
    assert path == tmp_path / "checkpoints" / "step-7"
    assert newest(store) == (7, path)
    assert_is_step(store, path, 7)
    nan_payload = torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32)
    path = store.save(8, {"x": {"nan": nan_payload, "empty": torch.empty(0, 3)}, "none": {}}, {"a": float("inf")})
    loaded = store.load(path)
    assert torch.equal(loaded.tensors["x"]["nan"].view(torch.int32), nan_payload.view(torch.int32))
    assert loaded.tensors["x"]["empty"].shape == (0, 3)
    assert loaded.tensors["none"] == {}
    assert loaded.state == {"a": float("inf")}


def test_tensors_that_share_memory_or_are_strided_are_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    base = torch.arange(12.0).reshape(3, 4)
    tied = {"embed": base, "head": base, "row": base[1], "transposed": base.T}
    tied["parameter"] = torch.nn.Parameter(torch.ones(2))
    loaded = store.load(store.save(1, {"policy": tied}, {})).tensors["policy"]
    for name, tensor in tied.items():
        assert torch.equal(loaded[name], tensor.detach())


def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    with pytest.raises(TypeError):
        store.save(1, {}, {"a": {1, 2}})
    assert not store.root.exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.best() is None
    for step, accuracy in ((1, 0.2), (2, 0.7), (3, 0.7), (4, 0.4)):
        save(store, step)
        assert store.mark_best(step, accuracy) == (step < 3)
    save(store, 5)
    assert names(store) == {"step-2", "step-4", "step-5", "best.json"}
    assert store.best() == Best(2, 0.7)
    assert store.mark_best(2, 0.1)  # the same step measured again
    assert store.mark_best(5, 0.2)
    save(store, 6)
    assert names(store) == {"step-5", "step-6", "best.json"}
    with pytest.raises(CheckpointError, match="no checkpoint"):
        store.mark_best(99, 0.9)


def test_a_damaged_record_of_the_best_is_reported(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "best.json").write_text('{"step": 1')
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        store.best()


def test_what_is_saved_after_resuming_from_an_older_step_is_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.keep = 3
    save(store, 10)
    save(store, 20)
    save(store, 15)  # resumed from 10: 20 belongs to the abandoned attempt
    assert newest(store)[0] == 15
    store.keep = 1
    save(store, 16)
    assert names(store) == {"step-16"}


def test_a_step_saved_again_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(3, tensors_of(1.0), {})
    save(store, 3)
    assert_is_step(store, newest(store)[1], 3)
    assert names(store) == {"step-3"}


def test_only_partial_folders_are_cleared_away(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / ".partial-step-9-abcd").mkdir()
    (tmp_path / ".partial-step-9-abcd" / "x").write_text("x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-8").mkdir()  # damaged: reported, not removed
    passed_over = {item.name: item.reason for item in store.latest().passed_over}
    assert passed_over.keys() == {".partial-step-9-abcd", "step-8"}
    assert "interrupted" in passed_over[".partial-step-9-abcd"]
    assert "incomplete" in passed_over["step-8"]
    save(store, 1)
    assert names(store) == {"notes", "step-x", "step-8", "step-1"}
    assert newest(store)[0] == 1


def positions(size: int) -> list[int]:
    return sorted({0, 1, 7, size // 3, size // 2, size - 2, size - 1} & set(range(size)))


def damaged_copies(path: Path) -> Iterator[bytes]:
    whole = path.read_bytes()
    for position in positions(len(whole)):
        yield whole[:position]
        for bit in (0, 3, 7):
            yield whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :]
    yield whole + b"\0"
    yield whole + b"\n"


def test_damage_to_any_file_is_noticed_and_the_older_one_is_chosen(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    path = save(store, 2)
    contents = {file.name: file.read_bytes() for file in path.iterdir()}
    assert contents.keys() == {"policy.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    for name, whole in contents.items():
        file = path / name
        for damaged in damaged_copies(file):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                store.load(path)
            latest = store.latest()
            assert latest.newest == (1, tmp_path / "step-1")
            assert [item.name for item in latest.passed_over] == ["step-2"]
            file.write_bytes(whole)
        file.unlink()
        with pytest.raises(CheckpointError, match=name):
            store.load(path)
        file.write_bytes(whole)
    assert_is_step(store, path, 2)


def test_a_checkpoint_cut_at_any_byte_is_passed_over(tmp_path):
    """Every length of every file, as a disk that filled or a copy that broke off leaves it."""
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    path = save(store, 2)
    num_cuts, num_bytes = 0, sum(file.stat().st_size for file in path.iterdir())
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for length in range(len(whole)):
            os.truncate(file, length) if length else file.write_bytes(b"")
            latest = store.latest()
            assert latest.newest == (1, tmp_path / "step-1"), f"{file.name} cut to {length} bytes"
            assert file.name in latest.passed_over[0].reason
            file.write_bytes(whole)
            num_cuts += 1
    assert num_cuts == num_bytes > 900
    assert store.latest().newest == (2, path)


def test_every_byte_of_a_manifest_counts(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(1, {}, {})
    whole = (path / "manifest.json").read_bytes()
    for position in range(len(whole)):
        flipped = bytes([whole[position] ^ 0x20])  # turns the case of letters, too
        (path / "manifest.json").write_bytes(whole[:position] + flipped + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            store.load(path)


def test_a_manifest_of_another_format_is_refused(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("plait.telemetry.manifest.FORMAT", 2)
        path = save(store, 1)
    with pytest.raises(CheckpointError, match="has format 2"):
        store.load(path)


class SimulatedCrash(BaseException):
    """Not an Exception: the process is gone, and nothing of it handles anything."""


class Countdown:
    """Raises before the k-th filesystem operation."""

    def __init__(self, k: int, error: BaseException):
        self.left = k
        self.error = error

    def wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            self.left -= 1
            if self.left == 0:
                raise self.error
            return function(*args, **kwargs)

        return counted


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, k: int, error: BaseException) -> Iterator[Countdown]:
    countdown = Countdown(k, error)
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, countdown.wrap(getattr(os, name)))
        patch.setattr("plait.telemetry.checkpoint.save_file", countdown.wrap(_save_file()))
        patch.setattr("plait.telemetry.checkpoint.write_synced", countdown.wrap(torn(files.write_synced)))
        yield countdown


def _save_file() -> Callable[..., object]:
    from safetensors.torch import save_file

    return save_file


def torn(write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
    """Makes a file in two operations, so that a crash can fall between them."""

    def write_in_halves(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        path.unlink()  # counted: a crash here leaves half a file
        write(path, data)

    return write_in_halves


def run_to_crash(root: Path, monkeypatch: pytest.MonkeyPatch, k: int, error: BaseException, step: int) -> bool:
    """Whether the k-th operation was reached. The store has the steps 1 (best) and 2, keep=1."""
    store = CheckpointStore(root, keep=1)
    try:
        with failing_at(monkeypatch, k, error) as countdown:
            save(store, step)
            store.mark_best(step, 0.9)
    except (SimulatedCrash, CheckpointError):
        return True
    return countdown.left <= 0


def prepare(root: Path) -> None:
    store = CheckpointStore(root, keep=1)
    save(store, 1)
    store.mark_best(1, 0.5)
    save(store, 2)
    assert names(store) == {"step-1", "step-2", "best.json"}


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "step replaced"])
@pytest.mark.parametrize("error", [SimulatedCrash(), OSError(28, "No space left on device")], ids=["crash", "full"])
def test_a_crash_or_error_between_any_two_operations_loses_nothing(tmp_path, monkeypatch, step, error):
    k = 0
    reached = True
    while reached:
        k += 1
        assert k < 200, "the save does not end"
        root = tmp_path / f"{k}"
        prepare(root)
        reached = run_to_crash(root, monkeypatch, k, error, step)
        store = CheckpointStore(root, keep=1)
        found_step, path = newest(store)
        assert found_step in (2, step)
        assert_is_step(store, path, found_step)
        best = store.best()
        assert best is not None
        assert_is_step(store, root / f"step-{best.step}", best.step)
        save(store, 4)  # the next save clears up and goes on
        assert newest(store)[0] == 4
        assert names(store) <= {f"step-{best.step}", "step-4", "best.json"}
        shutil.rmtree(root)
    assert k > 15, "the operations were not counted"


def test_an_error_leaves_no_partial_folder_and_says_what_to_do(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.telemetry.checkpoint.save_file", full)
    with pytest.raises(CheckpointError) as caught:
        save(store, 2)
    text = str(caught.value)
    assert "step-2" in text
    assert "No space left on device" in text
    assert "It needs" in text
    assert "Free on that disk" in text
    assert "Make room" in text
    assert names(store) == {"step-1"}


def test_the_real_writer_of_safetensors_reports_a_limit_as_checkpoint_error(tmp_path):
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from plait.errors import CheckpointError\n"
        "from plait.telemetry.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep=1)\n"
        "store.save(1, {'m': {'w': torch.zeros(10)}}, {})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "try:\n"
        "    store.save(2, {'m': {'w': torch.zeros(100000)}}, {})\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert "400.0 kB" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints", keep=1), 1)


def test_the_manifest_can_be_checked_with_other_tools(tmp_path):
    import hashlib

    path = save(CheckpointStore(tmp_path, keep=1), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        assert entry["size_bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
