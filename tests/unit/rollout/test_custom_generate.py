"""Functions that make responses, in both conventions, and the two examples: masks, log-probs and
versions fit what the model wrote.

The engine is scripted: it "writes" given texts, whose tokens are characters.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from arguments.parse import parse_args
from examples.calculator.calculator import calculate
from examples.guessing_game.game import feedback
from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.episode import Model
from slime_like.rollout.hooks import custom_generate
from slime_like.samples.sampling_mask import split_sampling_mask
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.command_lines import complete

CALCULATOR = "examples/calculator/calculator.py:generate"
GAME = "examples/guessing_game/game.py:generate"


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class Scripted:
    """Writes the next text at every request, cut at a stop string or the length limit. Character i
    of a text has the log-prob -i / 10."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[GenerateRequest] = []

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.texts.pop(0)
        if text == "ABORT":
            return GenerateOutput(
                request.sample_id, (88,), (-1.0,), "abort", (3,), failure="the engine died"
            )
        ends = [text.index(s) + len(s) for s in sampling.stop if s in text]
        full_one = min([len(text), *ends])
        cut = min(full_one, sampling.max_new_tokens)
        tokens = tuple(map(ord, text[:cut]))
        log_probs = tuple(-i / 10 for i in range(cut))
        length, call = len(request.prompt_tokens) + cut, len(self.requests)
        routed_experts = torch.full((length, 1, 2), call, dtype=torch.int16)
        routed_experts[-1] = -1  # not computed
        keys = torch.full((max(0, length - 3), 1, 3), call, dtype=torch.int32)  # 3 of each query
        keys[-1:] = -1
        return GenerateOutput(
            request.sample_id,
            tokens,
            log_probs,
            "stop" if cut == full_one else "length",
            (call,) * cut,
            None if sampling.greedy else tuple(torch.tensor([t, call]).int() for t in tokens),
            routed_experts,
            keys,
        )


def play(
    folder: Path,
    path: str,
    engine: Scripted,
    *,
    limit: int = 200,
    label: str = "7",
    timeout_s: float = 5,
    flags: str = "",
) -> Sample:
    words = ["--custom-generate-function-path", path, *flags.split()]
    words += ["--custom-generate-timeout-s", str(timeout_s)]
    custom = custom_generate(parse_args(complete(folder, *words), 1))
    assert custom is not None
    prompt = Prompt(2, "Q:", (81, 58), label=label)
    sampling = SamplingParams(max_new_tokens=limit)
    seeds: list[tuple[int, int]] = []

    def seed_of(sample_id: int, position: int) -> int:
        seeds.append((sample_id, position))
        return position

    model = Model(cast(GenerationClient, engine), Letters(), sampling, seed_of)
    (sample,) = custom.run([Sample.empty(prompt, 9)], model, evaluation=False)
    assert {i for i, _ in seeds} <= {9} and len(set(seeds)) == len(seeds), (
        "every request has its own seed"
    )
    return sample


def mine(sample: Sample) -> str:
    """What is trained on."""
    response = sample.tokens[sample.prompt_length :]
    return "".join(
        chr(t) if m else "."
        for t, m in zip(response.tolist(), sample.loss_mask.tolist(), strict=True)
    )


def test_choices_of_the_sampler_are_kept(tmp_path: Path) -> None:
    """What each token was sampled from, and where it went when it was first computed; nothing of
    what the environment wrote last, which the engine has not seen."""
    (tmp_path / "f.py").write_text(
        "async def play(model, episode):\n"
        "    await model.write(episode)\n"
        "    episode.observe('::')\n"
        "    await model.write(episode)\n"
        "    episode.observe('!')\n"
    )
    sample = play(tmp_path, f"{tmp_path}/f.py:play", Scripted("ab", "cde"))
    assert sample.response == "ab::cde!" and sample.sampling_mask is not None
    sets = [ids.tolist() for ids in split_sampling_mask(sample.sampling_mask)]
    assert sets == [[97, 1], [98, 1], [], [], [99, 2], [100, 2], [101, 2], []]
    assert sample.routed_experts is not None and sample.routed_experts.shape == (10, 1, 2)
    assert sample.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, -1, -1]
    assert sample.indexer_topk is not None and sample.indexer_topk.shape == (7, 1, 3)
    assert sample.indexer_topk[:, 0, 0].tolist() == [2, 2, 2, 2, 2, -1, -1]


