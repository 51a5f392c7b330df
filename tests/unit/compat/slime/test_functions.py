"""Functions in the shapes that slime's users write, run as they are: rewards, generate functions,
filters, post-processing, data sources, rollout functions. Each imports slime's own names, reads args
by the names of flags, and uses the sample as slime's."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from arguments.function_args import function_args
from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.batching.turn_credit import SUMMED, TURNS
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.compat.slime.adapter import SlimeAdapter
from slime_like.compat.slime.samples import SlimeSample, from_slime, to_slime
from slime_like.data.group_buffer import PendingGroup
from slime_like.data.prompts import PromptSource
from slime_like.engines.base import GenerationClient, SamplingParams
from slime_like.import_utils import load_function
from slime_like.rewards.grader import Grader
from slime_like.rollout.episode import Model
from slime_like.rollout.hooks import custom_generate
from slime_like.samples.groups import SampleGroup
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.command_lines import complete
from tests.unit.rollout.test_custom_generate import Letters, Scripted

FLAGS = (
    "--rollout-max-context-len 64 --rollout-max-response-len 20 --sum-token-rewards "
    "--disable-grpo-std-normalization --eps-clip 0.3"
)


def run_of(folder: Path, *flags: str) -> RunConfig:
    return parse_args(complete(folder, *FLAGS.split(), *flags), 1)


def write(folder: Path, text: str, name: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder}/mine.py:{name}"


def sample(i: int, response: str, **fields: Any) -> Sample:
    empty = Sample.empty(Prompt(i // 2, "Q:", (81, 58), label="7", metadata={"id": i}), i)
    count = len(response)
    filled = {
        "tokens": torch.tensor([81, 58, *map(ord, response)]),
        "response": response,
        "response_length": count,
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "rollout_log_probs": torch.full((count,), -0.1),
        "status": SampleStatus.COMPLETED,
    }
    return replace(empty, **{**filled, **fields})


# 1. an async reward that punishes cut answers, and reads settings of the run
CUT = """
from slime.utils.types import Sample

async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of the Sample class.")
    assert (args.rollout_max_context_len, args.n_samples_per_prompt, args.eps_clip) == (64, 4, 0.3)
    assert args.tensor_model_parallel_size == 1 and args.context_parallel_size == 1
    assert hasattr(args, "sglang_router_ip") and args.hf_checkpoint and args.lr == 1e-5
    assert not args.grpo_std_normalization and args.reward_key is None
    if sample.status == Sample.Status.TRUNCATED:
        return -1.0
    return 1.0 if sample.label in sample.response else 0.0
"""
# 2. a reward with several numbers
SEVERAL = """
import re

def reward_func(args, sample, **kwargs):
    found = re.findall(r"-?\\d+", sample.response)
    acc = float(bool(found) and found[-1] == sample.label)
    overlong = max(0, len(sample.tokens) - args.rollout_max_context_len)
    return {"score": acc - 0.1 * overlong, "acc": acc, "format": float(bool(found))}
"""
# 3. a reward of a whole group
GROUP = """
async def reward_func(args, samples, **kwargs):
    shortest = min(s.response_length for s in samples)
    return [float(s.response_length == shortest) for s in samples]
