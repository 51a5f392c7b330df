"""Teacher prompts for self-distillation, with context that the policy did not see when it
responded.

In SDFT ("Self-Distillation Enables Continual Learning", arXiv 2601.19897) the context is a
demonstration from the data. In SDPO ("Reinforcement Learning via Self-Distillation", arXiv
2601.20802) it is another successful response to the same prompt, and feedback from the environment.
A sample without such context has no teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from arguments.schema import DistillationConfig
from slime_like.data.prompt_format import PromptFormat
from slime_like.data.tokenizer import without_special_tokens
from slime_like.distributed.collectives import gather, together
from slime_like.samples.exchange import refresh_index
from slime_like.samples.groups import SampleGroup, flatten, regroup
from slime_like.samples.index import AnySample
from slime_like.types import FINISHED, REWARD_DETAILS, TEACHER_CONTEXT, Sample


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """Builds teacher prompts."""

    config: DistillationConfig
    form: PromptFormat  # format of the run's prompts
    # the model's maximum length of teacher prompt and response; None: unlimited
    positions: int | None = None

    def grade(
        self, groups: Sequence[SampleGroup], group: dist.ProcessGroup | None = None
    ) -> tuple[list[SampleGroup], dict[str, float]]:
        """Add `teacher_prompt` to samples that have a demonstration or feedback; returns metrics
        too. Collective. group: of all ranks. Raises ValueError for an invalid template."""
        examples = self._examples(groups, group)
        samples = together(lambda: self._with_prompts(flatten(groups), examples), group)
        samples = refresh_index(samples, group)
        num_untaught = sum(not s.has("teacher_prompt") for s in samples)
        return regroup(groups, samples), {"rollout/opd_untaught": float(num_untaught)}

    def _with_prompts(
        self, samples: Sequence[AnySample], examples: Mapping[int, str]
    ) -> list[AnySample]:
        """The samples, those on this rank with their teacher prompts."""
        texts: dict[int, str] = {}
        for i, sample in enumerate(samples):
            if isinstance(sample, Sample) and TEACHER_CONTEXT in sample.metadata:
                text = self._text(sample, examples.get(sample.sample_id))
                if text is not None:
                    texts[i] = text
        result = list(samples)
        if not texts:
            return result
        for i, tokens in zip(texts, self.form.tokenise(list(texts.values()))):
            sample = result[i]
            assert isinstance(sample, Sample)
            if self._fits(len(tokens), sample.response_length):
                prompt = torch.tensor(tokens, dtype=torch.int32)
                result[i] = replace(sample, teacher_prompt=prompt)
        return result

    def _text(self, sample: Sample, example: str | None) -> str | None:
        """Text of the teacher prompt; None without a demonstration or feedback. example: a
        successful response of another sample."""
        config = self.config
        demonstration = sample.metadata[TEACHER_CONTEXT]["demonstration"]
        if demonstration is None:
            demonstration = example
        feedback = feedback_of(sample, config.opd_feedback_key)
        if not demonstration and not feedback:
            return None

        def rewrite(prompt: str) -> str:
            parts = {"demonstration": "", "feedback": ""}
            if demonstration:
                parts["demonstration"] = fill(
                    config.opd_demonstration_template, demonstration=demonstration
                )
            if feedback:
                parts["feedback"] = fill(config.opd_feedback_template, feedback=feedback)
            return fill(config.opd_prompt_template, prompt=prompt, **parts)

        return self.form.teacher_text(sample.metadata, rewrite)

    def _fits(self, prompt: int, response: int) -> bool:
        room = self.positions is None or prompt + response <= self.positions
        return room and prompt <= self.config.opd_max_prompt_len

    def _examples(
        self, groups: Sequence[SampleGroup], group: dist.ProcessGroup | None
    ) -> dict[int, str]:
        """Successful response of another sample, by sample id. All ranks know the rewards, and thus
        which responses are exchanged: at most two per group."""
        if self.config.opd_success_reward is None:
            return {}
        chosen: dict[int, int] = {}
        for each in groups:
            chosen.update(_choices(each, self.config.opd_success_reward))
        chosen_ids = set(chosen.values())
        local = {
            s.sample_id: without_special_tokens(self.form.tokenizer, s.response)
            for s in flatten(groups)
            if isinstance(s, Sample) and s.sample_id in chosen_ids
        }
        texts: dict[int, str] = {}
        for rank_texts in gather(local, group):
            texts |= rank_texts
        return {i: texts[j] for i, j in chosen.items()}


def _choices(group: SampleGroup, success: float) -> Iterator[tuple[int, int]]:
    """(sample id, id of the first other successful sample of the group), for samples that have
    one."""
    good = [s.sample_id for s in group.samples if _succeeded(s, success)][:2]
    for sample in group.samples:
        for other in good:
            if other != sample.sample_id:
                yield sample.sample_id, other
                break


def _succeeded(sample: AnySample, success: float) -> bool:
    return sample.status in FINISHED and sample.reward is not None and sample.reward >= success


def feedback_of(sample: Sample, key: str | None) -> str | None:
    """The feedback under `key` in the reward's details or in the sample's metadata. Raises
    ValueError if it is not text."""
    if key is None:
        return None
    details = sample.metadata.get(REWARD_DETAILS)
    feedback: object = details.get(key) if isinstance(details, Mapping) else None
    if feedback is None:
        feedback = sample.metadata.get(key)
    if feedback is None or isinstance(feedback, str):
        return feedback
    raise ValueError(
        f"--opd-feedback-key {key}: the feedback of sample {sample.sample_id} must be text, not "
        f"{type(feedback).__name__}"
    )


def fill(template: str, **parts: str) -> str:
    """Replace each {name} of `parts`. Other braces, and braces inside the parts, are unchanged."""
    before, *rest = template.split("{")
    filled = [before]
    for piece in rest:
        name, closed, after = piece.partition("}")
        is_field = bool(closed) and name in parts
        filled.append(parts[name] + after if is_field else "{" + piece)
    return "".join(filled)
