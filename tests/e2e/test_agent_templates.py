"""The trainer recomputes the log-probs of scripted dialogues with every chat template: those of each
answer after the prompt that it was given are those of the sequence that it is trained in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slime_like.agents.episode_samples import sequence
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.types import Prompt, Sample
from tests.agent_templates import FAMILIES, make_tokenizer
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.unit.agents.test_tree import DIALOGUES, Talk, Writer


class ModelWriter(Writer):
    """Writes given texts with the log-probs that a model gives them after the request's prompt."""

    def __init__(self, writer: Writer, model: LlamaForCausalLM) -> None:
        super().__init__(writer.tokenizer)
        self.model = model

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        output = await super().generate_one(request, sampling)
        given = torch.tensor([(*request.prompt_tokens, *output.tokens)])
        with torch.inference_mode():
            rows = self.model(given).logits[0, len(request.prompt_tokens) - 1 : -1].log_softmax(-1)
        found = rows.gather(-1, torch.tensor(output.tokens)[:, None])[:, 0].tolist()
        output = dataclasses.replace(
            output, log_probs=tuple(found), sampling_mask=None, routed_experts=None
        )
        self.written[-1] = (request.prompt_tokens, output)
        return output


class Dialogue(Talk):
    """Of which the answers are those of a model."""

    def __init__(self, name: str, model: LlamaForCausalLM) -> None:
        super().__init__(name)
        self.writer = ModelWriter(self.writer, model)
        self.session._model.engine = self.writer

    def check(self, branches: int) -> None:
        """Not here: see tests/unit/agents/test_tree.py."""

    def sample(self, group: int, number: int) -> Sample:
        blank = Sample.empty(Prompt(group, "", (1,)), number)
        branches = self.session.tree.branches()
        first, *others = (sequence(blank, branch, self.session) for branch in branches)
        return dataclasses.replace(first, reward=float(number % 3), branches=tuple(others))


@pytest.mark.extended
def test_log_probs_of_every_template_are_recomputed(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    groups = []
    for group, name in enumerate(FAMILIES):
        talks = [Dialogue(name, model) for _ in DIALOGUES]
        for talk, play in zip(talks, DIALOGUES, strict=True):
            play(talk)
        samples = [t.sample(group, group * len(talks) + i) for i, t in enumerate(talks)]
        groups.append(SampleGroup(group, tuple(samples)))
    save_rollout(str(tmp_path / "recorded"), 0, groups)
    trained = sum(
        sequence.active_tokens
        for group in load_rollout(str(tmp_path / "recorded"), 0)
        for sample in complete(group.samples)
        for sequence in (sample, *sample.branches)
    )
    assert trained > 6000
    line = work.flags(
        tmp_path / "out", hf_checkpoint=tmp_path / "model", debug_train_only="", load_debug_rollout_data=tmp_path / "recorded", prompt_data=None,
        label_key=None, input_key=None, apply_chat_template=None, custom_rm_path=None, rm_num_workers=None, rollout_shuffle=None, num_rollout=1,
        rollout_batch_size=len(FAMILIES), n_samples_per_prompt=len(DIALOGUES), num_steps_per_rollout=1, micro_batch_size=None,
        use_dynamic_batch_size="", max_tokens_per_gpu=4096, policy_loss_type="ppo", advantage_estimator="grpo",
    )  # fmt: skip
    server.train(line, tmp_path / "log").ok()
    (row,) = rows_of(tmp_path / "out")
    assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-5
    assert row["train/grad_norm"] > 0