"""


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (CUT, {}, [1.0, 0.0, -1.0, 0.0]),
        (SEVERAL, {"reward_key": "score"}, [1.0, 0.0, 1.0, 0.0]),
        (GROUP, {"group_rm": True}, [1.0, 0.0, 1.0, 1.0]),
    ],
    ids=["cut", "several", "group"],
)
def test_rewards(
    tmp_path: Path, text: str, settings: dict[str, Any], expected: list[float]
) -> None:
    path = write(tmp_path, text, "reward_func")
    args = function_args(run_of(tmp_path, "--custom-rm-path", path))
    given = [
        sample(0, "7"), sample(1, "it is 6"),
        sample(2, "so 7", status=SampleStatus.TRUNCATED), sample(3, "none"),
    ]  # fmt: skip
    with Grader(custom_rm_path=path, rm_num_workers=1, settings=args, **settings) as grader:
        if settings.get("group_rm"):
            graded = [s for g in grader.grade_groups([given[:2], given[2:]]) for s in g]
        else:
            graded = grader.grade(given)
    assert [s.metadata.get("failure") for s in graded] == [None] * 4
    assert [s.reward for s in graded] == expected


# 4. tools in several turns; counts its calls in an attribute, which the reward reads
TOOLS = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_masks, calls = "", [], [], 0
    for turn in range(3):
        room = args.rollout_max_context_len - len(prompt_ids) - len(response_ids)
        if room <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_ids += ids
        loss_masks += [1] * len(ids)
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + log_probs
        if output["meta_info"]["finish_reason"]["type"] == "length" or "?" not in output["text"]:
            break
        observation = "<4>"
        calls += 1
        observation_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_ids += observation_ids
        loss_masks += [0] * len(observation_ids)
        sample.rollout_log_probs += [0.0] * len(observation_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.payload_text = prompt + response
    sample.payload_has_system = "system" in prompt
    sample.payload_has_tools = True
    sample.tool_call_count = calls
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample

async def reward_func(args, sample, **kwargs):
    return 0.5 * sample.tool_call_count + (0.25 if sample.payload_has_tools else 0)
"""
# 5. renders the messages of the row itself
MESSAGES = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params, evaluation=False):
    state = GenerateState(args)
    text = "|".join(f"{m['role']}:{m['content']}" for m in sample.prompt) + "|assistant:"
    text += str(sample.metadata["tools"])
    output = await post("http://localhost/generate", {"text": text, "sampling_params": sampling_params})
    sample.update_from_meta_info(args, output["meta_info"])
    sample.tokens = state.tokenizer(text, add_special_tokens=False)["input_ids"] + output["output_ids"]
    sample.response, sample.response_length = output["text"], len(output["output_ids"])
    sample.rollout_log_probs = [p for p, _, _ in output["meta_info"]["output_token_logprobs"]]
    return sample
"""


def generate(folder: Path, path: str, engine: Scripted, prompt: Prompt) -> Sample:
    custom = custom_generate(run_of(folder, "--custom-generate-function-path", path))
    assert custom is not None
    model = Model(
        cast(GenerationClient, engine), Letters(), SamplingParams(max_new_tokens=20), lambda i, p: p
    )
    (found,) = custom.run([Sample.empty(prompt, 9)], model, evaluation=False)
    return found


def test_a_generate_function_with_tools_and_its_reward(tmp_path: Path) -> None:
    path = write(tmp_path, TOOLS, "generate")
    found = generate(
        tmp_path, path, Scripted("2+2?", "and?", "8"), Prompt(1, "Q:", (81, 58), label="8")
    )
    assert found.response == "2+2?<4>and?<4>8" and found.status == SampleStatus.COMPLETED
    assert found.loss_mask.int().tolist() == [1] * 4 + [0] * 3 + [1] * 4 + [0] * 3 + [1]
    again = to_slime(found)
    assert (again.tool_call_count, again.payload_has_system) == (2, False)  # type: ignore[attr-defined]
    assert "tool_call_count" not in again.metadata and set(again.metadata) == set()
    with Grader(
        custom_rm_path=path.rpartition(":")[0] + ":reward_func", rm_num_workers=1
    ) as grader:
        (graded,) = grader.grade([found])
    assert graded.reward == 1.25, graded.metadata


def test_a_generate_function_that_renders_the_messages(tmp_path: Path) -> None:
    line = complete(
        tmp_path, "--custom-generate-function-path", write(tmp_path, MESSAGES, "generate")
    )
    row = {"input": [{"role": "user", "content": "hi"}], "label": "7", "tools": [{"name": "f"}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + '\n{"input": "text", "label": "7"}\n')
    config = parse_args(line, 1)
    assert config.scheduling.renders_prompts
    source = PromptSource(
        config.data, make_tokenizer(), raw_messages=config.scheduling.renders_prompts
    )
    prompt, plain = source.next_prompts(2)
    with pytest.raises(ValueError, match="needs --apply-chat-template"):
        PromptSource(config.data, make_tokenizer())
    assert prompt.text == "<|user|>hi<|assistant|>" and plain.text == "text"
    path = config.scheduling.custom_generate_function_path
    assert path is not None
    found = generate(tmp_path, path, Scripted("yes"), prompt)
    asked = "user:hi|assistant:[{'name': 'f'}]"
    assert "".join(map(chr, found.tokens.tolist())) == asked + "yes"
    assert found.status == SampleStatus.COMPLETED and found.weight_versions == (1, 1, 1)
    assert to_slime(found).prompt == row["input"], "the reward sees the messages too"


# wraps what the run would generate, and asks again where the first answer is no number
WRAPPED = """
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import generate as default_generate

