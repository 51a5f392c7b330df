"""train.py as a whole: what a run leaves behind, the same samples in every layout, debugging flags,
custom rewards, failures, signals."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import ENVIRONMENT, ROOT, TrainServer, clean_environment, torchrun

TEMPLATE = "rollout_{rollout_id}"
RECORDED = ("json", "safetensors", "tokens.json", "train0.safetensors")


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three rollouts of one process with everything on."""
    out = tmp_path_factory.mktemp("train")
    held_out = f"held_out {work.prompts}@[0:6]"
    argv = work.flags(
        out, num_rollout=3, no_tensorboard=None, no_plot=None, save_hf=out / "hf-{rollout_id}", save_debug_rollout_data=out / TEMPLATE, save=out / "ck",
        eval_interval=2, eval_prompt_data=held_out, n_samples_per_eval_prompt=4, use_kl_loss="", kl_loss_coef=0.05, ref_load=work.model,
    )  # fmt: skip
    done = server.train(argv, out / "log").ok()
    assert done.err == ""
    return out


def test_what_a_run_leaves_behind(full_run: Path, work: Workspace) -> None:
    assert {path.name for path in full_run.iterdir()} == {
        *("metrics.jsonl", "run.json", "report.png", "tensorboard", "hf-3", "ck", "log"),
        *(f"rollout_{i}.{suffix}" for i in (1, 2, 3) for suffix in RECORDED),
    }
    assert (full_run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((full_run / "tensorboard").glob("events.out.tfevents.*"))) == 1
    before, after = weights_of(work.model), weights_of(full_run / "hf-3")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    output = (full_run / "log" / "out-0.txt").read_text()
    assert "rollout 3/3" in output and "before training: eval/held_out/mean" in output