@pytest.mark.parametrize("trained", [True, False])
def test_what_was_written_greedily_has_no_set(tmp_path: Path, trained: bool) -> None:
    (tmp_path / "f.py").write_text(
        "async def play(model, episode):\n"
        "    await model.write(episode)\n"
        "    await model.write(episode, temperature=0)\n"
        f"    episode.loss_mask[2:] = [{trained}] * 3\n"
    )
    path, engine = f"{tmp_path}/f.py:play", Scripted("ab", "cde")
    if trained:
        with pytest.raises(ValueError, match=r"sample 9: --renormalize-sampled-log-probs"):
            play(tmp_path, path, engine)
    else:
        assert mine(play(tmp_path, path, engine)) == "ab..."


def test_the_calculator_answers_and_is_not_trained_on(tmp_path: Path) -> None:
    engine = Scripted("I ask <calc>6*(1+7)</calc> and more", "so #### 48")
    sample = play(tmp_path, CALCULATOR, engine)
    assert sample.response == "I ask <calc>6*(1+7)</calc><result>48</result>so #### 48"
    assert (
        mine(sample)
        == "I ask <calc>6*(1+7)</calc>" + "." * len("<result>48</result>") + "so #### 48"
    )
    assert (
        "".join(map(chr, engine.requests[1].prompt_tokens))
        == "Q:I ask <calc>6*(1+7)</calc><result>48</result>"
    )
    first, second = len("I ask <calc>6*(1+7)</calc>"), len("<result>48</result>")
    reported = sample.rollout_log_probs
    assert reported is not None
    assert reported[:first].tolist() == pytest.approx([-i / 10 for i in range(first)])
    assert reported[first : first + second].tolist() == [0.0] * second
    assert reported[first + second :].tolist() == pytest.approx([-i / 10 for i in range(10)])
    assert sample.weight_versions == (1,) * first + (-1,) * second + (2,) * 10
    assert (sample.status, sample.reward, sample.metadata) == (
        SampleStatus.COMPLETED,
        None,
        {"calculator_calls": 1},
    )


@pytest.mark.parametrize("limit", [26, 30, 45, 46, 50])
def test_a_response_never_outgrows_its_limit(tmp_path: Path, limit: int) -> None:
    """26: the call; 45: the result; 50: in the middle of what follows."""
    sample = play(
        tmp_path, CALCULATOR, Scripted("I ask <calc>6*(1+7)</calc>", "so #### 48"), limit=limit
    )
    assert sample.response_length == limit and sample.status == SampleStatus.TRUNCATED
    assert sample.response == "I ask <calc>6*(1+7)</calc><result>48</result>so #### 48"[:limit]