async def generate(args, sample, sampling_params):
    sampling_params = {**sampling_params, "temperature": 0.5}
    sample = await default_generate(args, sample, sampling_params)
    if sample.response == "more":
        sample = await default_generate(args, sample, {**sampling_params, "max_new_tokens": 7})
    sample.calls = 1
    return sample

async def grades(args, sample, sampling_params):
    sample = await default_generate(args, sample, sampling_params)
    sample.reward = await async_rm(args, sample)
    return sample
"""


def test_a_generate_function_that_wraps_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, WRAPPED, "generate")
    prompt = Prompt(1, "Q:", (81, 58), label="8")
    for answers, expected, versions in (
        (("8",), "8", (1,)),
        (("more", "9"), "more9", (1, 1, 1, 1, 2)),  # of each answer
    ):
        found = generate(tmp_path, path, Scripted(*answers), prompt)
        assert found.response == expected and found.status == SampleStatus.COMPLETED
        assert found.tokens.tolist() == [81, 58, *map(ord, expected)]
        assert found.loss_mask.tolist() == [True] * len(expected)
        assert found.weight_versions == versions
        log_probs = found.rollout_log_probs
        assert log_probs is not None and len(log_probs) == len(expected)
        assert to_slime(found).calls == 1  # type: ignore[attr-defined]


def test_what_a_generate_function_cannot_call_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, WRAPPED, "grades")
    found = generate(tmp_path, path, Scripted("8"), Prompt(1, "Q:", (81, 58), label="8"))
    assert found.status == SampleStatus.ABORTED
    assert "can use generate, post and GenerateState" in str(found.metadata["failure"])


# 6. a dynamic filter with its own reason, on slime's
FILTER = """
import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.utils.types import Sample

def keep(args, samples: list[Sample], **kwargs):
    if any(s.status == Sample.Status.TRUNCATED for s in samples):
        return DynamicFilterOutput(keep=False, reason="truncated")
    rewards = torch.tensor([s.get_reward_value(args) for s in samples], dtype=torch.float)
    assert bool(rewards.std() > 0) == check_reward_nonzero_std(args, samples).keep
    return check_reward_nonzero_std(args, samples)
"""
# 7. a sample filter
REMOVE = """
from slime.utils.types import Sample

def remove(args, groups):
    for group in groups:
        for sample in group:
            if sample.status == Sample.Status.TRUNCATED or sample.response_length > args.rollout_max_response_len:
                sample.remove_sample = True
"""
# 8. a buffer filter that prefers what is nearly done
BUFFER = """
def longest_first(args, rollout_id, buffer, num_samples):
    order = sorted(buffer, key=lambda group: -sum(s.response_length for s in group))
    taken = order[: min(num_samples, args.rollout_batch_size)]
    for group in taken:
        buffer.remove(group)
    return taken
