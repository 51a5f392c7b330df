"""Rollouts of a model that sees images: on several ranks, interrupted, ahead of training, recorded,
and without sampling; rewards and evaluation see the pictures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.cli.tiny_model import IMAGE, make_tokenizer
from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled
from tests.e2e.programs import TrainServer
from tests.vision import picture

REWARD = """
def height(args, sample):
    pictures = (sample.multimodal_inputs or {"images": []})["images"]
    assert len(pictures) == len(sample.images)
    return sum(p.size[1] for p in pictures) / 100 + 0.01 * sample.response_length
"""
COMPUTED_ALIKE = 1e-5  # log-probs of engine and trainer, in float32
OFFLINE: dict[str, Any] = {
    "policy_loss_type": None, "n_samples_per_prompt": None, "custom_rm_path": None, "rm_num_workers": None, "rollout_max_response_len": None,
    "num_steps_per_rollout": None, "rollout_batch_size": 8, "micro_batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of a run whose prompts have one or two pictures, or none; every picture is there
    twice."""
    folder = tmp_path_factory.mktemp("seeing")
    make_tiny_model("Qwen3-VL", folder / "model", images=True)
    rows = []
    for number in range(12):
        names = []
        for own in range(number % 3):
            path = folder / f"{number % 6}_{own}.png"
            path.write_bytes(picture(number % 6, 16 + 8 * own, 24))
            names.append(path.name)
        text = "<image>" * len(names) + f"what is number {number}?"
        rows.append({"messages": text, "images": names, "answer": "red", "chosen": "red", "rejected": "blue"})  # fmt: skip
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(REWARD)
    return {
        **{"hf_checkpoint": folder / "model", "prompt_data": data, "micro_batch_size": 4},
        **{"multimodal_keys": '{"image":"images"}', "custom_rm_path": f"{folder}/own.py:height"},
    }


def run(server: TrainServer, work: Workspace, out: Path, ranks: int = 1, **flags: Any) -> None:
    out.mkdir(exist_ok=True)
    saved = {"save_debug_rollout_data": out / "rollout_{rollout_id}"}
    server.train(work.flags(out, **{**saved, **flags}), out / "log", ranks=ranks).ok()


