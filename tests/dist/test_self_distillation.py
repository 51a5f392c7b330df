"""A policy that is its own teacher, on Megatron: one optimizer step against transformers and loops
in float64, every layout against the same, and the average of its weights in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model, make_sample
from slime_like.cli.tiny_model import make_model as make_tiny
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.metrics.logger import read_metrics
from slime_like.rollout.recording import save_rollout
from slime_like.samples.groups import SampleGroup
from tests.dist import self_distillation_worker as worker
from tests.dist.backend_worker import Trainer, settings
from tests.dist.float64 import EXACT, WithoutFloat32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("self") / "model"
    make_model(folder, seed=3)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """By transformers' model in float64: log-probs of every next token with the policy's prompt and
    with the teacher's, and the gradient of the paper's loss."""
    from transformers import AutoModelForCausalLM

    with WithoutFloat32():
        policy = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double()
        return of_the_paper(policy)


def of_the_paper(policy: Any) -> dict[str, Any]:
    """What `expected` has."""
    samples = worker.samples_of(1)
    prompts = worker.teacher_prompts(samples)
    top, probs, of_teacher = [], [], []
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        student = next_log_probs(policy, sample.tokens, sample.response_length)
        kept = student.detach().topk(worker.TOP, dim=1).indices
        top.append(kept)
        if i >= len(prompts):
            probs.append(torch.zeros(kept.shape, dtype=torch.float64))
            continue
        longer = worker.with_prompt(sample, prompts[i])
        with torch.no_grad():
            teacher = next_log_probs(policy, longer.tokens, sample.response_length)
        probs.append(teacher.gather(1, kept).exp())
        labels = sample.tokens[-sample.response_length :, None]
        of_teacher.append(teacher.gather(1, labels)[:, 0] * sample.loss_mask)
        for t in sample.loss_mask.nonzero()[:, 0].tolist():
            events = [[v] for v in kept[t].tolist()]
            events.append([v for v in range(student.size(1)) if [v] not in events])
            for event in events:
                p, q = student[t, event].exp().sum(), teacher[t, event].exp().sum()
                m = (1 - worker.ALPHA) * p + worker.ALPHA * q
                term = (1 - worker.ALPHA) * p * (p / m).log() + worker.ALPHA * q * (q / m).log()
                total = total + float(sample.loss_weights[t]) * worker.COEF * term
    total.backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    return dict(
        top=top, probs=probs, log_probs=of_teacher, loss=total.item(), gradients=gradients,
        masks=[s.loss_mask for s in samples],
    )  # fmt: skip


def next_log_probs(policy: Any, tokens: Tensor, response: int) -> Tensor:
    """[R, V]."""
    return policy(tokens[None]).logits[0, :-1][-response:].log_softmax(-1)


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(
        "tests.dist.self_distillation_worker:all_layouts",
        2,
        tmp_path_factory.mktemp("two"),
        {"model": model},
        timeout_s=240,
    )


@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_a_step_is_that_of_the_paper(
    expected: dict[str, Any], found: list[dict[str, Any]], layout: str
) -> None:
    change: dict[str, list[Any]] = {}
    for rank, result in enumerate(each[layout] for each in found):
        first = rank * len(expected["top"]) // 2 if layout == "DP2" else 0
        for i, (top, probs) in enumerate(zip(result["top"], result["probs"], strict=True)):
            mask = expected["masks"][first + i]
            assert sorted_rows(top, mask) == sorted_rows(expected["top"][first + i].tolist(), mask)
            wanted = expected["probs"][first + i][mask]
            torch.testing.assert_close(
                torch.tensor(probs, dtype=torch.float64).view(-1, worker.TOP)[mask],
                wanted,
                rtol=EXACT,
                atol=EXACT,
            )
        for i, log_probs in enumerate(result["log_probs"]):
            torch.testing.assert_close(
                torch.tensor(log_probs, dtype=torch.float64),
                expected["log_probs"][first + i],
                rtol=0,
                atol=EXACT,
            )
        assert result["metrics"]["loss"] == pytest.approx(expected["loss"], rel=EXACT)
        assert result["metrics"]["policy_loss"] == 0
        assert result["behind"] < EXACT < result["moved"], (
            "the teacher is the average of the weights"
        )
        change |= result["change"]
    assert change.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = torch.tensor(change[name], dtype=torch.float64) - gradient
        assert float(difference.norm()) < EXACT * max(1.0, float(gradient.norm())), name


def sorted_rows(rows: list[list[int]], mask: Tensor) -> list[list[int]]:
    return [sorted(row) for row, active in zip(rows, mask.tolist(), strict=True) if active]


def test_a_resumed_run_has_the_same_teacher(alone: Any, tmp_path: Path) -> None:
    """Of recorded responses, in bf16: what is compared depends on the average of the weights, which
    a checkpoint has in float32."""
    model, tokenizer = tmp_path / "model", make_tokenizer()
    make_tiny(tokenizer, hidden_size=32, num_layers=2, seed=1).save_pretrained(model)
    tokenizer.save_pretrained(model)
    generator = torch.Generator().manual_seed(7)
    context = {"teacher_context": {"prompt": "ab", "demonstration": "cd"}}
    for step in range(4):
        samples = [
            replace(
                make_sample(g, j, torch.tensor([3, 5]), generator),
                metadata=context if j else {},
                rollout_log_probs=None,
            )
            for g in (2 * step, 2 * step + 1)
            for j in range(4)
        ]
        groups = [
            SampleGroup(g, tuple(s for s in samples if s.group_id == g))
            for g in (2 * step, 2 * step + 1)
        ]
        save_rollout(str(model / "rollout_{rollout_id}"), step, groups)
    flags = (
        f"--use-opd --opd-type self --opd-success-reward 2 --opd-topk 9 --opd-ema-rate 0.3 --bf16 --save {tmp_path / 'ck'} "
        "--policy-loss-type importance_sampling --micro-batch-size 4 --save-interval 1"
    )
    rows = []
    for name, more in {"whole": "", "rest": f" --load {tmp_path / 'ck'} --ckpt-step 2"}.items():
        out = tmp_path / name
        trainer = Trainer(settings(str(model), flags + more), alone, out)
        trainer.run()
        trainer.close()
        rows.append(read_metrics(out / "metrics.jsonl"))
    names = ("rollout/opd_reverse_kl", "train/opd_divergence", "train/grad_norm", "train/loss")
    full, rest = ([[row[name] for name in names] for row in found] for found in rows)
    assert rest == full[2:]
    assert all(row["rollout/opd_untaught"] == 2 for row in rows[0])
    assert all(row["train/opd_divergence"] > 0 for row in rows[0])
