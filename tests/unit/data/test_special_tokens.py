"""Special tokens inside answers are seen by rewards, counted, and never read as turns of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from arguments.schema import DataConfig, DistillationConfig
from slime_like.agents.episode_samples import sequence
from slime_like.agents.sessions import ParsedRequest, Session
from slime_like.agents.templates import ChatTemplate
from slime_like.cli.tiny_model import END, USER, make_tokenizer
from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, from_slime
from slime_like.data.prompt_format import PromptFormat, RowKeys
from slime_like.data.tokenizer import response_text, special_token_ids, without_special_tokens
from slime_like.engines.base import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.metrics.health import SPECIAL_TOKENS
from slime_like.rewards.grader import UNFIT
from slime_like.rollout.answer_metrics import SCORED_AS_EMPTY, answer_metrics
from slime_like.rollout.episode import Episode, Model, play_episode
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.self_teacher import TeacherPrompts
from slime_like.samples.groups import SampleGroup
from slime_like.types import Prompt, Sample, SampleStatus

TOKENIZER = make_tokenizer()
PROMPT = Prompt(0, "?", tuple(TOKENIZER("?")["input_ids"]))
# skip_special_tokens, text of a response that stopped
TEXTS = [(None, f"b{USER}b"), (True, "bb"), (False, f"b{USER}b{END}")]


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def output_of(text: str, reason: FinishReason = "stop") -> GenerateOutput:
    tokens = ids(text)
    return GenerateOutput(0, tokens, (-1.0,) * len(tokens), reason, (1,) * len(tokens))


class Engine:
    """Writes one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        return output_of(self.text)


def model_of(text: str, skip: bool | None) -> Model:
    sampling = SamplingParams(skip_special_tokens=skip)
    engine = cast(GenerationClient, Engine(text))
    return Model(engine, TOKENIZER, sampling, lambda i, position: position)


def sampled(text: str, skip: bool | None, reason: FinishReason = "stop") -> Sample:
    rollouter = Rollouter(cast(Any, None), cast(Any, None), TOKENIZER, seed=0)
    sampling = SamplingParams(max_new_tokens=len(ids(text)), skip_special_tokens=skip)
    return rollouter.append_output(Sample.empty(PROMPT, 0), output_of(text, reason), sampling)


@pytest.mark.parametrize(("skip", "text"), TEXTS)
def test_a_sampled_response(skip: bool | None, text: str) -> None:
    sample = sampled(f"b{USER}b{END}", skip)
    assert sample.status == SampleStatus.COMPLETED and sample.response == text


def test_a_response_that_was_cut_keeps_its_last_token() -> None:
    """Otherwise a policy that fills the room with one special token has written nothing."""
    sample = sampled(f"b{USER}{USER}", None, "length")
    assert sample.status == SampleStatus.TRUNCATED and sample.response == f"b{USER}{USER}"


@pytest.mark.parametrize("limit", [2, 3])
def test_a_response_beyond_a_lowered_limit_is_truncated(limit: int) -> None:
    """Begun by a run with another --rollout-max-response-len; the others are continued."""
    asked = []

    class Engine:
        def generate(self, requests: Any, sampling: SamplingParams) -> Any:
            asked.append(([r.sample_id for r in requests], sampling.max_new_tokens))
            return [output_of("b", "length") for _ in requests]

    rollouter = Rollouter(cast(Any, Engine()), cast(Any, None), TOKENIZER, seed=0)
    started = rollouter.append_output(
        Sample.empty(PROMPT, 0), output_of("bbb", "length"), SamplingParams(max_new_tokens=9)
    )
    assert started.status == SampleStatus.PARTIAL and started.response_length == 3
    sampling = SamplingParams(max_new_tokens=limit)
    both = [started, Sample.empty(PROMPT, 1)]
    first, second = rollouter._generate_local(both, sampling, "train", None)
    assert first.status == SampleStatus.TRUNCATED and first.response == "bbb"
    assert asked == [([1], limit)] and second.sample_id == 1


@pytest.mark.parametrize(("skip", "text"), TEXTS)
def test_a_turn_and_its_episode(skip: bool | None, text: str) -> None:
    turns = []

    async def play(model: Model, episode: Episode) -> None:
        turns.append(await model.write(episode))

    respond = play_episode(play)
    sample = asyncio.run(
        cast(Any, respond(Sample.empty(PROMPT, 0), model_of(f"b{USER}b{END}", skip), False))
    )
    assert [turn.text for turn in turns] == [text] and sample.response == text