def test_an_engine_that_gives_up_loses_the_sample(tmp_path: Path) -> None:
    for path, first in ((CALCULATOR, "<calc>1</calc>"), (GAME, "5")):
        sample = play(tmp_path, path, Scripted(first, "ABORT"))
        assert sample.status == SampleStatus.ABORTED
    assert play(tmp_path, CALCULATOR, Scripted("ABORT")).metadata["failure"] == "the engine died"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", "7"), ("-(4-6)/8", "0.25"), ("1/0", "error: ZeroDivisionError"), ("2**9", "error: ValueError"), ("(", "error: SyntaxError"),
     ("__import__('os').getpid()", "error: ValueError"), ("9" * 300, "error: longer than 200 characters"), ("1e300*1e300", "error: ValueError"),
     ("(" * 199, "error: SyntaxError"), ("True+1", "error: ValueError")],
)  # fmt: skip
def test_what_the_calculator_says(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_the_game_in_slimes_convention(tmp_path: Path) -> None:
    engine = Scripted("is it 3", "or 9?", "then 7")
    sample = play(tmp_path, GAME, engine)
    higher, lower = "\nIt is higher. Guess again: ", "\nIt is lower. Guess again: "
    assert sample.response == f"is it 3{higher}or 9?{lower}then 7"
    assert mine(sample) == f"is it 3{'.' * len(higher)}or 9?{'.' * len(lower)}then 7"
    assert sample.reward == pytest.approx(0.8) and sample.metadata == {"turns": 3}
    versions = [v for v, m in zip(sample.weight_versions, sample.loss_mask.tolist()) if m]
    assert versions == [1] * 7 + [2] * 5 + [3] * 6
    lost = play(tmp_path, GAME, Scripted("x", "8", "8", "8"))
    assert lost.reward == 0 and lost.metadata["turns"] == 4 and lost.response.endswith("8")
    assert feedback("7.0", "7") is None


DONE = "sample.tokens, sample.response_length, sample.status = [8, 1], 1, sample.Status.COMPLETED; "
WRONG = {
    "return [3]": "sample 9: the function returned int",
    "return None": "sample 9: the function returned NoneType",
    "return sample": "sample 9: response_length is 0 of 0 tokens",
    "sample.tokens, sample.response_length = [81, 58, 1], 1; return sample": "status is 'pending'; set COMPLETED",
    "sample.tokens, sample.response_length, sample.loss_mask = [81, 58, 1], 1, [1, 1]; return sample": "loss_mask has 2 entries for 1",
    "sample.tokens, sample.response_length, sample.rollout_log_probs = [8, 1], 1, []; return sample": "rollout_log_probs has 0 entries for 1",
    "sample.tokens, sample.response_length, sample.loss_mask = [8, 1], 1, [2]; return sample": "neither 0 nor 1",
    DONE + "sample.rollout_log_probs = [float('nan')]; return sample": "not finite",
    DONE + "sample.reward = 'good'; return sample": "the reward is str, must be a number",
    DONE + "sample.reward = {'a': 1}; return sample": "--reward-key",
    "await post('http://x/generate', {}); return sample": "needs 'input_ids' or 'text'",
    "await post('http://x/score', {}); return sample": "only the rollout engine's /generate",
    "await post('/generate', {'text': 'a', 'sampling_params': {'min_p': 1}}); return sample": "parameters min_p; supported: temperature",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_function_ends_the_run(tmp_path: Path, body: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"from slime_like.compat.slime.api import post\nasync def generate(args, sample, sampling_params):\n    {body}\n"
    )
    with pytest.raises(ValueError, match=WRONG[body]):
        play(tmp_path, f"{path}:generate", Scripted("x"))


@pytest.mark.parametrize(
    ("body", "words"),
    [("raise KeyError('tool')", "raised KeyError: 'tool'"), ("int('seven')", "raised ValueError: invalid literal"),
     ("import json; json.loads('{')", "raised JSONDecodeError"), ("import asyncio; await asyncio.sleep(60)", "took longer than --custom-generate-timeout-s 0.2")],
)  # fmt: skip
def test_a_function_that_fails_loses_its_sample(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"async def generate(model, episode):\n    {body}\n")
    sample = play(tmp_path, f"{path}:generate", Scripted(), timeout_s=0.2)
    assert (
        sample.status == SampleStatus.ABORTED
        and words in sample.metadata["failure"]
        and sample.response_length == 0
    )


def test_settings_and_evaluation_reach_a_slime_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from slime_like.compat.slime.api import GenerateState\n"
        "async def generate(args, sample, sampling_params, evaluation):\n"
        "    assert GenerateState(args).sampling_params == sampling_params and sampling_params['max_new_tokens'] == 200\n"
        "    try:\n        args.lr = 1\n    except AttributeError as error:\n        told = str(error)\n"
        "    sample.tokens, sample.response_length, sample.status = [8, 65], 1, sample.Status.COMPLETED\n"
        "    sample.reward = {'score': 3, 'form': 0}\n"
        "    sample.metadata.update(n=args.n_samples_per_prompt, evaluation=evaluation, told=told)\n"
        "    return sample\n"
    )
    sample = play(tmp_path, f"{path}:generate", Scripted(), flags="--reward-key score")
    assert sample.metadata == {
        "n": 4,
        "evaluation": False,
        "reward_details": {"form": 0.0},
        "told": "args.lr: the settings are read-only",
    }
    assert sample.reward == 3 and sample.response == "A" and sample.rollout_log_probs is None
