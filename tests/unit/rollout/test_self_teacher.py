"""Self-distillation: the divergence against loops written from the papers, the likeliest tokens, the
average of weights, and what the teacher's prompt is made of. Runs are in
tests/e2e/test_self_distillation_runs.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_patches

megatron_patches.apply()

from arguments.schema import DataConfig, DistillationConfig  # noqa: E402
from slime_like.advantages import AdvantageSettings, Outcomes, estimate_advantages  # noqa: E402
from slime_like.cli.tiny_model import make_tokenizer  # noqa: E402
from slime_like.data.prompt_format import PromptFormat, RowKeys  # noqa: E402
from slime_like.data.prompts import PromptSource  # noqa: E402
from slime_like.losses.distillation import set_divergence  # noqa: E402
from slime_like.megatron.ops import fused_linear_logprob  # noqa: E402
from slime_like.megatron.ops.fused_linear_logprob import fused_linear_log_probs  # noqa: E402
from slime_like.megatron.ops.top_tokens import top_tokens  # noqa: E402
from slime_like.rollout.self_teacher import TeacherPrompts, feedback_of, fill  # noqa: E402
from slime_like.samples.groups import SampleGroup  # noqa: E402
from slime_like.types import REWARD_DETAILS, Sample, SampleStatus  # noqa: E402

T, V = 5, 12


def logits_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(T, V, dtype=torch.float64, generator=generator)


def by_the_paper(student: Tensor, teacher: Tensor, kept: Tensor, alpha: float) -> Tensor:
    """[T] from probabilities [T, V]: over the kept tokens, and one event for all others."""
    found = []
    for t in range(T):
        events = [[int(v)] for v in kept[t]] + [[v for v in range(V) if v not in kept[t].tolist()]]
        total = torch.zeros((), dtype=torch.float64)
        for event in events:
            if not event:
                continue
            p = sum((student[t, v] for v in event), torch.zeros((), dtype=torch.float64))
            q = sum((teacher[t, v] for v in event), torch.zeros((), dtype=torch.float64))
            if alpha == 1:
                total = total + p * (p / q).log()
            elif alpha == 0:
                total = total + q * (q / p).log()
            else:
                m = (1 - alpha) * p + alpha * q
                total = total + (1 - alpha) * p * (p / m).log() + alpha * q * (q / m).log()
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 4, V])
def test_the_divergence_and_its_gradient_are_the_papers(k: int, alpha: float) -> None:
    """SDPO's, with a bucket for what is not among the student's likeliest; of all tokens, that of
    the whole distributions."""
    teacher = logits_of(1).softmax(-1)
    found, wanted = (logits_of(0).requires_grad_() for _ in range(2))
    kept = found.detach().topk(k, dim=1).indices
    weights = torch.arange(1.0, T + 1, dtype=torch.float64)
    ours = set_divergence(found.log_softmax(-1).gather(1, kept), teacher.gather(1, kept), alpha)
    theirs = by_the_paper(wanted.softmax(-1), teacher, kept, alpha)
    (weights * ours).sum().backward()
    (weights * theirs).sum().backward()
    assert found.grad is not None and wanted.grad is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_token_without_a_teacher_has_neither_loss_nor_gradient(alpha: float) -> None:
    """Whatever its log-probs are: those of inactive rows are 0. A teacher that rules a token out
    gives a finite number."""
    log_probs = logits_of(0).log_softmax(-1)[:, :4].clone()
    log_probs[1] = 0.0
    log_probs.requires_grad_()
    teacher = logits_of(1).softmax(-1)[:, :4].clone()
    teacher[:2], teacher[2, 0] = 0.0, 0.0
    found = set_divergence(log_probs, teacher, alpha)
    found.sum().backward()
    assert log_probs.grad is not None
    assert not found[:2].any() and not log_probs.grad[:2].any()
    assert bool(torch.isfinite(found).all() and torch.isfinite(log_probs.grad).all())
    assert bool((found[2:] > 0).all())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear_logprob, "MIN_COLUMNS", 3)
    monkeypatch.setattr(fused_linear_logprob, "BLOCK_ELEMENTS_CPU", 12)


@pytest.mark.parametrize("k", [1, 5, V - 1])
@pytest.mark.parametrize("chunk_size", [2, -1])
@pytest.mark.usefixtures("small_blocks")
def test_the_likeliest_tokens(k: int, chunk_size: int) -> None:
    """Padding of the vocabulary is never among them."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, 6), torch.randn(V, 6)
    rows = torch.tensor([4, 0, 1])
    found = top_tokens(hidden, weight, k=k, vocab_size=V - 1, rows=rows, chunk_size=chunk_size)
    logits = (hidden @ weight.T)[rows, : V - 1]
    assert torch.equal(found, logits.topk(k, dim=1).indices)