@pytest.mark.parametrize(("skip", "text"), TEXTS)
def test_an_agents_sequence(skip: bool | None, text: str) -> None:
    template = ChatTemplate(TOKENIZER, {TOKENIZER.eos_token_id})
    session = Session(0, model_of(f"b{USER}b{END}", skip), template)
    (choice,) = asyncio.run(session.answer(ParsedRequest(({"role": "user", "content": "?"},))))
    assert choice.message["content"] == f"b{USER}b"
    (branch,) = session.tree.branches()
    assert sequence(Sample.empty(PROMPT, 0), branch, session).response == text


@pytest.mark.parametrize(("skip", "text"), TEXTS)
def test_a_sample_of_a_slime_function(skip: bool | None, text: str) -> None:
    tokens = ids(f"b{USER}b{END}")
    result = SlimeSample(
        group_index=0,
        index=0,
        prompt="?",
        tokens=[*PROMPT.tokens, *tokens],
        response_length=len(tokens),
        status=SlimeSample.Status.COMPLETED,
    )
    args = SlimeArgs({"rollout_skip_special_tokens": skip, "reward_key": None})
    ours = from_slime(result, Sample.empty(PROMPT, 0), (), args, TOKENIZER, flag="--f")
    assert ours.response == text


def test_special_is_what_decoding_can_leave_out() -> None:
    """Also tokens without a role, as most of a chat template's are: `all_special_ids` lacks them."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    tokenizer.add_tokens(["<think>"], special_tokens=False)
    call, think = (tokenizer.convert_tokens_to_ids(name) for name in ("<|call|>", "<think>"))
    assert call in special_token_ids(tokenizer) and think not in special_token_ids(tokenizer)
    settings: dict[str, Any] = {"stopped": True, "skip_special_tokens": None}
    assert response_text(tokenizer, [think, call], **settings) == "<think>"
    assert response_text(tokenizer, [call, think], **settings) == "<|call|><think>"
    assert response_text(tokenizer, [], **settings) == ""


def test_those_inside_turns_are_counted() -> None:
    ended = sampled(f"b{USER}b{END}", None)  # one of four
    filled = sampled(USER * 4, None, "length")  # all of four
    # two turns: the mark that ends the first is none, nor is what the environment said
    turns = sampled(f"b{END}{USER}a{USER}b{END}", None)
    turns = replace(turns, loss_mask=torch.tensor([1, 1, 0, 0, 1, 1, 1]).bool())  # one of five
    unseen = replace(filled, loss_mask=torch.zeros(4, dtype=torch.bool))
    group = SampleGroup(0, (replace(ended, branches=(filled,)), turns, unseen))
    ids = special_token_ids(TOKENIZER)
    found = answer_metrics([group], ids)
    assert found == {SPECIAL_TOKENS: pytest.approx(6 / 13), SCORED_AS_EMPTY: 0.0}
    assert answer_metrics([SampleGroup(0, (unseen,))], ids) == {SCORED_AS_EMPTY: 0.0}
    slow = replace(unseen, metadata={UNFIT: "the reward took longer"})
    assert answer_metrics([SampleGroup(0, (slow, unseen))], ids) == {SCORED_AS_EMPTY: 0.5}


def test_a_response_in_a_teachers_prompt_opens_no_turn() -> None:
    config = DistillationConfig(
        use_opd=True,
        opd_type="self",
        opd_prompt_template="{prompt}{demonstration}",
        opd_demonstration_template=" like {demonstration}",
        opd_success_reward=1.0,
    )
    data = DataConfig()
    form = PromptFormat(data, TOKENIZER, keys=RowKeys.of("rows.jsonl", data), teaches_itself=True)
    metadata = {"teacher_context": {"prompt": "ab", "demonstration": None}}
    one = replace(sampled(f"b{USER}c{END}", None), metadata=metadata, reward=1.0)
    graded, _ = TeacherPrompts(config, form, positions=64).grade(
        [SampleGroup(0, (one, replace(one, sample_id=1)))]
    )
    sample = graded[0].samples[0]
    assert isinstance(sample, Sample) and sample.teacher_prompt is not None
    assert TOKENIZER.decode(sample.teacher_prompt.tolist()) == "ab like bc"


def test_no_special_token_is_left_or_formed_by_removing_one() -> None:
    nested = f"a{USER[:4]}{USER}{USER[4:]}b"
    assert without_special_tokens(TOKENIZER, nested) == "ab"
