"""A served reward model: our own server, and the answers of SGLang and vLLM."""

# ruff: noqa: F811 (a fixture that is imported)

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from slime_like.cli.tiny_model import character_tokenizer, make_tokenizer, save_model
from slime_like.errors import RunError
from slime_like.function_args import FunctionArgs
from slime_like.reward_server.model import RewardModel
from slime_like.rewards.grader import Grader
from slime_like.rewards.model_client import classify_url, scores_of
from slime_like.types import Sample, SampleStatus
from tests.reward_models import save_reward_model, scores, served
from tests.unit.rewards.test_remote import Server, server  # noqa: F401


def sample(i: int, tokens: list[int]) -> Sample:
    return Sample(
        group_id=i,
        sample_id=i,
        tokens=torch.tensor(tokens),
        response_length=1,
        loss_mask=torch.ones(1, dtype=torch.bool),
        text="the prompt",
        response="r",
    )


def texts(count: int) -> list[list[int]]:
    drawn = random.Random(1)
    return [[drawn.randrange(5, 90) for _ in range(drawn.randrange(2, 60))] for _ in range(count)]


def grader(url: str, policy: Path | None = None, trust: bool = False, **more: Any) -> Grader:
    of_model = {"hf_checkpoint": str(policy), "trust_remote_code": trust}
    settings = FunctionArgs({} if policy is None else of_model)
    more = {"rm_timeout_s": 100.0, "rm_cache_size": 1000, **more}
    return Grader(rm_type="reward_model", rm_url=url, settings=settings, **more)


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """Of texts of many lengths at once, in batches, from a server that shares the policy's
    tokenizer."""
    folder = save_reward_model(tmp_path / "rm")
    rows = texts(40)
    with (
        served(folder, tmp_path / "log", "--batch-tokens", "200") as url,
        grader(url, policy=folder) as g,
    ):
        graded = g.grade([sample(i, row) for i, row in enumerate(rows)])
        assert [s.reward for s in graded] == pytest.approx(scores(folder, rows), abs=1e-5)
        refused = {
            "none": ({}, "input_ids must be"),
            "foreign": ({"input_ids": [5, 100_000]}, "100000 is no token of a vocabulary"),
            "long": ({"input_ids": [5] * 300}, "300 tokens; the model reads at most 256"),
        }
        for body, words in refused.values():
            answer = httpx.post(f"{url}/classify", json=body, trust_env=False)
            assert answer.status_code == 400 and words in answer.text
        (lost,) = g.grade([sample(1, [5] * 300)])
        assert lost.status == SampleStatus.FAILED and "answered 400" in lost.metadata["failure"]
    expected = scores(folder, rows)
    assert max(expected) - min(expected) > 0.1, "they tell texts apart"


def test_another_tokenizer_stops_the_run(tmp_path: Path) -> None:
    """Its tokens would be graded without any sign of it."""
    folder = save_reward_model(tmp_path / "rm")
    other = tmp_path / "policy"
    character_tokenizer(
        ["<e>", "<u>", *"abcdef"], eos_token="<e>", unk_token="<u>"
    ).save_pretrained(other)
    with (
        served(folder, tmp_path / "log") as url,
        grader(url, policy=other) as g,
        pytest.raises(RunError, match="has another tokenizer than the policy"),
    ):
        g.grade([sample(0, [5, 6])])


def test_a_tokenizer_with_code_of_its_own(server: Server, tmp_path: Path) -> None:
    """Is loaded where --trust-remote-code allows it."""
    tokenizer = character_tokenizer(
        ["<e>", "<u>", *map(chr, range(32, 127))], eos_token="<e>", unk_token="<u>"
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    file = tmp_path / "tokenizer_config.json"
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        if "prompt" in body:
            ids = tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return 200, json.dumps({"tokens": ids}).encode()
        return 200, b'{"embedding": [2.5]}'

    server.answer = answer
    url = f"http://127.0.0.1:{server.server_port}"
    with grader(url, policy=tmp_path, trust=True) as g:
        (graded,) = g.grade([sample(0, [5, 6])])
    assert graded.reward == 2.5 and "prompt" in server.requests[0]


def test_an_encoder_is_no_reward_model(tmp_path: Path) -> None:
    """Its head reads another token, by another name: each request would fail."""
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RunError, match="is a BertForSequenceClassification, without the score"):
        RewardModel(tmp_path, torch.float32, torch.device("cpu"))


def test_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    """transformers would make its score layer at random."""
    save_model(tmp_path / "policy", hidden_size=16, num_layers=1)
    with pytest.raises(RunError, match=r"its weights have no score\.weight"):
        RewardModel(tmp_path / "policy", torch.float32, torch.device("cpu"))
    save_reward_model(tmp_path / "several", labels=3)
    with pytest.raises(RunError, match="has 3 labels; a reward model has one"):
        RewardModel(tmp_path / "several", torch.float32, torch.device("cpu"))
    assert AutoTokenizer.from_pretrained(tmp_path / "several")


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ({"embedding": [0.5], "meta_info": {}}, [0.5]),  # SGLang
        ([{"embedding": [0.5]}], [0.5]),
        ({"object": "list", "data": [{"probs": [-2], "num_classes": 1}]}, [-2.0]),  # vLLM
        ({"embedding": [0.5, 1.0]}, [0.5, 1.0]),
        ({"data": []}, None), ([], None), (1.0, None), ({"embedding": ["x"]}, None), ({"embedding": [True]}, None),
    ],
)  # fmt: skip
def test_answers_of_each_server(answer: Any, scores: list[float] | None) -> None:
    assert scores_of(answer) == scores


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b'{"embedding": [0.5, 1.0]}',
            "answered 2 scores for a text; a reward model has one label",
        ),
        (b'{"embedding": [NaN]}', "answered the score nan"),
        (b'{"score": 1}', "neither SGLang's (embedding) nor vLLM's"),
    ],
)
def test_an_answer_without_one_score_fails_the_sample(
    server: Server, answer: bytes, words: str
) -> None:
    server.answer = lambda body, n: (200, answer)
    with grader(f"http://127.0.0.1:{server.server_port}") as g:
        (lost,) = g.grade([sample(0, [5, 6])])
    assert lost.status == SampleStatus.FAILED and words in lost.metadata["failure"]


def test_the_request_has_the_fields_of_each_server(server: Server) -> None:
    """And equal tokens are one request."""
    server.answer = lambda body, n: (200, json.dumps({"embedding": [sum(body["input"])]}).encode())
    with grader(f"http://127.0.0.1:{server.server_port}") as g:
        assert [s.reward for s in g.grade([sample(i, [5, 6]) for i in range(9)])] == [11] * 9
    assert server.requests == [{"input_ids": [5, 6], "input": [5, 6], "use_activation": False}]


def test_without_a_url() -> None:
    """As where a row's metadata alone names the reward."""
    with (
        Grader(rm_type="reward_model") as g,
        pytest.raises(RunError, match="the reward reward_model requires --rm-url"),
    ):
        g.grade([sample(0, [5, 6])])


def test_paths_of_urls() -> None:
    assert classify_url("http://h:1") == classify_url("http://h:1/") == "http://h:1/classify"
    assert classify_url("http://h:1/a/classify") == "http://h:1/a/classify"