def test_two_ranks_sample_and_learn_as_one(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank samples half, and the bytes of images go to the rank that trains on them."""
    evaluation = {"eval_prompt_data": f"all {seeing['prompt_data']}", "eval_interval": 1}
    for ranks in (1, 2):
        run(server, work, tmp_path / f"{ranks}", ranks, **seeing, **evaluation)
    one, two = ([r for r in rows_of(tmp_path / n) if "train/loss" in r] for n in "12")
    for row, other in zip(one, two, strict=True):
        assert row["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "eval/all/mean"):
            assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6)
    heights = [16 if n % 3 == 1 else 40 if n % 3 else 0 for n in range(12)]
    assert one[-1]["eval/all/mean"] > sum(heights) / 1200  # and a little for every token
    recorded = [sampled(tmp_path / name / "rollout_{rollout_id}", 0) for name in "12"]
    assert recorded[0] == recorded[1]


REPLAYED: dict[str, dict[str, Any]] = {
    "Qwen3-VL-30B-A3B": {"tensor_model_parallel_size": 2, "sequence_parallel": ""},
    "Qwen3.5-35B-A3B": {"expert_model_parallel_size": 2},
}


@pytest.mark.parametrize("family", REPLAYED)
def test_experts_of_images_are_replayed(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path, family: str
) -> None:
    """In prompts of one length and of several, of which an image's rows are most; in the second
    update on a rollout routers would choose otherwise, and follow the engine. Other experts of the
    images alone are noticed."""
    make_tiny_model(family, tmp_path / "model", images=True)
    more = {
        **{**seeing, "hf_checkpoint": tmp_path / "model", "use_rollout_routing_replay": ""},
        **{"moe_router_dtype": "fp32", "lr": 3e-3, **REPLAYED[family]},
    }
    run(server, work, tmp_path / "out", 2, **more)
    found = rows_of(tmp_path / "out")
    for row in found:
        assert row["rollout/moe_routing_disagreement"] == 0
        assert row["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    assert any(row["train/moe_replay_disagreement"] > 0 for row in found)

    template = str(tmp_path / "out" / "rollout_{rollout_id}")
    place = make_tokenizer(images=True).convert_tokens_to_ids(IMAGE)
    others = []
    for group in load_rollout(template, 0):
        changed = []
        for sample in complete(group.samples):
            experts = sample.routed_experts
            assert experts is not None
            of_images = (sample.tokens == place)[:, None, None] & (experts >= 0)
            other = torch.where(of_images, 3 - experts, experts)
            changed.append(replace(sample, routed_experts=other))
        others.append(SampleGroup(group.group_id, tuple(changed)))
    elsewhere = str(tmp_path / "others_{rollout_id}")
    save_rollout(elsewhere, 0, others)
    offline = {"load_debug_rollout_data": elsewhere, "save_debug_rollout_data": None}
    run(server, work, tmp_path / "again", 2, **{**more, **offline}, num_rollout=1)
    (row,) = rows_of(tmp_path / "again")
    assert row["rollout/moe_routing_disagreement"] > 0.2
    assert row["rollout/train_rollout_log_prob_diff_mean"] > 100 * COMPUTED_ALIKE


def test_recorded_rollouts_train_the_same(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    run(server, work, tmp_path / "full", **seeing, num_rollout=3)
    pictures = list((tmp_path / "full" / "images").iterdir())
    used = {
        image.digest
        for rollout in range(3)
        for group in load_rollout(str(tmp_path / "full" / "rollout_{rollout_id}"), rollout)
        for sample in group.samples
        for image in sample.images
    }
    assert used and {path.stem for path in pictures} == used
    template = tmp_path / "full" / "rollout_{rollout_id}"
    offline = {"load_debug_rollout_data": template, "save_debug_rollout_data": None}
    run(server, work, tmp_path / "again", **{**seeing, **offline}, num_rollout=3)
    names = ("train/loss", "train/grad_norm")
    full, again = (rows_of(tmp_path / name) for name in ("full", "again"))
    assert [[r[n] for n in names] for r in full] == [[r[n] for n in names] for r in again]


def test_interrupted_answers_keep_their_images(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """Partial rollouts: waiting answers continue in a later one, also after a checkpoint."""
    more = {
        **{**seeing, "partial_rollout": "", "over_sampling_batch_size": 6, "rollout_slice_len": 3},
        **{"n_samples_per_prompt": 2, "token_tis_ratio_clip_high": 2.0, "micro_batch_size": 2},
        **{"tis_ratio_type": "token", "max_train_rollout_diff": 0.001},
    }
    run(server, work, tmp_path / "full", **more, num_rollout=4)
    root = tmp_path / "checkpoints"
    run(server, work, tmp_path / "parts", **more, num_rollout=2, save=root)
    state = json.loads(next(root.glob("*/trainer.json")).read_text())
    assert any(group["images"] for group in state["waiting_groups"])
    run(server, work, tmp_path / "parts", **more, num_rollout=4, load=root)
    full, parts = (rows_of(tmp_path / name) for name in ("full", "parts"))
    assert same_numbers(parts) == same_numbers(full)


def stopped_and_resumed(
    server: TrainServer, work: Workspace, folder: Path, flags: dict[str, Any]
) -> dict[str, Any]:
    """A run that is stopped after two rollouts and resumed has the numbers of one that is not;
    returns the trainer's state where it stopped."""
    run(server, work, folder / "full", **flags)
    root = folder / "checkpoints"
    run(server, work, folder / "parts", **flags, save=root, exit_interval=2)
    state: dict[str, Any] = json.loads(next(root.glob("*/trainer.json")).read_text())
    run(server, work, folder / "parts", **flags, load=root)
    full, parts = (rows_of(folder / name) for name in ("full", "parts"))
    assert same_numbers(parts) == same_numbers(full)
    assert full[0]["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    return state


def test_rollouts_ahead_of_training_keep_their_images(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    flags = {**seeing, "async_rollout": "", "max_staleness": 1, "num_rollout": 4}
    state = stopped_and_resumed(server, work, tmp_path, flags)
    (ahead,) = state["sampled_ahead"]["rollouts"]
    assert any(group["images"] for group in ahead["groups"])


def test_a_pool_of_answers_keeps_their_images(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """--fully-async, also after a checkpoint with answers under way."""
    flags = {
        **{**seeing, "async_rollout": "", "fully_async": "", "max_staleness": 3, "num_rollout": 4},
        **{"rollout_slice_len": 2, "rollout_max_response_len": 24, "n_samples_per_prompt": 2},
        **{"num_steps_per_rollout": 1, "micro_batch_size": 2, "tis_ratio_type": "token"},
    }
    state = stopped_and_resumed(server, work, tmp_path, flags)
    assert any(group["images"] for group in state["waiting_groups"])


def test_a_teacher_sees_the_images(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """One that is the policy itself agrees with it, until the policy is updated."""
    flags = {
        **{**seeing, "use_opd": "", "opd_type": "megatron", "num_rollout": 2, "lr": 3e-3},
        **{"opd_teacher_load": seeing["hf_checkpoint"], "custom_rm_path": f"{work.reward}:letters"},
    }
    run(server, work, tmp_path / "out", **flags)
    first, second = (row["rollout/opd_reverse_kl"] for row in rows_of(tmp_path / "out"))
    assert abs(first) < COMPUTED_ALIKE < abs(second) / 100


def test_pairs_of_answers_about_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """From the loss log 2 of a policy that is its reference."""
    flags = {
        **{**seeing, **OFFLINE, "loss_type": "dpo_loss", "ref_load": seeing["hf_checkpoint"]},
        **{"label_key": None, "num_rollout": 5, "lr": 3e-3, "save_debug_rollout_data": None},
    }
    run(server, work, tmp_path / "out", 2, **flags)
    rows = rows_of(tmp_path / "out")
    assert abs(rows[0]["train/loss"] - math.log(2)) < 1e-4
    assert rows[-1]["train/pair_accuracy"] > 0.9


def test_conversations_with_pictures_in_later_turns(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(seeing["hf_checkpoint"]).parent
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "1_0.png"}, {"type": "text", "text": "one?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "blue"},
    ]  # fmt: skip
    data = folder / "talks.jsonl"
    data.write_text((json.dumps({"messages": messages, "images": ["2_1.png"]}) + "\n") * 8)
    flags = {
        **{**seeing, **OFFLINE, "loss_type": "sft_loss", "prompt_data": data, "label_key": None},
        **{"num_rollout": 5, "lr": 3e-3, "save_debug_rollout_data": None, "apply_chat_template": None},
    }  # fmt: skip
    run(server, work, tmp_path / "out", **flags)
    rows = rows_of(tmp_path / "out")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5


PLAY = """
import io
from PIL import Image

async def play(model, episode):
    before = len(episode.images)
    while (await model.write(episode, max_new_tokens=3)).finish_reason != "abort":
        colour = ("red", "blue")[episode.sample_id % 2]
        picture = Image.new("RGB", (16, 16), colour)
        written = "<|user|><|vision_start|><|image_pad|><|vision_end|>?<|assistant|>"
        if not episode.observe(written, images=[picture]):
            break
    episode.metadata["seen"] = len(episode.images) - before
"""


def test_observations_may_be_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """An environment's pictures come after those of the prompt, and the trainer sees what the
    engine saw; a picture that does not fit ends the episode."""
    (tmp_path / "play.py").write_text(PLAY)
    play = {"custom_generate_function_path": f"{tmp_path}/play.py:play"}
    run(server, work, tmp_path / "out", **{**seeing, **play}, rollout_max_response_len=30)
    rows = rows_of(tmp_path / "out")
    assert max(r["rollout/train_rollout_log_prob_diff_mean"] for r in rows) < COMPUTED_ALIKE
    groups = load_rollout(str(tmp_path / "out" / "rollout_{rollout_id}"), 0)
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.metadata["seen"] for sample in samples} <= {1, 2}
    assert all(len(s.images) >= s.metadata["seen"] for s in samples)
    assert max(len(s.images) for s in samples) > 2


SLIME = """
import base64, io
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

def url(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

async def generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    pictures = (sample.multimodal_inputs or {"images": []})["images"]
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids, sizes = [], iter([p.size[0] * p.size[1] // 64 for p in pictures])
    for token in tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]:
        ids += [token] * (next(sizes) if token == place else 1)
    payload = {"input_ids": ids, "sampling_params": sampling_params, "image_data": [url(p) for p in pictures]}
    answer = await post("http://engine/generate", payload)
    entries = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = ids + [entry[1] for entry in entries]
    sample.response_length = len(entries)
    sample.rollout_log_probs = [entry[0] for entry in entries]
    sample.response = answer["text"]
    sample.status = sample.Status.COMPLETED
    return sample
"""  # fmt: skip


def test_generate_functions_of_slime_send_the_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SLIME)
    own = {"custom_generate_function_path": f"{tmp_path}/own.py:generate"}
    run(server, work, tmp_path / "out", **{**seeing, **own})
    rows = rows_of(tmp_path / "out")
    assert max(r["rollout/train_rollout_log_prob_diff_mean"] for r in rows) < COMPUTED_ALIKE


AGENT = """
import base64, io, json, urllib.request
from PIL import Image

def url(colour):
    file = io.BytesIO()
    Image.new("RGB", (24, 16), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

async def play(task):
    messages = []
    for turn, colour in enumerate(("red", ("green", "blue")[task.sample_id % 2])):
        parts = [{"type": "image_url", "image_url": {"url": url(colour)}}, {"type": "text", "text": f"{turn}?"}]
        messages.append({"role": "user", "content": parts})
        answer = await task.chat(messages, max_tokens=4)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return float(len(messages[-1]["content"])) + task.sample_id % 3
"""  # fmt: skip


def test_agents_may_ask_about_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """Two turns with a picture each, through the gateway: the trainer sees what the engine saw."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"row {n}", "answer": "red"} for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        **{**seeing, "agent_function_path": f"{tmp_path}/agent.py:play", "prompt_data": data},
        **{"custom_rm_path": None, "apply_chat_template": None, "input_key": "prompt"},
        **{"rm_type": "zero", "rollout_max_response_len": 60, "micro_batch_size": None},
        **{"use_dynamic_batch_size": "", "max_tokens_per_gpu": 512},
    }
    run(server, work, tmp_path / "out", **flags)
    rows_found = rows_of(tmp_path / "out")
    assert max(r["rollout/train_rollout_log_prob_diff_mean"] for r in rows_found) < COMPUTED_ALIKE
    groups = load_rollout(str(tmp_path / "out" / "rollout_{rollout_id}"), 0)
    samples = [sample for group in groups for sample in group.samples]
    assert {len(sequence.images) for s in samples for sequence in (s, *s.branches)} <= {1, 2}
    assert max(len(s.images) for s in samples) == 2
    digests = [i.digest for i in max(samples, key=lambda s: len(s.images)).images]
    (question,) = [m for m in samples[0].metadata["messages"] if m.get("images")][:1]
    assert question["content"] == "<image>0?" and question["images"][0] == digests[0]


ASKS = """
async def play(task):
    assert task.prompt.count("<image>") == len(task.images)
    answer = await task.chat(task.messages, max_tokens=4)
    return float(len(answer["choices"][0]["message"]["content"])) + task.sample_id % 3
"""


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "apart"])
def test_agents_get_the_pictures_of_their_rows(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path, isolated: bool
) -> None:
    """Of texts, and of messages; with a prompt of its row, an agent is an ordinary rollout."""
    (tmp_path / "agent.py").write_text(ASKS)
    folder = Path(seeing["hf_checkpoint"]).parent
    rows = []
    for number in range(8):
        text = f"<image>what is number {number}?"
        asked = text if number % 2 else [{"role": "user", "content": text}]
        rows.append({"messages": asked, "images": [str(folder / f"{1 + 3 * (number % 2)}_0.png")], "answer": "red"})  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        **{**seeing, "agent_function_path": f"{tmp_path}/agent.py:play", "prompt_data": data},
        **{"custom_rm_path": None, "apply_chat_template": None, "rm_type": "zero"},
        **{"rollout_max_response_len": 8, "micro_batch_size": None, "num_rollout": 1},
        **{"use_dynamic_batch_size": "", "max_tokens_per_gpu": 512},
        **({"agent_function_isolation": ""} if isolated else {}),
    }
    run(server, work, tmp_path / "out", **flags)
    (row,) = rows_of(tmp_path / "out")
    assert row["rollout/failed_frac"] == row["agent/lost"] == 0
    assert row["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    groups = load_rollout(str(tmp_path / "out" / "rollout_{rollout_id}"), 0)
    assert {len(s.images) for group in groups for s in complete(group.samples)} == {1}


TWICE = """
from PIL import Image
import base64, io

def url(size):
    file = io.BytesIO()
    Image.new("RGB", (size, 16), "blue").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

async def play(task):
    assert len(task.images) == 1
    own = {"type": "image_url", "image_url": {"url": url(16 + 8 * (task.sample_id % 2))}}
    messages = [{"role": "user", "content": [own]}, *task.messages]
    for turn in range(1 if task.seed % 2 else 4):
        answer = await task.chat(messages, max_tokens=6)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": [own]}]
    return float(task.sample_id % 3)
"""


def test_paused_agents_start_again_with_the_pictures_of_their_rows(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """A run that is resumed has lost them, and what it trains on has the pictures that its engine
    saw."""
    (tmp_path / "agent.py").write_text(TWICE)
    folder = Path(seeing["hf_checkpoint"]).parent
    data = tmp_path / "rows.jsonl"
    rows = [
        {"messages": f"<image>{n}?", "images": [f"{folder}/1_0.png"], "answer": "red"}
        for n in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        **{**seeing, "agent_function_path": f"{tmp_path}/agent.py:play", "prompt_data": data},
        **{"custom_rm_path": None, "apply_chat_template": None, "rm_type": "zero"},
        **{"rollout_max_response_len": 90, "micro_batch_size": None, "n_samples_per_prompt": 2},
        **{"use_dynamic_batch_size": "", "max_tokens_per_gpu": 512, "partial_rollout": ""},
        **{"over_sampling_batch_size": 8, "rollout_slice_len": 3, "num_steps_per_rollout": 1},
        **{"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0},
    }  # fmt: skip
    root = tmp_path / "checkpoints"
    out = tmp_path / "out"
    run(server, work, out, **flags, num_rollout=1, save=root)
    state = json.loads(next(root.glob("*/trainer.json")).read_text())
    started = [s for group in state["waiting_groups"] for s in group["samples"]]
    assert any(s["response_length"] and s["status"] == "partial" for s in started)
    run(server, work, out, **flags, num_rollout=3, load=root)
    found = rows_of(out)
    assert [row["agent/lost"] for row in found] == [0, 0, 0]
    assert found[-2]["agent/restarted"] + found[-1]["agent/restarted"] > 0
    assert found[0]["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    for rollout in range(3):
        for group in load_rollout(str(out / "rollout_{rollout_id}"), rollout):
            assert {len(s.images) for s in complete(group.samples)} <= {2, 5}


GALLERY = """
from PIL import Image

class Gallery:
    def reset(self, *, seed, row):
        self.colours = ["red", "green", "blue"]
        return ["first ", self.shown(), "?"]

    def step(self, action):
        if not self.colours:
            return "", 1.0, True
        return [self.shown(), f" after {len(action)}"], 0.1 * len(action), False

    def shown(self):
        return Image.new("RGB", (24, 16), self.colours.pop(0))
"""  # fmt: skip


def test_environments_may_show_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """Three observations with a picture each."""
    (tmp_path / "gallery.py").write_text(GALLERY)
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row {n}", "answer": "red"} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        **{**seeing, "agent_environment": f"{tmp_path}/gallery.py:Gallery", "prompt_data": data},
        **{"custom_rm_path": None, "apply_chat_template": None, "input_key": "prompt"},
        **{"rm_type": "zero", "rollout_max_response_len": 80, "micro_batch_size": None},
        "agent_max_answer_tokens": 4,
        **{"use_dynamic_batch_size": "", "max_tokens_per_gpu": 512},
    }
    run(server, work, tmp_path / "out", **flags)
    rows_found = rows_of(tmp_path / "out")
    assert max(r["rollout/train_rollout_log_prob_diff_mean"] for r in rows_found) < COMPUTED_ALIKE
    groups = load_rollout(str(tmp_path / "out" / "rollout_{rollout_id}"), 0)
    sequences = [each for group in groups for s in group.samples for each in (s, *s.branches)]
    assert max(len(each.images) for each in sequences) == 3


TURNS = """
from PIL import Image
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine

def tokens_of(state, text, inputs):
    made = state.processor(text=text, **build_processor_kwargs(inputs))
    pictures = (inputs or {}).get("images") or []
    assert ("pixel_values" in made) == bool(pictures)
    return made["input_ids"][0], [encode_image_for_rollout_engine(p) for p in pictures]

async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    sample.tokens, data = tokens_of(state, sample.prompt, sample.multimodal_inputs)
    limits = {**sampling_params, "max_new_tokens": 3}
    for turn in range(3):
        payload = {"input_ids": sample.tokens, "sampling_params": limits, "image_data": data}
        answer = await post("http://engine/generate", payload)
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        sample.append_response_tokens(args, tokens=[e[1] for e in entries], log_probs=[e[0] for e in entries], meta_info=meta)
        if turn == 2:
            break
        seen = {"images": [Image.new("RGB", (16, 8 + 8 * turn), "red")], "videos": None}
        text = "<|user|><|vision_start|><|image_pad|><|vision_end|>and?<|assistant|>"
        tokens, more = tokens_of(state, text, seen)
        sample.append_response_tokens(args, tokens=tokens, trainable=False)
        data = data + more
        if sample.multimodal_inputs:
            sample.multimodal_inputs["images"].extend(seen["images"])
        else:
            sample.multimodal_inputs = seen
    sample.response = state.tokenizer.decode(sample.tokens[-sample.response_length:])
    sample.status = sample.Status.COMPLETED
    return sample
"""  # fmt: skip


def test_generate_functions_of_slime_play_several_turns_with_pictures(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """As its geo3k_vlm_multi_turn: with a processor, and pictures of an environment."""
    (tmp_path / "own.py").write_text(TURNS)
    own = {"custom_generate_function_path": f"{tmp_path}/own.py:generate"}
    run(server, work, tmp_path / "out", **{**seeing, **own}, rollout_max_response_len=60)
    rows = rows_of(tmp_path / "out")
    assert max(r["rollout/train_rollout_log_prob_diff_mean"] for r in rows) < COMPUTED_ALIKE
    groups = load_rollout(str(tmp_path / "out" / "rollout_{rollout_id}"), 0)
    assert {len(s.images) for group in groups for s in group.samples} <= {2, 3, 4}
    assert all(not s.loss_mask.all() for group in groups for s in group.samples)


def test_one_error_names_the_row_of_a_bad_picture(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """What only decoding tells ends the run when the row's turn has come, with its place."""
    row = {"messages": "<image>?", "images": ["bad.png"], "answer": "red"}
    data = bytearray(picture(0, 64, 64))
    start = data.index(b"IDAT") + 200
    data[start : start + 50] = bytes(50)
    (tmp_path / "bad.png").write_bytes(bytes(data))
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    flags = {**seeing, "prompt_data": tmp_path / "rows.jsonl"}
    ended = server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log")
    assert ended.status == 1 and "Traceback" not in ended.err
    assert "rows.jsonl:1: image 1 of 1: the image cannot be decoded" in ended.err