@pytest.mark.usefixtures("small_blocks")
def test_log_probs_of_several_labels_and_their_gradients() -> None:
    """Against autograd through the logits; labels may repeat."""
    torch.manual_seed(0)
    hidden = torch.randn(T, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V - 1, (T, 4))
    labels[0] = labels[0, 0]
    rows = torch.tensor([3, 0, 1])
    of_log_probs, of_entropy = torch.randn(3, 4).double(), torch.randn(3).double()
    found = fused_linear_log_probs(
        hidden, weight, labels, vocab_size=V - 1, rows=rows, temperature=0.7, chunk_size=2
    )
    log_p = ((hidden @ weight.T)[rows, : V - 1] / 0.7).log_softmax(-1)
    wanted = (log_p.gather(1, labels[rows]), -(log_p.exp() * log_p).sum(-1))
    grads = [
        torch.autograd.grad(
            (of_log_probs * a).sum() + (of_entropy * b).sum(), [hidden, weight], retain_graph=True
        )
        for a, b in (found, wanted)
    ]
    for ours, theirs in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rewards_give_no_advantage_where_the_teacher_alone_trains() -> None:
    rewards = torch.tensor([1.0, 0.0])
    outcomes = Outcomes(rewards, torch.tensor([0, 0]), torch.tensor([2, 1]))
    masks = [torch.tensor([True, True]), torch.tensor([True])]
    gaps = [torch.tensor([0.5, -1.0]).double(), torch.tensor([2.0]).double()]
    settings = AdvantageSettings("grpo", distillation_coef=0.5, distillation_only=True)
    found = estimate_advantages(
        settings, outcomes, local_indices=[0, 1], masks=masks, teacher_gap=gaps
    )
    assert [value.tolist() for value in found.values] == [[-0.25, 0.5], [-1.0]]


# --- the teacher's prompt ---------------------------------------------------------------------------

TEMPLATES: dict[str, Any] = dict(
    opd_prompt_template="{prompt}{demonstration}{feedback}?",
    opd_demonstration_template=" like {demonstration}",
    opd_feedback_template=" but {feedback}",
)


def prompts_of(**settings: Any) -> TeacherPrompts:
    config = DistillationConfig(use_opd=True, opd_type="self", **(TEMPLATES | settings))
    data = DataConfig()
    form = PromptFormat(
        data, make_tokenizer(), keys=RowKeys.of("rows.jsonl", data), teaches_itself=True
    )
    return TeacherPrompts(config, form, positions=64)


def group(
    rewards: list[float | None], responses: str, demonstration: str | None = None, **metadata: Any
) -> SampleGroup:
    context = {"teacher_context": {"prompt": "ab", "demonstration": demonstration}, **metadata}
    one = Sample(
        group_id=0,
        sample_id=0,
        tokens=torch.tensor([1, 2, 3]),
        response_length=1,
        loss_mask=torch.tensor([True]),
        metadata=context,
    )
    samples = [
        replace(one, sample_id=i, reward=reward, response=response)
        for i, (reward, response) in enumerate(zip(rewards, responses, strict=True))
    ]
    return SampleGroup(0, tuple(samples))


def texts_of(prompts: TeacherPrompts, *groups: SampleGroup) -> tuple[list[str | None], float]:
    graded, metrics = prompts.grade(groups)
    tokenizer = make_tokenizer()
    found: list[str | None] = []
    for each in graded:
        for sample in each.samples:
            assert isinstance(sample, Sample)
            prompt = sample.teacher_prompt
            found.append(None if prompt is None else tokenizer.decode(prompt.tolist()))
    return found, metrics["rollout/opd_untaught"]


def test_a_demonstration_of_the_row() -> None:
    assert texts_of(prompts_of(), group([0.0, 1.0], "xy", "cd")) == (["ab like cd?"] * 2, 0)
    assert texts_of(prompts_of(), group([0.0, 1.0], "xy")) == ([None, None], 2)


