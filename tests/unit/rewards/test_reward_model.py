"""A served reward model: our own server, and the answers of SGLang and vLLM."""

# ruff: noqa: F811 (a fixture that is imported)

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from slime_like.cli.tiny_model import character_tokenizer, make_tokenizer, save_model
from slime_like.errors import RunError
from slime_like.function_args import FunctionArgs
from slime_like.reward_server.app import make_app
from slime_like.reward_server.model import RewardModel
from slime_like.rewards.custom import RewardArgs
from slime_like.rewards.grader import Grader, _reward_sample
from slime_like.rewards.model_client import RewardModelClient, classify_url, scores_of
from slime_like.rewards.reward_server import OutOfTime
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


def test_a_server_that_starts_late_is_compared_all_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    character_tokenizer(
        ["<e>", "<u>", *"abcdef"], eos_token="<e>", unk_token="<u>"
    ).save_pretrained(tmp_path)
    monkeypatch.setattr("slime_like.rewards.model_client._PROBE_S", 0.2)
    started: list[bool] = []

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        if not started:
            return 503, b"loading"
        return 200, b'{"tokens": [9, 9]}' if "prompt" in body else b'{"embedding": [2.5]}'

    server.answer = answer
    settings = FunctionArgs({"hf_checkpoint": str(tmp_path), "trust_remote_code": False})
    url = f"http://127.0.0.1:{server.server_port}"
    args = RewardArgs(rm_url=url, rm_timeout_s=0.5, rm_cache_size=0, settings=settings)
    client = RewardModelClient(args)
    with pytest.raises(OutOfTime, match=r"/tokenize answered 503"):
        asyncio.run(client.score(args, _reward_sample(sample(0, [5, 6]))))
    started.append(True)
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        asyncio.run(client.score(args, _reward_sample(sample(0, [5, 6]))))


def test_bfloat16_ends_before_the_score(tmp_path: Path) -> None:
    """Scores of one group would be equal where they are not."""
    folder = save_reward_model(tmp_path)
    model = RewardModel(folder, torch.bfloat16, torch.device("cpu"))
    given = torch.tensor(model.scores(texts(20)))
    assert (given.bfloat16().float() != given).any()


def test_a_text_without_a_finite_score_is_refused_for_good(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    model = RewardModel(folder, torch.float32, torch.device("cpu"))
    torch.nn.init.constant_(model._model.score.weight, math.nan)
    with TestClient(make_app(model, 1000)) as client:
        answer = client.post("/classify", json={"input_ids": [5, 6]})
    assert answer.status_code == 400 and "the model's score of the text is nan" in answer.text


def test_a_client_that_left_is_not_served() -> None:
    """A server that is slower than its clients wait would else score none in time."""
    begun = threading.Event()
    go_on = threading.Event()

    class Slow:
        seen: ClassVar[list[int]] = []

        def check(self, tokens: list[int]) -> list[int]:
            return tokens

        def scores(self, batch: list[list[int]]) -> list[float]:
            begun.set()
            assert go_on.wait(60)
            self.seen.extend(text[0] for text in batch)
            return [0.5] * len(batch)

    app = make_app(Slow(), 1000)  # type: ignore[arg-type]

    async def ask(token: int, leaves: bool, within: bool = False) -> int:
        """Status of the response. within: leaves before the end of its request."""
        body = json.dumps({"input_ids": [token]}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": within}]
        status: list[int] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            if not leaves:
                await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        await app(
            {
                "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": "/classify",
                "raw_path": b"/classify", "query_string": b"", "headers": [], "http_version": "1.1",
                "scheme": "http",
            },
            receive,
            send,
        )  # fmt: skip
        return status[0]

    async def all_of_them() -> list[int]:
        async with app.router.lifespan_context(app):
            first = asyncio.create_task(ask(1, leaves=False))
            await asyncio.to_thread(begun.wait, 60)
            gone = await ask(2, leaves=True)
            half = await ask(4, leaves=True, within=True)
            last = asyncio.create_task(ask(3, leaves=False))
            await asyncio.sleep(0.1)
            go_on.set()
            return [await first, gone, half, await last]

    assert asyncio.run(all_of_them()) == [200, 499, 499, 200]
    assert Slow.seen == [1, 3]


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
        ({"embedding": [10**400, -(10**400)]}, [math.inf, -math.inf]),
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
