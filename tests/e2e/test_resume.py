"""Checkpoints: a run that was interrupted ends bit by bit as one that was not; what --load means;
and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import ENVIRONMENT, ROOT, TrainServer, clean_environment

SCHEDULE = dict(lr_decay_style="linear", lr_decay_iters=8, lr_warmup_iters=1, weight_decay=0.1)


def flags(work: Workspace, out: Path, **changes: str | int | float | Path | None) -> list[str]:
    saved = {"save_debug_rollout_data": out / "rollout_{rollout_id}", "save_hf": out / "hf"}
    return work.flags(out, **{**SCHEDULE, **saved, **changes})


def check_same(full_run: Path, parts: Path) -> None:
    """Numbers, sampled tokens and weights of 4 rollouts."""
    numbers = same_numbers(rows_of(full_run))
    assert [row["step"] for row in numbers] == [1, 2, 3, 4]
    assert len({row["train/lr"] for row in numbers}) == 4, (
        "a schedule that stands still would hide a lost position"
    )
    assert min(row["train/grad_norm"] for row in numbers) > 1e-3
    assert same_numbers(rows_of(parts)) == numbers
    for rollout in range(4):
        assert sampled(parts / "rollout_{rollout_id}", rollout) == sampled(
            full_run / "rollout_{rollout_id}", rollout
        )
    expected, found = weights_of(full_run / "hf"), weights_of(parts / "hf")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """4 rollouts of one process in one go, with a checkpoint every 2; `full_run / "checkpoints"`."""
    out = tmp_path_factory.mktemp("whole")
    server.train(
        flags(work, out, num_rollout=4, save=out / "checkpoints", save_interval=2), out / "log"
    ).ok()
    return out


@pytest.mark.extended
def test_the_same_command_line_after_a_kill(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """--load is --save: the first start finds no folder and begins, the second continues; SIGKILL comes
    after the first checkpoint."""
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, num_rollout=4, save=root, load=root, save_interval=2)
    slowly = f"""
import sys, time
import slime_like.metrics.logger as logger
log = logger.MetricsLogger.log
def slow_log(self, step, values):
    log(self, step, values)
    time.sleep(600 if step == 3 else 0)
logger.MetricsLogger.log = slow_log
sys.argv = ["train.py", *{argv!r}]
import train
train.main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", slowly], cwd=ROOT, env={**clean_environment(), **ENVIRONMENT}
    ) as process:
        deadline = time.monotonic() + 250
        while not (tmp_path / "metrics.jsonl").exists() or len(rows_of(tmp_path)) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    (root / "iter_0000004.tmp" / "policy").mkdir(parents=True)  # as a kill within a save leaves it
    done = server.train(argv, tmp_path / "log").ok()
    assert "rollout 3/4" in done.out
    assert "rollout 2/4" not in done.out
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4"
    check_same(full_run, tmp_path)