"""
# 9. rewards normalised by hand
NORMALISE = """
import torch

def post_process(args, samples, **kwargs):
    raw = [sample.get_reward_value(args) for sample in samples]
    rewards = torch.tensor(raw, dtype=torch.float).view(-1, args.n_samples_per_prompt // 2)
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    if args.grpo_std_normalization:
        rewards = rewards / (rewards.std(dim=-1, keepdim=True) + 1e-6)
    return raw, rewards.flatten().tolist()
"""


def test_filters(tmp_path: Path) -> None:
    adapter = SlimeAdapter(run_of(tmp_path))
    rewarded = [sample(i, "a" * (i + 1), reward=float(i % 2)) for i in range(4)]
    cut = replace(rewarded[0], status=SampleStatus.TRUNCATED)
    keep = adapter.dynamic_filter(load_function(write(tmp_path, FILTER, "keep"), "--x"), "--x")
    assert keep(rewarded[:2]).keep and not keep([rewarded[0], rewarded[2]]).keep
    assert keep([cut, rewarded[1]]).reason == "truncated"
    (tmp_path / "other").mkdir()
    function = load_function(write(tmp_path / "other", REMOVE, "remove"), "--x")
    removed = adapter.sample_filter(function, "--x")
    assert list(removed([SampleGroup(0, (cut, rewarded[1]))])) == [0]


def test_a_buffer_filter_and_rewards_by_hand(tmp_path: Path) -> None:
    adapter = SlimeAdapter(run_of(tmp_path))
    prompt = Prompt(0, "Q:", (81, 58))
    groups = [
        PendingGroup(replace(prompt, group_id=g), (sample(2 * g, "a" * (g + 1)), sample(2 * g + 1, "b")))
        for g in range(3)
    ]  # fmt: skip
    choose = adapter.buffer_filter(
        load_function(write(tmp_path, BUFFER, "longest_first"), "--x"), "--x"
    )
    assert choose(0, groups, 2) == ([2, 1], [])
    (tmp_path / "other").mkdir()
    function = load_function(write(tmp_path / "other", NORMALISE, "post_process"), "--x")
    process = adapter.reward_post_process(function, "--x")
    rewarded = [sample(i, "a", reward=float(i)) for i in range(4)]
    assert list(process(rewarded)) == [-0.5, 0.5, -0.5, 0.5]


# 10. a data source that goes from easy to hard
SOURCE = """
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample

class EasyFirst(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)
        self.level = 0
        assert args.rollout_global_dataset is False and args.rollout_max_context_len == 64

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                assert isinstance(sample, Sample) and sample.status == Sample.Status.PENDING
                sample.metadata["level"] = self.level
                sample.difficulty = self.level / 10
        self.level += 1
        return groups
"""


def test_a_record_of_turns_goes_with_tokens_that_a_sample_hook_changes(tmp_path: Path) -> None:
    def hook(args: Any, sample: SlimeSample) -> None:
        sample.metadata["seen"] = True
        if sample.index == 1:
            sample.tokens[-1] = ord("x")

    apply = SlimeAdapter(run_of(tmp_path)).sample_hook([("--rollout-sample-hook-path own", hook)])
    for i, kept in enumerate((True, False)):
        given = sample(i, "ab", metadata={TURNS: {"spans": [[[0, 2, 0]]], SUMMED: True}})
        found = asyncio.run(apply(given, make_tokenizer(), None, False))
        assert found.metadata["seen"] and (TURNS in found.metadata) == kept


def test_a_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, SOURCE, "EasyFirst")
    config = run_of(tmp_path, "--data-source-path", path)
    made = make_tokenizer()
    monkeypatch.setattr("slime_like.compat.slime.sources.load_tokenizer", lambda *a, **k: made)
    source = SlimeAdapter(config).data_source(
        load_function(path, "--data-source-path"), "--data-source-path"
    )
    source.data_source.get_samples(1)
    ((first, *others),) = source.data_source.get_samples(1)
    assert len(others) == 3 and first.metadata == {"level": 1} and first.difficulty == 0.1
    # and back from its own buffer, through a checkpoint
    source.data_source.add_samples([[first, *others]])
    state = source.data_source.state_dict()
    again = SlimeAdapter(config).data_source(
        load_function(path, "--data-source-path"), "--data-source-path"
    )
    again.data_source.load_state_dict(state)
    restored = again.data_source.buffer[0][0]
    assert restored == first and restored.difficulty == 0.1
    assert [s.index for s in again.data_source.get_samples(1)[0]] == [4, 5, 6, 7]


# 11. a rollout function around slime's
ROLLOUT = """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_rollout as slimes
from slime.utils.async_utils import run
from slime.utils.types import Sample

def rollout(args, rollout_id, data_source, evaluation=False):
    output = slimes(args, rollout_id, data_source, evaluation=evaluation)
    return output if evaluation else RolloutFnTrainOutput(samples=output.samples, metrics={"wrapped": 1.0})
"""


def test_a_rollout_function_imports(tmp_path: Path) -> None:
    """Entire runs are in tests/e2e/test_rollout_functions.py."""
    assert callable(load_function(write(tmp_path, ROLLOUT, "rollout"), "--rollout-function-path"))


def test_what_slimes_modules_do_not_have_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "from slime.utils.types import ParamInfo\nf = print", "f")
    with pytest.raises(ValueError, match="ImportError: cannot import name 'ParamInfo'"):
        load_function(path, "--x")
    (tmp_path / "mine2.py").write_text("import slime.backends.megatron_utils\nf = print")
    with pytest.raises(ValueError, match=r"No module named 'slime\.backends'"):
        load_function(f"{tmp_path}/mine2.py:f", "--x")


def test_args_have_every_flag_and_can_be_sent(tmp_path: Path) -> None:
    args = pickle.loads(pickle.dumps(function_args(run_of(tmp_path))))
    for name in (
        "sglang_router_ip", "sglang_router_port", "rollout_max_context_len", "grpo_std_normalization",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "lr", "hidden_size", "use_tis",
        "advantage_estimator", "eps_clip", "kl_loss_coef", "rm_type", "lora_rank", "world_size", "seed",
    ):  # fmt: skip
        assert name in args and hasattr(args, name), name
    assert getattr(args, "no_such", 3) == 3
    with pytest.raises(AttributeError, match="args has no 'no_such': unknown setting"):
        args.no_such  # noqa: B018
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 1.0


def test_attributes_that_others_cannot_have_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = to_slime(sample(0, "7"))
    given.notes, given.handle_of_a_tool = {"a": [1, None]}, object()  # type: ignore[attr-defined]
    with caplog.at_level("WARNING"):
        ours = from_slime(given, sample(0, "7"), [], function_args(run_of(tmp_path)), Letters(), flag="--x")  # type: ignore[arg-type]  # fmt: skip
    assert to_slime(ours).added == {"notes": {"a": [1, None]}}
    assert "sample.handle_of_a_tool is a object, and is not passed on" in caplog.text


def test_a_sample_as_a_dict_and_back() -> None:
    given = SlimeSample(
        1, 2, [{"role": "user", "content": "a"}], status=SlimeSample.Status.TRUNCATED
    )
    given.turns = 3  # type: ignore[attr-defined]
    again = SlimeSample.from_dict(given.to_dict())
    assert again == given and again.turns == 3  # type: ignore[attr-defined]
    assert given.status == "truncated" and given.status == SlimeSample.Status.TRUNCATED
    given.update_from_meta_info(None, {"weight_version": "4", "finish_reason": {"type": "stop"}})
    assert (given.status, given.weight_versions) == (SlimeSample.Status.COMPLETED, ["4"])
