"""A teacher behind servers: its log-probs are the model's own, and whatever a server does costs at
most the sample."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_like.cli.tiny_model import make_model, make_tokenizer
from slime_like.errors import RunError
from slime_like.rollout.teacher_client import ServedTeacher, TeacherSettings
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus
from tests.fake_sglang import FakeServer, Fault, changed, death_in_the_middle, silence, status, text

TOKENIZER = make_tokenizer()
ATTEMPTS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("teacher"))
    make_model(TOKENIZER, hidden_size=32, num_layers=1, seed=3).save_pretrained(folder)
    return folder


@pytest.fixture
def server(model: str) -> Iterator[FakeServer]:
    with FakeServer(model) as server:
        server.engine.update_weights(iter(load_file(Path(model) / "model.safetensors").items()), 1)
        server.tokenizer = TOKENIZER
        yield server


def teacher(*servers: FakeServer, timeout_s: float = 5.0) -> ServedTeacher:
    settings = TeacherSettings(tuple(s.url for s in servers), timeout_s, ATTEMPTS, concurrency=4)
    return ServedTeacher(settings, TOKENIZER)


def groups() -> list[SampleGroup]:
    """Two groups of three; the last sample was given up by the engine. Token 100 is the last of the
    vocabulary."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for g in range(2):
        prompt = torch.randint(5, 100, (4,), generator=generator)
        lengths = (3, 1, 7)
        responses = [
            torch.cat([torch.tensor([100]), torch.randint(5, 101, (n - 1,), generator=generator)])
            for n in lengths
        ]
        samples = [
            Sample(
                g, 3 * g + i, torch.cat([prompt, r]), len(r), torch.ones(len(r), dtype=torch.bool)
            )
            for i, r in enumerate(responses)
        ]
        made.append(SampleGroup(g, tuple(samples)))
    lost = Sample(
        1,
        5,
        made[1].samples[0].tokens[:4],
        0,
        torch.zeros(0, dtype=torch.bool),
        status=SampleStatus.ABORTED,
    )
    return [made[0], SampleGroup(1, (*made[1].samples[:2], lost))]


def own(model: str, sample: Sample) -> torch.Tensor:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = network(sample.tokens[None]).logits[0].log_softmax(-1)[sample.prompt_length - 1 : -1]
    return rows.gather(-1, sample.tokens[sample.prompt_length :, None])[:, 0]


def graded(teacher: ServedTeacher) -> tuple[list[Sample], dict[str, float]]:
    found, metrics = teacher.grade(groups())
    return [sample for each in found for sample in each.samples], metrics


def test_every_response_gets_the_models_own_log_probs(model: str, server: FakeServer) -> None:
    teacher(server).probe()
    samples, metrics = graded(teacher(server))
    for sample in samples[:5]:
        assert sample.teacher_log_probs is not None and sample.status == SampleStatus.COMPLETED
        torch.testing.assert_close(sample.teacher_log_probs, own(model, sample), atol=1e-5, rtol=0)
    assert samples[5].teacher_log_probs is None and samples[5].status == SampleStatus.ABORTED
    assert metrics["rollout/opd_dropped"] == 0 and metrics["rollout/opd_teacher_s"] > 0
    asked = [
        body
        for path, body in server.seen
        if path == "/generate" and "text" not in body and "token_ids_logprob" not in body
    ]
    assert len(asked) == 5 and all(
        body["sampling_params"]["max_new_tokens"] == 0 and body["logprob_start_len"] == 3
        for body in asked
    )


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (status(503), "status_503"),
        (silence(3), "total_timeout"),
        (death_in_the_middle, "connection_lost"),
    ],
    ids=["status 503", "hang", "death in the middle"],
)
def test_a_passing_fault_costs_time_only(server: FakeServer, fault: Fault, counted: str) -> None:
    server.faults = [fault]
    samples, metrics = graded(teacher(server, timeout_s=1.0))
    assert all(s.teacher_log_probs is not None for s in samples[:5])
    assert (
        metrics[f"rollout/opd_request_{counted}"] == metrics["rollout/opd_request_retries"] == 1
        and metrics["rollout/opd_dropped"] == 0
    )


def test_a_server_that_is_gone_is_made_up_for_by_the_other(model: str, server: FakeServer) -> None:
    with FakeServer(model) as gone:
        both = teacher(gone, server)
        gone.stop()
        samples, metrics = graded(both)
    assert (
        all(s.teacher_log_probs is not None for s in samples[:5])
        and metrics["rollout/opd_request_connect"] == 3
    )


