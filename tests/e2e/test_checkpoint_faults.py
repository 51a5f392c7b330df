"""The checkpoint half of the fault table, on whole runs: kills at any instant of a save, full
disks, damage, payloads. After each the newest complete checkpoint loads, or the run ends with one
named error; nothing hangs, nothing starts at 0 in silence, no process is left."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from slime_like.checkpoints.files import hash_file
from slime_like.checkpoints.folders import TRACKER, complete_steps
from slime_like.checkpoints.lock import hold_folders
from slime_like.checkpoints.manifest import MANIFEST, damaged_files, read_manifest, write_manifest
from tests.e2e.faults import write_payload
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

FAULTS = "tests.e2e.faults"


def flags(work: Workspace, out: Path, **changes: str | int | float | Path | None) -> list[str]:
    """Supervised, so that a run is its optimizer steps and its checkpoints; a step of 1 rollout
    each."""
    values = {
        "num_rollout": 4, "num_steps_per_rollout": 1, "loss_type": "sft_loss", "policy_loss_type": None, "n_samples_per_prompt": None,
        "custom_rm_path": None, "rm_num_workers": None, "rollout_max_response_len": 64, "weight_decay": 0.1,
        "micro_batch_size": 2,
    }  # fmt: skip
    return work.flags(out, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """4 rollouts in one go, a checkpoint after each."""
    out = tmp_path_factory.mktemp("faults")
    server.train(flags(work, out, save=out / "checkpoints", save_interval=1), out / "log").ok()
    return out


def resumes(
    server: TrainServer,
    work: Workspace,
    full_run: Path,
    out: Path,
    root: Path,
    *,
    least: int,
    ranks: int = 1,
    **more: Any,
) -> None:
    """The same command line continues from step `least` or later, and ends as a run that was never
    interrupted."""
    done = server.train(
        flags(work, out, save=root, load=root, save_interval=2, **more),
        out / "log-resumed",
        ranks=ranks,
        timeout_s=90,
    ).ok()
    begun = [
        int(line.split()[1].split("/")[0])
        for line in done.out.splitlines()
        if line.startswith("rollout ")
    ]
    assert min(begun, default=5) > least, done.out
    rows = {int(row["step"]): row for row in same_sft(rows_of(out))}
    assert rows[4] == same_sft(rows_of(full_run))[3] if ranks == 1 else rows[4]["train/loss"] > 0
    assert complete_steps(root)[-1] == 4
    assert (root / TRACKER).read_text() == "4"
    assert not [
        path.name for path in root.iterdir() if path.suffix in (".tmp", ".replaced", ".removed")
    ]


def same_sft(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: row[name] for name in ("step", "train/loss", "train/grad_norm", "train/lr")}
        for row in rows
    ]


def no_process_left(server: TrainServer) -> None:
    assert psutil.Process(server.pid).children(recursive=True) == []


# --- kills -----------------------------------------------------------------------------------------------------------


# (call, how many of it a save has at least, points that every test run takes), see
# faults.before_each_call
CALLS = (
    ("mkdir", 3, (2,)), ("open", 6, (0, 4)), ("write", 6, (3,)), ("fsync", 10, (5, 11)), ("rename", 1, (0,)), ("replace", 1, (0,)),
)  # fmt: skip
SOME = [
    (ranks, mode, call, points, 0)
    for ranks, mode in ((1, ""), (1, "async_save"))
    for call, _, points in CALLS
]
EVERY = [
    (ranks, mode, call, range(99), least)
    for ranks, mode in ((1, ""), (2, ""), (1, "async_save"))
    for call, least, _ in CALLS
]


@pytest.mark.parametrize(
    ("ranks", "mode", "call", "points", "least"),
    [
        *SOME[:1],
        *(pytest.param(*case, marks=pytest.mark.extended) for case in SOME[1:]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "all" if isinstance(value, range) else None
    ),
)
def test_killed_at_a_write_sync_or_rename(
    server: TrainServer,
    work: Workspace,
    full_run: Path,
    tmp_path: Path,
    ranks: int,
    mode: str,
    call: str,
    points: Sequence[int],
    least: int,
) -> None:
    """SIGKILL before the n-th such call of rank 0 in the second save of a run that saves after 2
    rollouts and after 4. The folder is then taken up by the same command line."""
    for point in points:
        out, root = tmp_path / f"run-{point}", tmp_path / f"checkpoints-{point}"
        more = {mode: ""} if mode else {}
        argv = flags(work, out, save=root, load=root, save_interval=2, **more)
        done = server.train(
            argv,
            out / "log",
            ranks=ranks,
            hook=f"{FAULTS}:kill_in_second_save {call} {point}",
            timeout_s=90,
        )
        no_process_left(server)
        if done.status == 0:
            assert least and point >= least, "the save has fewer such calls"
            return
        assert done.status in (-signal.SIGKILL, 1), done.err
        steps = complete_steps(root)
        assert steps in ([2], [2, 4])
        for step in steps:
            folder = root / f"iter_{step:07d}"
            records = read_manifest(folder)
            assert damaged_files(folder, records, records, threads=2) == []
        if point % 4 == 0 or not least:
            resumes(server, work, full_run, out, root, least=steps[-1], ranks=ranks, **more)
        shutil.rmtree(root)
    assert not least, "the save has more such calls"


@pytest.mark.parametrize("mode", ["", "async_save"])
def test_at_each_of_its_writes_a_save_could_be_killed(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, mode: str
) -> None:
    """What a kill at each call would leave, thousands of writes included: the checkpoint before,
    and from the renaming on the new one."""
    root, report = tmp_path / "checkpoints", tmp_path / "report"
    argv = flags(work, tmp_path, save=root, save_interval=2, **({mode: ""} if mode else {}))
    server.train(argv, tmp_path / "log", hook=f"{FAULTS}:look_in_second_save {root} {report}").ok()
    lines = [line.split(" ", 1) for line in report.read_text().splitlines()]
    calls = [call for call, _ in lines]
    assert (
        calls.count("write") > 1000
        and calls.count("fsync") > 10
        and calls.count("rename") == calls.count("replace") == 1
    )
    renamed = calls.index("rename")
    assert {found for _, found in lines[: renamed + 1]} == {"[2] (2, None)"}
    assert {found for _, found in lines[renamed + 1 :]} == {"[2, 4] (4, None)"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_10_random_instants(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, seed: int
) -> None:
    """A run that does little but save, both ways; the same command line until it ends."""
    rng = random.Random(seed)
    root = tmp_path / "checkpoints"
    for index in range(10):
        out = tmp_path / f"run-{index}"
        argv = flags(
            work,
            out,
            save=root,
            load=root,
            save_interval=1,
            num_rollout=200,
            **({"async_save": ""} if index % 2 else {}),
        )
        before = complete_steps(root)[-1:] if root.exists() else []
        hook = f"{FAULTS}:kill_after {rng.uniform(0.0, 1.5):.3f}"
        done = server.train(argv, out / "log", hook=hook, timeout_s=90)
        assert done.status == -signal.SIGKILL, done.err
        no_process_left(server)
        assert complete_steps(root)[-1:] >= before
        for step in complete_steps(root)[-2:]:
            folder = root / f"iter_{step:07d}"
            records = read_manifest(folder)
            assert damaged_files(folder, records, records, threads=2) == []
    last = complete_steps(root)[-1]
    done = server.train(
        flags(work, tmp_path / "end", load=root, num_rollout=last + 1), tmp_path / "log"
    ).ok()
    assert f"rollout {last + 1}/{last + 1}" in done.out


# --- signals and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_sigterm_saves_and_ends_with_its_own_status(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, ranks: int
) -> None:
    """It reaches one rank only: all stop after the same rollout."""
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, load=root, save_interval=100)
    done = server.train(
        argv, tmp_path / "log", ranks=ranks, hook=f"{FAULTS}:signal_in_step SIGTERM 2 {ranks - 1}"
    )
    assert done.status == 75, done.err
    assert "stopped by SIGTERM after rollout 2 of 4, saved in" in done.out
    assert complete_steps(root) == [2]
    resumes(server, work, full_run, tmp_path, root, least=2, ranks=ranks)


@pytest.mark.extended
def test_limits_of_time_and_rollouts(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    done = server.train(
        flags(work, tmp_path, save=root, load=root, exit_duration_in_mins=1e-6), tmp_path / "log1"
    ).ok()
    assert "stopped by --exit-duration-in-mins 1e-06 after rollout 1 of 4" in done.out
    done = server.train(
        flags(work, tmp_path, save=root, load=root, exit_interval=3), tmp_path / "log2"
    ).ok()
    assert "stopped by --exit-interval 3 after rollout 3 of 4" in done.out
    assert complete_steps(root) == [1, 3]
    resumes(server, work, full_run, tmp_path, root, least=3)


@pytest.mark.extended
def test_a_rank_that_is_killed_is_named_and_the_run_taken_up(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, load=root, save_interval=2)
    done = server.train(
        argv, tmp_path / "log", ranks=2, hook=f"{FAULTS}:signal_in_step SIGKILL 3 1", timeout_s=60
    )
    assert done.status == -signal.SIGKILL, "of the first process that ended"
    assert f"error: no answer from rank 1 (host {socket.gethostname()}, process " in done.err
    assert "Traceback" not in done.err
    no_process_left(server)
    resumes(server, work, full_run, tmp_path, root, least=2, ranks=2)


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (1, ""),
        pytest.param(2, "", marks=pytest.mark.extended),
        pytest.param(1, "async_save", marks=pytest.mark.extended),
    ],
)
def test_a_disk_that_fills_up_during_the_second_save(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, ranks: int, mode: str
) -> None:
    """On the last rank; the others do not wait for it."""
    root = tmp_path / "checkpoints"
    argv = flags(
        work, tmp_path, save=root, load=root, save_interval=2, **({mode: ""} if mode else {})
    )
    done = server.train(
        argv,
        tmp_path / "log",
        ranks=ranks,
        hook=f"{FAULTS}:disk_full_in_save 2 {ranks - 1}",
        timeout_s=60,
    )
    error = done.error()
    assert error.startswith(
        f"error: checkpoint {root}/iter_0000004 could not be written, earlier ones are whole: rank {ranks - 1}: "
    )
    assert "No space left on device" in error
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000002", TRACKER]
    resumes(server, work, full_run, tmp_path, root, least=2, ranks=ranks)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that has 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_real_small_disk(
    server: TrainServer, work: Workspace, disk: Path, tmp_path: Path
) -> None:
    argv = flags(work, tmp_path, save=disk / "checkpoints")
    error = server.train(argv, tmp_path / "log").error()
    assert "and the disk has 0.004 GB free" in error
    assert list((disk / "checkpoints").iterdir()) == []


def test_a_disk_that_is_full_of_metrics_does_not_end_the_run(
    server: TrainServer, work: Workspace, disk: Path, tmp_path: Path
) -> None:
    """It fills up while the first rollout is graded. Checkpoints are elsewhere."""
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def judge(args, sample):\n"
        "    try:\n"
        f"        with open({str(disk / 'others')!r}, 'ab', buffering=0) as file:\n"
        "            while file.write(bytes(1024)):\n"
        "                pass\n"
        "    except OSError:\n"
        "        return float(sample.response_length)\n"
    )
    root = tmp_path / "checkpoints"
    argv = work.flags(
        disk, num_rollout=3, save=root, save_interval=2, custom_rm_path=f"{reward}:judge", no_tensorboard=None, no_plot=None
    )  # fmt: skip
    done = server.train(argv, tmp_path / "log").ok()
    reported = done.out + done.err
    assert complete_steps(root) == [2, 3] and rows_of(disk) == []
    assert (
        reported.count(f"--output-dir {disk}/metrics.jsonl: cannot be written: No space left") == 1
    )
    assert "the metrics of 3 steps, from step 1 on, are lost" in reported
    assert reported.count("--tensorboard-dir") == 1 and "Traceback" not in reported


@pytest.mark.extended
def test_going_on_after_a_failed_save(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, save_interval=1, on_save_failure="continue")
    done = server.train(argv, tmp_path / "log", hook=f"{FAULTS}:disk_full_in_save 2 0").ok()
    assert "continuing without it (--on-save-failure continue)" in done.out
    assert complete_steps(root) == [1, 3, 4]
    assert [row["perf/failed_saves"] for row in rows_of(tmp_path)] == [0, 1, 1, 1]
    done = server.train(argv, tmp_path / "log2", hook=f"{FAULTS}:disk_full_in_save 4 0")
    assert "iter_0000004 could not be written" in done.error(), "the last save has no next one"
    assert complete_steps(root) == [1, 2, 3, 4], "the one of the run before"


def test_a_disk_that_will_not_hold_it_is_reported_before_anything_is_written(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    done = server.train(
        flags(work, tmp_path, save=root), tmp_path / "log", hook=f"{FAULTS}:little_disk 1000000"
    )
    error = done.error()
    assert "it needs 0.005 GB and the disk has 0.001 GB free" in error
    assert list(root.iterdir()) == []


# --- damage ----------------------------------------------------------------------------------------------------------


def model_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_every_damaged_file_is_named(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """Each file of the newest checkpoint in turn, with each kind of damage in turn; without a
    manifest it is not complete, and an earlier one is taken, with a warning."""
    names = model_files(full_run / "checkpoints" / "iter_0000004")
    assert {".metadata", "common.pt", "metadata.json", "trainer.json", MANIFEST} <= {
        Path(name).name for name in names
    }
    for index, name in enumerate(names):
        kind = ("flipped", "truncated", "missing")[index % 3]
        root, out = tmp_path / f"checkpoints-{index}", tmp_path / f"run-{index}"
        shutil.copytree(full_run / "checkpoints", root)
        damage(root / "iter_0000004" / name, "missing" if name == MANIFEST else kind)
        done = server.train(flags(work, out, load=root), out / "log", timeout_s=60)
        if name == MANIFEST:
            assert (
                "names step 4, which is not complete; taking the newest complete checkpoint, step 3"
                in done.ok().out
            )
            continue
        error = done.error()
        assert (
            f"iter_0000004 is damaged: {name}: " in error
            and "--ckpt-step takes another one (1, 2, 3)" in error
        )
        shutil.rmtree(root)


@pytest.mark.parametrize("tracker", ["", "garbage", "9"])
def test_a_bad_tracker_and_nothing_complete_is_an_error(
    server: TrainServer, work: Workspace, tmp_path: Path, tracker: str
) -> None:
    root = tmp_path / "checkpoints"
    (root / "iter_0000002").mkdir(parents=True)
    (root / TRACKER).write_text(tracker)
    error = server.train(flags(work, tmp_path, load=root, save=root), tmp_path / "log").error()
    assert "and there is no complete checkpoint" in error


@pytest.mark.extended
def test_bits_that_change_after_they_were_read_stop_the_run(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """The gate: weights and optimizer are compared with what was saved once they are in place."""
    argv = flags(work, tmp_path, load=full_run / "checkpoints", ckpt_step=2)
    error = server.train(argv, tmp_path / "log", hook=f"{FAULTS}:flip_a_moment_after_load").error()
    assert "the state differs from what was saved (rank 0: exp_avg_sq of the policy)" in error


# --- payloads --------------------------------------------------------------------------------------------------------


def test_a_payload_in_any_file_is_refused_and_runs_nothing(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """Each file in turn becomes a pickle, plain or torch's, and the manifest is made to agree: who
    can write one can write the other."""
    for index, name in enumerate(model_files(full_run / "checkpoints" / "iter_0000004")):
        root, out, mark = (
            tmp_path / f"checkpoints-{index}",
            tmp_path / f"run-{index}",
            tmp_path / f"ran-{index}",
        )
        shutil.copytree(full_run / "checkpoints", root)
        folder = root / "iter_0000004"
        records = read_manifest(folder)
        write_payload(folder / name, mark)
        if name != MANIFEST:
            write_manifest(folder, {**records, name: hash_file(folder / name)})
        done = server.train(flags(work, out, num_rollout=5, load=root), out / "log", timeout_s=60)
        assert "iter_0000004" in done.error(), name
        assert not mark.exists(), name
        shutil.rmtree(root)


@pytest.mark.parametrize("declared", ["object", "tensor"])
def test_a_payload_where_tensors_lie_runs_nothing(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, declared: str
) -> None:
    """torch unpickles what `.metadata` calls an object, so that a tensor's name is enough to be
    read so."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    from megatron_patches.safe_checkpoints import read_metadata

    root, mark = tmp_path / "checkpoints", tmp_path / "ran"
    shutil.copytree(full_run / "checkpoints", root)
    folder = root / "iter_0000004"
    write_payload(folder / "policy" / "evil.distcp", mark)
    metadata = read_metadata(folder / "policy" / ".metadata")
    size = (folder / "policy" / "evil.distcp").stat().st_size
    for index in list(metadata.storage_data):
        metadata.storage_data[index] = _StorageInfo("evil.distcp", 0, size)
    for key in list(metadata.state_dict_metadata) if declared == "object" else ():
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data = {i: s for i, s in metadata.storage_data.items() if i.fqn != key}
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo("evil.distcp", 0, size)
    (folder / "policy" / ".metadata").write_bytes(pickle.dumps(metadata))
    written = ("policy/.metadata", "policy/evil.distcp")  # the manifest is made to agree
    agreed = {name: hash_file(folder / name) for name in written}
    write_manifest(folder, {**read_manifest(folder), **agreed})
    argv = flags(work, tmp_path, num_rollout=5, load=root, no_verify_checkpoint="")
    words = (
        "does not fit this model"
        if declared == "object"
        else "is damaged or does not fit this model"
    )
    assert words in server.train(argv, tmp_path / "log", timeout_s=60).error()
    assert not mark.exists()
    torch.load(folder / "policy" / "evil.distcp", weights_only=False)
    assert mark.exists(), "the payload is one"