def test_a_finished_run_says_so(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """And exports its weights, if it is asked to."""
    argv = flags(
        work,
        tmp_path,
        num_rollout=4,
        load=full_run / "checkpoints",
        save_hf=tmp_path / "{rollout_id}",
    )
    done = server.train(argv, tmp_path / "log").ok()
    assert (tmp_path / "4" / "config.json").is_file()
    assert (tmp_path / "4" / "model.safetensors").is_file()
    assert "nothing to do: the checkpoint has 4 of 4 rollouts" in done.out
    assert "rollout 4/4" not in done.out
    assert done.err == ""


def test_finetune_takes_the_weights_only(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = flags(
        work, tmp_path / "tuned", num_rollout=1, load=full_run / "checkpoints", finetune=""
    )
    server.train(argv, tmp_path / "log1").ok()
    argv = flags(work, tmp_path / "model", num_rollout=1, load=full_run / "hf")
    server.train(argv, tmp_path / "log2").ok()
    tuned, model = (same_numbers(rows_of(tmp_path / name)) for name in ("tuned", "model"))
    assert (
        tuned == model
    )  # both start at step 0, with the first prompts and a new optimizer, from the weights after 4 rollouts
    assert [row["step"] for row in tuned] == [1]
    first = same_numbers(rows_of(full_run))[0]
    assert tuned[0]["train/lr"] == first["train/lr"]
    assert tuned[0]["train/loss"] != first["train/loss"]


@pytest.mark.extended
def test_a_kl_to_the_first_model_after_finetuning_is_no_breach(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """The gate on the first KL holds for a policy that is the reference, not for one that was
    loaded."""
    kl = dict(num_rollout=1, ref_load=work.model, use_kl_loss="", kl_loss_coef=0.1)
    server.train(
        flags(work, tmp_path / "a", load=full_run / "checkpoints", finetune="", **kl),
        tmp_path / "log1",
    ).ok()
    assert rows_of(tmp_path / "a")[0]["train/kl"] > 1e-6


@pytest.mark.extended
def test_another_reference_model_is_reported(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """Checkpoints do not hold it, and know which one it was."""
    kl = dict(use_kl_loss="", kl_loss_coef=0.1, num_steps_per_rollout=1)
    first = flags(
        work, tmp_path / "a", num_rollout=1, ref_load=work.model, save=tmp_path / "ck", **kl
    )
    server.train(first, tmp_path / "log1").ok()
    for number, (reference, reported) in enumerate(
        ((work.model, False), (full_run / "hf", True), (full_run / "checkpoints", True))
    ):
        argv = flags(
            work,
            tmp_path / f"b{number}",
            num_rollout=2,
            ref_load=reference,
            load=tmp_path / "ck",
            **kl,
        )
        done = server.train(argv, tmp_path / f"log2-{number}").ok()
        assert (
            "warning: the reference model differs from that of the checkpoint's run" in done.out
        ) is reported


def test_no_load_optim_keeps_the_position(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = flags(
        work, tmp_path, num_rollout=3, load=full_run / "checkpoints", ckpt_step=2, no_load_optim=""
    )
    server.train(argv, tmp_path / "log").ok()
    rows = same_numbers(rows_of(tmp_path))
    assert [row["step"] for row in rows] == [3]
    assert sampled(tmp_path / "rollout_{rollout_id}", 2) == sampled(
        full_run / "rollout_{rollout_id}", 2
    )
    actual, other = weights_of(tmp_path / "hf"), weights_of(full_run / "hf")
    assert any(not torch.equal(actual[name], other[name]) for name in actual)


@pytest.mark.parametrize("damage", ["missing", "garbage", "dangling"])
def test_a_damaged_tracker(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, damage: str
) -> None:
    """The newest complete checkpoint is taken, and said."""
    root = tmp_path / "checkpoints"
    shutil.copytree(full_run / "checkpoints", root)
    tracker = root / "latest_checkpointed_iteration.txt"
    if damage == "missing":
        tracker.unlink()
    else:
        tracker.write_text("7" if damage == "dangling" else "four")
    done = server.train(flags(work, tmp_path, num_rollout=4, load=root), tmp_path / "log").ok()
    assert "taking the newest complete checkpoint, step 4" in done.out
    assert "nothing to do" in done.out


@pytest.mark.extended
def test_a_longer_run_follows_its_own_schedule(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = flags(
        work, tmp_path, num_rollout=6, lr_decay_iters=16, lr=5e-4, load=full_run / "checkpoints"
    )
    done = server.train(argv, tmp_path / "log").ok()
    assert "lr_decay_steps 16 (checkpoint: 8)" in done.out
    assert "max_lr 0.0005 (checkpoint: 0.001)" in done.out
    # 12 steps before the last: (16 - 11) / 15 of 5e-4, the warm-up being one step
    assert rows_of(tmp_path)[-1]["train/lr"] == pytest.approx(5e-4 * (16 - 11) / 15)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_another_model_is_one_error(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, ranks: int
) -> None:
    from slime_like.cli.tiny_model import save_model

    model = tmp_path / "wider"
    save_model(model, hidden_size=64, num_layers=2)
    argv = flags(work, tmp_path, num_rollout=4, load=full_run / "checkpoints", hf_checkpoint=model)
    error = server.train(argv, tmp_path / "log", ranks=ranks).error()
    assert (
        "iter_0000004 is of another model: hidden_size 32 (here: 64), ffn_hidden_size 96 (here: 192), kv_channels 8 (here: 16)"
        in error
    )


def test_what_cannot_be_loaded(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = server.train(flags(work, tmp_path, load=empty), tmp_path / "log")
    message = "holds neither checkpoints nor a Hugging Face model (config.json)"
    assert done.status == 2
    assert f"--load (given: {str(empty)!r}): {message}" in done.err
    other = tmp_path / "other.jsonl"
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    error = server.train(
        flags(work, tmp_path, num_rollout=5, load=full_run / "checkpoints", prompt_data=other),
        tmp_path / "log",
    ).error()
    assert "differs from the data of the saved run" in error
    damaged = tmp_path / "damaged"
    shutil.copytree(full_run / "checkpoints", damaged)
    file = max(
        (damaged / "iter_0000004" / "policy").glob("*.distcp"), key=lambda path: path.stat().st_size
    )
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    error = server.train(
        flags(work, tmp_path, num_rollout=5, load=damaged), tmp_path / "log"
    ).error()
    assert (
        f"iter_0000004 is damaged: policy/{file.name}: {file.stat().st_size} bytes, not " in error
    )
    assert error.endswith("; --ckpt-step takes another one (2)")
    error = server.train(
        flags(work, tmp_path, num_rollout=5, load=damaged, no_verify_checkpoint=""),
        tmp_path / "log",
    ).error()
    assert "is damaged: " in error, "sizes are looked at whatever was asked for"


def test_the_exported_model_answers_as_the_engine_does(work: Workspace, full_run: Path) -> None:
    """transformers' own greedy generation from --save-hf, against the local engine with the same
    weights."""
    import transformers

    from slime_like.engines.base import GenerateRequest, SamplingParams
    from slime_like.engines.local.engine import LocalEngine

    folder = str(full_run / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    before = weights_of(work.model)
    assert any(
        not torch.equal(before[name], tensor)
        for name, tensor in model.state_dict().items()
        if name in before
    )
    engine = LocalEngine(str(work.model), tokenizer)
    engine.update_weights(iter(weights_of(full_run / "hf").items()), 1)
    messages = [json.loads(line)["messages"] for line in work.prompts.read_text().splitlines()[:6]]
    prompts = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    requests = [GenerateRequest(i, tuple(prompt), seed=i) for i, prompt in enumerate(prompts)]
    for prompt, output in zip(
        prompts,
        engine.generate(requests, SamplingParams(temperature=0, max_new_tokens=12)),
        strict=True,
    ):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert out[0, len(prompt) :].tolist() == list(output.tokens)


def test_a_run_is_continued_in_its_own_folder(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Without --output-dir the folder is named by the time of the first start. One set of numbers,
    one plot; nothing is a warning."""
    root, hook = tmp_path / "ck", f"tests.e2e.faults:work_in {tmp_path}"
    settings = dict(output_dir=None, save_hf=None, num_rollout=4, load=root, exit_interval=2)
    argv = flags(work, tmp_path, save=root, **settings)
    first = server.train(argv, tmp_path / "log-1", hook=hook).ok()
    assert "warning" not in first.out + first.err, first.out
    assert f"no checkpoint in {root} yet: starting at rollout 1" in first.out
    (folder,) = (tmp_path / "outputs").iterdir()
    second = server.train(argv, tmp_path / "log-2", hook=hook).ok()
    assert f"writing {folder}\n" in second.out
    assert f"continuing at rollout 3 of 4, from {root}" in second.out
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]
    names = sorted(path.name for path in tmp_path.glob("rollout_?.json"))
    assert names == [f"rollout_{number}.json" for number in (1, 2, 3, 4)], "as the lines are"
    forked = flags(work, tmp_path, save=tmp_path / "other", **settings | {"num_rollout": 5})
    third = server.train(forked, tmp_path / "log-3", hook=hook).ok()
    assert f"writing {folder}" not in third.out, "another --save is another run"
    assert len(rows_of(folder)) == 4