def entries(change: Any) -> Fault:
    return changed(
        lambda answer: answer["meta_info"].update(
            input_token_logprobs=change(answer["meta_info"]["input_token_logprobs"])
        )
    )


WRONG: dict[str, tuple[list[Fault | None], str]] = {
    "an error that lasts": ([status(500, "out of memory")] * ATTEMPTS, "status 500: out of memory"),
    "a refusal": ([status(403, "not you")], "status 403: not you"),
    "html": ([text("<html>502</html>")], "invalid JSON"),
    "no log-probs": (
        [changed(lambda a: a["meta_info"].pop("input_token_logprobs"))],
        "input_token_logprobs is missing",
    ),
    "fewer": ([entries(lambda e: e[:-1])], "log-probs for"),
    "NaN": ([entries(lambda e: [*e[:-1], [float("nan"), *e[-1][1:]]])], "is nan"),
    "None": ([entries(lambda e: [*e[:-1], [None, *e[-1][1:]]])], "is None"),
    "of another token": (
        [entries(lambda e: [*e[:-1], [e[-1][0], 3, None]])],
        "and the token there is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sample_without_an_answer_is_given_up_and_counted(server: FakeServer, name: str) -> None:
    """Its group and all others are complete; nothing is padded or cut."""
    server.faults, words = list(WRONG[name][0]), WRONG[name][1]
    asking = teacher(server)
    (first,) = [g for g in groups() if g.group_id == 0]
    found, metrics = asking.grade([SampleGroup(0, first.samples[:1])])
    (lost,) = found[0].samples
    assert (
        lost.status == SampleStatus.ABORTED
        and lost.teacher_log_probs is None
        and metrics["rollout/opd_dropped"] == 1
    )
    assert words in lost.metadata["failure"] and lost.metadata["failure"].startswith(
        "the teacher: "
    )
    samples, metrics = graded(asking)
    assert metrics["rollout/opd_dropped"] == 0 and all(
        s.teacher_log_probs is not None for s in samples[:5]
    )


def test_a_token_that_the_teacher_may_not_know_gives_the_sample_up(server: FakeServer) -> None:
    """One without a text; SGLang would report the log-prob of its last token instead."""
    (first, *_) = groups()
    tokens = first.samples[0].tokens.clone()
    tokens[-1] = 101
    found, metrics = teacher(server).grade(
        [SampleGroup(0, (Sample(0, 9, tokens, 3, torch.ones(3, dtype=torch.bool)),))]
    )
    assert (
        metrics["rollout/opd_dropped"] == 1
        and "token 101 exceeds" in found[0].samples[0].metadata["failure"]
    )


def test_a_teacher_that_does_not_answer_stops_the_start(model: str, server: FakeServer) -> None:
    with FakeServer(model) as gone:
        asking = teacher(gone)
    with pytest.raises(
        RunError,
        match=f"--opd-teacher-url: no answer: {re.escape(gone.url)}/generate: no connection",
    ):
        asking.probe()


class Other:
    """A tokenizer that reads one letter otherwise, or has one token more."""

    def __init__(self, letter: str = "", more: int = 0) -> None:
        self.letter, self.more = letter, more

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, words: str) -> dict[str, list[int]]:
        ids = TOKENIZER(words)["input_ids"]
        wrong = TOKENIZER.convert_tokens_to_ids(self.letter) if self.letter else None
        return {"input_ids": [i + 1 if i == wrong else i for i in ids]}

    def get_vocab(self) -> dict[str, int]:
        return {**TOKENIZER.get_vocab(), **({"<|more|>": 100 + self.more} if self.more else {})}


def test_another_tokenizer_or_a_smaller_vocabulary_stops_the_start(server: FakeServer) -> None:
    settings = TeacherSettings((server.url,))
    with pytest.raises(RunError, match=r"has another tokenizer than the policy.*from index"):
        ServedTeacher(settings, Other(letter="q")).probe()
    with pytest.raises(RunError, match=r"lacks the policy's token 104.*valid range is \[0, 101\)"):
        ServedTeacher(settings, Other(more=4)).probe()


def test_a_server_without_a_tokenizer_is_warned_of(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.tokenizer = None
    teacher(server).probe()
    assert len(caplog.messages) == 2 and "is not compared" in caplog.text