def test_a_successful_response_teaches_the_others_and_not_itself() -> None:
    prompts = prompts_of(opd_success_reward=1.0)
    found = texts_of(prompts, group([0.0, 1.0, 1.0, None], "wxyz"))
    assert found == (["ab like x?", "ab like y?", "ab like x?", "ab like x?"], 0)
    assert texts_of(prompts, group([0.0, 1.0], "xy")) == (["ab like y?", None], 1)
    assert texts_of(prompts, group([0.0, 0.9], "xy")) == ([None, None], 2)
    assert texts_of(prompts, group([0.0, 1.0], "xy", "cd"))[0] == ["ab like cd?"] * 2
    failed = group([0.0, 1.0], "xy")
    last = failed.samples[1]
    assert isinstance(last, Sample)
    failed = replace(failed, samples=(failed.samples[0], replace(last, status=SampleStatus.FAILED)))
    assert texts_of(prompts, failed) == ([None, None], 2)


def test_feedback_stands_where_it_is_asked_for() -> None:
    prompts = prompts_of(opd_feedback_key="hint")
    details = {REWARD_DETAILS: {"hint": "no {x}"}, "hint": "of the row"}
    assert texts_of(prompts, group([0.0], "x", **details))[0] == ["ab but no {x}?"]
    assert texts_of(prompts, group([0.0], "x", "cd", hint="h"))[0] == ["ab like cd but h?"]
    assert texts_of(prompts, group([0.0], "x")) == ([None], 1)
    sample = group([0.0], "x", hint=3).samples[0]
    assert isinstance(sample, Sample)
    with pytest.raises(ValueError, match=r"--opd-feedback-key hint: .* sample 0 "):
        feedback_of(sample, "hint")


def test_a_prompt_that_is_too_long_teaches_nothing() -> None:
    assert texts_of(prompts_of(opd_max_prompt_len=11), group([0.0], "x", "cd"))[1] == 0
    assert texts_of(prompts_of(opd_max_prompt_len=10), group([0.0], "x", "cd"))[1] == 1
    assert texts_of(prompts_of(), group([0.0], "x", "c" * 54))[1] == 0, "64 positions in all"
    assert texts_of(prompts_of(), group([0.0], "x", "c" * 55))[1] == 1


def test_braces_that_are_no_names_stay() -> None:
    assert fill("{a}{b} {} {c d} {", a="{b}", b="B") == "{b}B {} {c d} {"


def test_the_last_message_is_written_anew(tmp_path: Path) -> None:
    """In the place of the old one, through the chat template; other messages stay."""
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    rows = [{"input": chat, "shown": "d"}, {"input": "q", "shown": "d"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    data = DataConfig(
        prompt_data=str(file), apply_chat_template=True, opd_demonstration_key="shown"
    )
    source = PromptSource(data, tokenizer, teaches_itself=True)
    form = PromptFormat(data, tokenizer, keys=RowKeys.of(str(file), data), teaches_itself=True)
    for row, prompt in zip(rows, source.next_prompts(2), strict=True):
        assert prompt.metadata["teacher_context"] == {"prompt": row["input"], "demonstration": "d"}
        written = form.teacher_text(prompt.metadata, lambda text: f"{text} as d")
        assert written == prompt.text.replace("q", "q as d", 1) and "q as d" in written
    plain = PromptSource(replace(data, opd_demonstration_key=None), tokenizer)
    assert plain.next_prompts(1)[0].metadata == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "q"}, "missing key 'shown' .--opd-demonstration-key"),
        ({"input": "q", "shown": 3}, "'shown' .--opd-demonstration-key. must be a string, not int"),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "shown": "d"},
            "the last message must be text with --opd-type self",
        ),
    ],
)
def test_a_row_that_cannot_teach_is_named(tmp_path: Path, row: Any, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    data = DataConfig(
        prompt_data=str(file), apply_chat_template=True, opd_demonstration_key="shown"
    )
    with pytest.raises(ValueError, match=message):
        PromptSource(data, make_tokenizer(), teaches_itself=True)


def test_the_bucket_of_what_is_left_is_finite() -> None:
    """A policy that is certain of its K tokens."""
    certain = torch.tensor([[0.0, -40.0]], requires_grad=True)
    found = set_divergence(certain, torch.tensor([[1.0, 0.0]]), 1.0)
    found.sum().backward()
    assert certain.grad is not None and math.isfinite(float(found[0].detach()))
    assert bool(torch.isfinite(certain.grad).all())
