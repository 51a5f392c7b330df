"""On-policy distillation: a teacher model grades every token that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    UNIT,
    UNIT_OPEN_LOW,
    CheckedSettings,
    arg,
)


@dataclass(frozen=True, slots=True)
class DistillationConfig(CheckedSettings):
    use_opd: bool = arg(
        False,
        "On-policy distillation: take opd_kl_coef times the log-probability gap to a teacher off the advantage of every token.",
    )
    opd_type: str | None = arg(
        None,
        "The teacher. megatron: a frozen model, --opd-teacher-load. sglang: servers, --opd-teacher-url. self: the policy with more in its prompt.",
        choices=("megatron", "sglang", "self"),
        needs="use_opd",
        required_with=("use_opd", "loss_type=policy_loss"),
    )
    opd_kl_coef: float = arg(1.0, "Weight of the gap.", legal=POSITIVE, needs="use_opd")
    opd_prefix_gamma: float = arg(
        0.0,
        "IW-OPD: a token's gap weighs up to 1 + this, less the further the response has left the teacher before it; 0.5 in TRL, 0: off.",
        legal=NON_NEGATIVE,
        needs="use_opd",
    )
    opd_topk: int | None = arg(
        None,
        "Match the teacher's distribution over this many tokens, the policy's likeliest, and the rest as one; default: the sampled token alone.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes=(
            "opd_type=sglang",
            "opd_prefix_gamma",
            "renormalize_sampled_log_probs",
            "use_rollout_logprobs",
        ),
    )
    opd_alpha: float = arg(
        1.0,
        "Divergence of --opd-topk: 1 is reverse KL, 0 forward KL, between them a generalised Jensen-Shannon divergence.",
        legal=UNIT,
        needs="opd_topk",
    )
    opd_only: bool = arg(
        False,
        "Rewards choose demonstrations and are reported, and give no advantage: only the teacher trains.",
        needs="use_opd",
    )
    opd_self_teacher: str = arg(
        "ema",
        "Weights of --opd-type self. ema: a moving average of the policy's. live: the policy at the start of a rollout. base: the run's first.",
        choices=("ema", "live", "base"),
        needs="opd_type=self",
    )
    opd_ema_rate: float = arg(
        0.05,
        "How far the moving average goes towards the policy in an optimizer step.",
        legal=UNIT_OPEN_LOW,
        needs="opd_type=self",
        excludes="opd_self_teacher=live|opd_self_teacher=base",
    )
    opd_success_reward: float | None = arg(
        None,
        "A response with at least this reward is a demonstration for the others of its prompt that have none of their own.",
        needs="opd_type=self",
    )
    opd_feedback_key: str | None = arg(
        None,
        "Key of a reward's details, or of a sample's metadata, with feedback on the response for the teacher.",
        needs="opd_type=self",
    )
    opd_prompt_template: str = arg(
        "{prompt}{demonstration}{feedback}\n\nNow give your own answer.",
        "The teacher's last message, of {prompt} and the texts of the next two templates.",
        needs="opd_type=self",
    )
    opd_demonstration_template: str = arg(
        "\n\nAn example of a good answer:\n\n{demonstration}",
        "How a demonstration is put; nothing where there is none.",
        needs="opd_type=self",
    )
    opd_feedback_template: str = arg(
        "\n\nFeedback on an earlier answer:\n\n{feedback}",
        "How feedback is put; nothing where there is none.",
        needs="opd_type=self",
    )
    opd_max_prompt_len: int = arg(
        10240,
        "A sample has no teacher where the prompt for it would have more tokens.",
        legal=AT_LEAST_ONE,
        needs="opd_type=self",
    )
    opd_teacher_load: str | None = arg(
        None,
        "Folder of the teacher: a Hugging Face model of any supported shape, or checkpoints of the policy's shape. It has the policy's tokenizer "
        "and parallel layout.",
        needs="use_opd",
        required_with=("opd_type=megatron", "use_opd"),
        excludes="opd_type=self",
    )
    opd_teacher_ckpt_step: int | None = arg(
        None,
        "With --opd-teacher-load of a folder of checkpoints: this step in place of the newest.",
        needs="opd_teacher_load",
    )
    opd_teacher_url: list[str] | None = arg(
        None,
        "SGLang servers of the teacher, http://host:port each, with the policy's tokenizer. Default: --rm-url, as slime spells it.",
        nargs="+",
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_timeout_s: float = arg(
        300.0,
        "Seconds for a teacher's server to answer about one sample.",
        legal=POSITIVE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_attempts: int = arg(
        4,
        "Times that a teacher's servers are asked about a sample before it is dropped.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_concurrency: int = arg(
        64,
        "Requests that wait for the teacher's servers at a time.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy with more in its prompt."""
        return self.use_opd and self.opd_type == "self"

    @property
    def own_teacher(self) -> bool:
        """Whether it has other weights than the policy."""
        return self.teaches_itself and self.opd_self_teacher != "live"

    @property
    def served(self) -> bool:
        """Whether the teacher is behind servers."""
        return self.use_opd and self.opd_type == "sglang"
