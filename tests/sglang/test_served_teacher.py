"""A teacher on a real server: its log-probs are the model's own, and a run learns from it as from
one on Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_like.errors import RunError
from slime_like.rollout.teacher_client import ServedTeacher, TeacherSettings
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample
from tests.e2e.programs import TrainServer
from tests.sglang.conftest import Servers, give_own_weights
from tests.sglang.test_real_servers import EXACT, command_line, rows


def test_log_probs_of_a_real_teacher(demo: Path, servers: Servers) -> None:
    """The last token of the vocabulary among them, which SGLang names 0."""
    give_own_weights(servers, demo / "model")
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    teacher = ServedTeacher(TeacherSettings(tuple(servers.urls)), tokenizer)
    teacher.probe()
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 2, 30)
    tokens = [
        torch.cat([torch.randint(5, 101, (6 + n - 1,), generator=generator), torch.tensor([100])])
        for n in lengths
    ]
    made = [
        Sample(0, i, t, n, torch.ones(n, dtype=torch.bool))
        for i, (t, n) in enumerate(zip(tokens, lengths, strict=True))
    ]
    (found,), metrics = teacher.grade([SampleGroup(0, tuple(made))])
    network = AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32)
    for sample in found.samples:
        with torch.no_grad():
            own = (
                network(sample.tokens[None])
                .logits[0, sample.prompt_length - 1 : -1]
                .log_softmax(-1)
            )
        assert sample.teacher_log_probs is not None, metrics
        wanted = own.gather(-1, sample.tokens[sample.prompt_length :, None])[:, 0]
        torch.testing.assert_close(sample.teacher_log_probs, wanted, atol=EXACT, rtol=0)

    class More:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def get_vocab(self) -> dict[str, int]:
            return {**tokenizer.get_vocab(), "<|more|>": 101}

    with pytest.raises(RunError, match="lacks the policy's token 101"):
        ServedTeacher(TeacherSettings((servers.urls[0],)), More()).probe()


def test_a_run_learns_from_it_as_from_one_on_megatron(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """The policy samples in its own process, and its teacher is what it was at the start. Later
    gaps are those of Megatron's teacher too."""
    give_own_weights(servers, demo / "model")
    teachers = {
        "served": ["--opd-type", "sglang", "--opd-teacher-url", *servers.urls],
        "megatron": ["--opd-type", "megatron", "--opd-teacher-load", str(demo / "model")],
    }
    found = {}
    for name, flags in teachers.items():
        line = command_line(
            demo, [], tmp_path / name, "--rollout-engine", "local", "--use-opd", *flags
        )
        python = line.index("--sglang-python")  # of servers that the run starts
        del line[python : python + 2]
        programs.train(line, tmp_path / f"run-{name}", ranks=1, timeout_s=240).ok()
        found[name] = rows(tmp_path / name)
    for one, two in zip(found["megatron"], found["served"], strict=True):
        for metric in ("rollout/opd_reverse_kl", "train/loss", "train/grad_norm"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=EXACT), metric
        assert two["rollout/opd_dropped"] == 0
    assert found["served"][-1]["rollout/opd_reverse_kl"] > 1e-3  # the policy has moved