def test_metrics_of_every_rollout(full_run: Path) -> None:
    rows = rows_of(full_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    wanted = {
        *(
            "train/loss",
            "train/policy_loss",
            "train/kl",
            "train/kl_loss",
            "train/entropy",
            "train/grad_norm",
            "train/lr",
            "train/ppo_kl",
        ),
        *(
            "train/skipped_steps",
            "rollout/reward_mean",
            "rollout/reward_std",
            "rollout/failed_frac",
            "rollout/truncated_frac",
        ),
        *(
            "rollout/train_rollout_log_prob_diff_mean",
            "perf/step_s",
            "perf/generate_s",
            "perf/train_s",
            "perf/peak_rss_gb",
        ),
    }
    for row in rows[1:]:
        assert wanted <= row.keys()
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-5
        assert row["train/grad_norm"] > 1e-3
    assert [row["rollout/weight_version_min"] for row in rows[1:]] == [1, 2, 3]


def test_evaluation_before_every_second_and_after_the_last(full_run: Path) -> None:
    rows = rows_of(full_run)
    assert [row["step"] for row in rows if "eval/held_out/mean" in row] == [0, 2, 3]
    for row in (rows[0], rows[2], rows[3]):
        scores = [row[f"eval/held_out/pass@{k}"] for k in (1, 2, 4)]
        assert scores == sorted(scores) and min(scores) >= 0 and max(scores) <= 1
        assert row["eval/held_out/unscored_frac"] == 0


def test_evaluation_changes_nothing_else(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = work.flags(
        tmp_path,
        num_rollout=3,
        use_kl_loss="",
        kl_loss_coef=0.05,
        ref_load=work.model,
        save_hf=tmp_path / "hf",
    )
    server.train(argv, tmp_path / "log").ok()
    assert same_numbers(rows_of(tmp_path)) == same_numbers(rows_of(full_run)[1:])
    actual, theirs = weights_of(tmp_path / "hf"), weights_of(full_run / "hf-3")
    assert all(torch.equal(actual[name], theirs[name]) for name in actual)


LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "DP2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2": "--context-parallel-size 2",
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow
            if name == "PP2"
            else pytest.mark.extended
            if name == "CP2"
            else (),
        )
        for name in LAYOUTS
    ],
)
def test_two_ranks_sample_what_one_does(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, layout: str
) -> None:
    flags = dict(
        num_rollout=3,
        use_kl_loss="",
        kl_loss_coef=0.05,
        ref_load=work.model,
        save_debug_rollout_data=tmp_path / TEMPLATE,
    )
    server.train(
        [*work.flags(tmp_path, **flags), *LAYOUTS[layout].split()], tmp_path / "log", ranks=2
    ).ok()
    for rollout in range(3):
        assert sampled(tmp_path / TEMPLATE, rollout) == sampled(full_run / TEMPLATE, rollout)
    for actual, one in zip(rows_of(tmp_path), rows_of(full_run)[1:], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy"):
            assert actual[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_an_interleaved_pipeline_takes_several_steps(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Its micro-batches are padded to the longest; old log-probs are recomputed over all steps of a
    rollout at once."""
    from slime_like.cli.tiny_model import save_model

    model = tmp_path / "deeper"
    save_model(model, hidden_size=32, num_layers=4)
    argv = work.flags(
        tmp_path / "a", hf_checkpoint=model, micro_batch_size=2, pipeline_model_parallel_size=2
    )
    server.train(
        [*argv, "--num-virtual-stages-per-pipeline-rank", "2"], tmp_path / "log", ranks=2
    ).ok()
    server.train(
        work.flags(tmp_path / "b", hf_checkpoint=model, micro_batch_size=2), tmp_path / "log1"
    ).ok()
    for actual, one in zip(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), strict=True):
        assert actual["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)


def test_recorded_rollouts_train_alike(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = work.flags(
        tmp_path, num_rollout=3, use_kl_loss="", kl_loss_coef=0.05, ref_load=work.model, save_hf=tmp_path / "hf", debug_train_only="",
        load_debug_rollout_data=full_run / TEMPLATE, prompt_data=None, custom_rm_path=None, rm_num_workers=None, save=tmp_path / "ck",
    )  # fmt: skip
    server.train(argv, tmp_path / "log").ok()
    assert same_numbers(rows_of(tmp_path)) == same_numbers(rows_of(full_run)[1:])
    actual, theirs = weights_of(tmp_path / "hf"), weights_of(full_run / "hf-3")
    assert all(torch.equal(actual[name], theirs[name]) for name in actual)
    argv = work.flags(
        tmp_path / "more", num_rollout=4, debug_train_only="", load_debug_rollout_data=full_run / TEMPLATE, prompt_data=None,
        custom_rm_path=None, rm_num_workers=None, load=tmp_path / "ck",
    )  # fmt: skip
    error = server.train(
        argv, tmp_path / "log"
    ).error()  # resumed after three, and there is no fourth
    assert "rollout_4.json: no such file; --load-debug-rollout-data needs it for rollout 4" in error


def test_a_second_run_in_the_same_folder(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The files of the first are set aside as they were, those of both ranks."""
    out = tmp_path / "out"
    everything = dict(
        save_debug_rollout_data=out / "rollouts/{rollout_id}", record_timeline="", no_tensorboard=None, no_plot=None, save_hf=out / "hf"
    )  # fmt: skip
    first = server.train(work.flags(out, num_rollout=2, **everything), tmp_path / "a", ranks=2)
    assert "earlier" not in first.ok().out
    (out / "notes.txt").write_text("mine")
    written = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    flags = work.flags(out, num_rollout=1, **everything)
    done = server.train(flags, tmp_path / "b", ranks=2).ok()
    (place,) = out.glob("earlier-*")
    assert (
        f"{out} had an earlier run, whose metrics, rollouts and logs are now in {place}" in done.out
    )
    assert done.out.count("earlier") == 2
    moved = {p.relative_to(place): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    stays = {path for path in written if path.parts[0] in ("hf", "notes.txt")}
    assert moved == {path: data for path, data in written.items() if path not in stays}
    assert [row["step"] for row in rows_of(out)] == [1]
    assert {p.name for p in (out / "rollouts").iterdir() if p.suffix == ".json"} == {
        *("1.json", "1.tokens.json")
    }


def test_rollout_only(server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path) -> None:
    argv = work.flags(
        tmp_path,
        num_rollout=2,
        debug_rollout_only="",
        save_debug_rollout_data=tmp_path / TEMPLATE,
        lr=None,
        no_plot=None,
    )
    server.train(argv, tmp_path / "log").ok()
    assert sampled(tmp_path / TEMPLATE, 0) == sampled(full_run / TEMPLATE, 0)
    assert sampled(tmp_path / TEMPLATE, 1) != sampled(
        full_run / TEMPLATE, 1
    )  # nothing was learnt in between
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    assert (tmp_path / "report.png").exists()
    refused = server.train(
        work.flags(tmp_path, debug_rollout_only="", save=tmp_path / "ck"), tmp_path / "log"
    )
    assert (
        refused.status == 2
        and "--save" in refused.err
        and "cannot be combined with --debug-rollout-only" in refused.err
    )


def test_a_custom_reward_sees_the_sample(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(
        "import json\n"
        "async def judge(args, sample):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
        "        file.write(json.dumps([sample.prompt, sample.label, sample.response_length, len(sample.tokens), args.reward_key]) + '\\n')\n"
        "    return {'score': float(len(sample.response)), 'other': 3}\n"
    )
    argv = work.flags(
        tmp_path,
        num_rollout=1,
        custom_rm_path=f"{reward}:judge",
        reward_key="score",
        rollout_shuffle=None,
    )
    server.train(argv, tmp_path / "log").ok()
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()[:4]]
    assert len(seen) == 16
    assert {(prompt, label) for prompt, label, *_ in seen} == {
        (f"<|user|>{row['messages'][0]['content']}<|assistant|>", row["answer"]) for row in rows
    }
    assert all(key == "score" and 1 <= length <= 8 < total for _, _, length, total, key in seen)


RAISES = "def judge(args, sample):\n    if sample.index % 3 == 0:\n        raise ZeroDivisionError('bad luck')\n    return 1.0 * sample.response_length\n"


def test_failed_samples_below_the_limit_are_left_out(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(RAISES)
    argv = work.flags(
        tmp_path, num_rollout=1, custom_rm_path=f"{reward}:judge", max_failed_samples=0.4
    )
    server.train(argv, tmp_path / "log").ok()
    row = rows_of(tmp_path)[0]
    assert row["rollout/failed_frac"] == row["rollout/reward_nonfinite"] / 16 == 6 / 16
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0


def test_failed_samples_above_the_limit_stop_both_ranks(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(RAISES)
    done = server.train(
        work.flags(tmp_path, custom_rm_path=f"{reward}:judge"),
        tmp_path / "log",
        ranks=2,
        timeout_s=60,
    )
    error = done.error()
    assert error.startswith(
        "error: rollout 1: 37.5% of the samples have no usable response or reward, more than --max-failed-samples 0.1"
    )
    assert "sample 0: the reward raised ZeroDivisionError: bad luck" in error
    assert done.seconds < 150


def test_a_failure_of_one_rank_alone_is_reported_once(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Sample 1 is graded by rank 1; rank 0 loses the connection and is quiet about it."""
    reward = tmp_path / "mine.py"
    reward.write_text("def judge(args, sample):\n    return 'good' if sample.index == 1 else 1.0\n")
    done = server.train(
        work.flags(tmp_path, custom_rm_path=f"{reward}:judge"),
        tmp_path / "log",
        ranks=2,
        timeout_s=200,
    )
    assert "sample 1" in done.error() and "str" in done.error()
    assert done.seconds < 150


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        pytest.param("SIGINT", 1, marks=pytest.mark.extended),
        pytest.param("SIGKILL", 1, marks=SLOW),
        ("SIGINT", 2),
    ],
)
def test_signals_leave_no_process_behind(
    work: Workspace, tmp_path: Path, what: str, ranks: int
) -> None:
    """Neither ranks nor reward workers. Ctrl-C reaches all processes of the terminal, two ranks
    through their launcher, and ends the run as SIGTERM does: saved, with plot, table and the
    command that continues it, and not a word of torchrun's."""
    command = [
        *[word.replace("torch.distributed.run", "slime_like.torchrun") for word in torchrun(ranks)],
        *work.flags(
            tmp_path, num_rollout=100000, save=tmp_path / "ck", save_interval=1, no_plot=None
        ),
    ]
    command = (
        command
        if ranks > 1
        else [command[0], "train.py", *command[command.index("train.py") + 1 :]]
    )
    output = tmp_path / "output.txt"
    with (
        output.open("w") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**clean_environment(), **ENVIRONMENT},
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.default_int_handler
            ),  # a job in the background ignores it, and so would we
        ) as process,
    ):
        started: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 200
            while not (tmp_path / "metrics.jsonl").exists() or len(rows_of(tmp_path)) < 2:
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.1)
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= ranks, "at least a reward worker for each rank"
            if what == "SIGINT":
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.kill()
            status = process.wait(timeout=120)
            _, alive = psutil.wait_procs(started, timeout=60)
            assert alive == []
        finally:
            for child in started:
                if child.is_running():
                    child.kill()
            process.kill()
    assert status != 0
    if what == "SIGINT":
        text = output.read_text()
        assert status == 130 and "Traceback" not in text, text[-3000:]
        assert "Ctrl-C: the run ends after this rollout; Ctrl-C again ends it at once" in text
        done = re.search(r"stopped by Ctrl-C after rollout (\d+) of 100000, saved in ", text)
        assert done and (tmp_path / "ck" / f"iter_{int(done[1]):07d}").is_dir()
        assert (tmp_path / "report.png").is_file() and "rollout/reward_mean" in text
        assert "death signal" not in text, text
        launcher = "python -m slime_like.torchrun --nproc-per-node 2"
        program = "python" if ranks == 1 else launcher
        last = text.rstrip().splitlines()[-1]
        assert last.startswith(f"to continue: {program} train.py --hf-checkpoint "), last
        assert last.endswith(f" --load {tmp_path}/ck")