# --- retention, time -------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_retention_and_what_a_save_costs(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    argv = flags(
        work,
        tmp_path,
        num_rollout=6,
        save=root,
        save_interval=1,
        save_retain_last=2,
        save_retain_interval=3,
        async_save="",
    )
    message = server.train(argv, tmp_path / "log").ok().out.splitlines()
    assert complete_steps(root) == [3, 5, 6]
    rows = rows_of(tmp_path)
    announced = [
        re.fullmatch(r"saving .*/(iter_\d+): ([\d.]+) GB, the disk has ([\d.]+) GB free", line)
        for line in message
    ]
    assert [found[1] for found in announced if found] == [
        f"iter_{step:07d}" for step in range(1, 7)
    ]
    reported = [
        re.fullmatch(
            r"(iter_\d+) saved: ([\d.]+) GB in .* blocked for [\d.]+ s; (?:removed (.*); )?[\d.]+ GB free",
            line,
        )
        for line in message
    ]
    assert {found[1]: found[3] for found in reported if found} == {
        "iter_0000001": None, "iter_0000002": None, "iter_0000003": "iter_0000001", "iter_0000004": "iter_0000002", "iter_0000005": None,
        "iter_0000006": "iter_0000004",
    }  # fmt: skip
    size = sum(
        json.loads((root / "iter_0000006" / MANIFEST).read_text())["files"][n]["size"]
        for n in model_files(root / "iter_0000006")
        if n != MANIFEST
    )
    assert rows[-1]["perf/save_gb"] == pytest.approx(size / 1e9)
    assert rows[-1]["perf/save_gb_per_s"] > 0 and rows[-1]["perf/save_free_gb"] > 0
    assert {found[2] for found in reported if found and found[1] == "iter_0000006"} == {
        f"{size / 1e9:.3f}"
    }
    assert all(row["perf/save_s"] > 0 for row in rows)


# --- two runs with one folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["save", "output_dir"])
def test_a_folder_that_another_run_writes_to_is_refused(
    server: TrainServer, work: Workspace, tmp_path: Path, flag: str
) -> None:
    """Before the ranks meet: nothing is read, written or removed."""
    root = tmp_path / "mine"
    with hold_folders([("--save", root)]):
        argv = flags(work, tmp_path / "out", **{flag: root})
        done = server.train(argv, tmp_path / "log")
    name = "--" + flag.replace("_", "-")
    assert done.error().startswith(f"error: {name} {root}: in use by process {os.getpid()} on ")
    assert list(root.iterdir()) == []


def test_a_run_that_lost_its_folder_does_not_save(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """As one that was suspended, while another one took the folder, on 2 ranks."""
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, save_interval=1)
    done = server.train(
        argv, tmp_path / "log", ranks=2, hook=f"{FAULTS}:lose_lock_in_step {root} 2"
    )
    assert f"--save {root}: its lock run.lock was removed during the run" in done.error()
    assert complete_steps(root) == [1]
