"""On-policy distillation: a teacher model scores every token that the policy sampled."""

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
        "On-policy distillation: subtract opd_kl_coef times the log-prob gap to a teacher from the "
        "advantage of every token.",
        excludes="loss_type=sft_loss, which samples nothing",
    )
    opd_type: str | None = arg(
        None,
        "The teacher. megatron: a frozen model, --opd-teacher-load. sglang: servers, "
        "--opd-teacher-url. self: the policy, with additional context in its prompt.",
        choices=("megatron", "sglang", "self"),
        needs="use_opd",
        required_with=("use_opd", "loss_type=policy_loss"),
    )
    opd_kl_coef: float = arg(1.0, "Weight of the log-prob gap.", legal=POSITIVE, needs="use_opd")
    opd_prefix_gamma: float = arg(
        0.0,
        "IW-OPD: weight a token's gap by up to 1 + this value, less the further the preceding "
        "tokens deviate from the teacher; 0.5 in TRL, 0: off.",
        legal=NON_NEGATIVE,
        needs="use_opd",
    )
    opd_topk: int | None = arg(
        None,
        "Match the teacher's distribution over the policy's top-k tokens, with all others as one "
        "class; default: the sampled token only.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes=(
            "opd_type=sglang",
            "opd_prefix_gamma",
            "renormalize_sampled_log_probs",
            "use_rollout_logprobs",
        ),
        at_most="vocab_size",
    )
    opd_alpha: float = arg(
        1.0,
        "Divergence of --opd-topk: 1 is reverse KL, 0 forward KL, in between a generalised "
        "Jensen-Shannon divergence.",
        legal=UNIT,
        needs="opd_topk",
    )
    opd_only: bool = arg(
        False,
        "Train on the teacher only: rewards select demonstrations and are logged, but give no "
        "advantage.",
        needs="use_opd",
    )
    opd_self_teacher: str = arg(
        "ema",
        "Weights of --opd-type self. ema: an exponential moving average of the policy. live: the "
        "policy at the start of a rollout. base: the initial policy.",
        choices=("ema", "live", "base"),
        needs="opd_type=self",
    )
    opd_ema_rate: float = arg(
        0.05,
        "Update rate of the moving average per optimizer step.",
        legal=UNIT_OPEN_LOW,
        needs="opd_type=self",
        excludes="opd_self_teacher=live|opd_self_teacher=base",
    )
    opd_success_reward: float | None = arg(
        None,
        "A response with at least this reward serves as demonstration for the other samples of its "
        "prompt that have none.",
        needs="opd_type=self",
    )
    opd_feedback_key: str | None = arg(
        None,
        "Key of the reward's details, or of the sample's metadata, with feedback on the response "
        "for the teacher.",
        needs="opd_type=self",
    )
    opd_prompt_template: str = arg(
        "{prompt}{demonstration}{feedback}\n\nNow give your own answer.",
        "Template of the teacher's last message, from {prompt} and the texts of the next two "
        "templates.",
        needs="opd_type=self",
    )
    opd_demonstration_template: str = arg(
        "\n\nAn example of a good answer:\n\n{demonstration}",
        "Template of a demonstration; empty without one.",
        needs="opd_type=self",
    )
    opd_feedback_template: str = arg(
        "\n\nFeedback on an earlier answer:\n\n{feedback}",
        "Template of feedback; empty without any.",
        needs="opd_type=self",
    )
    opd_max_prompt_len: int = arg(
        10240,
        "Longest teacher prompt, in tokens; a sample with a longer one has no teacher.",
        legal=AT_LEAST_ONE,
        needs="opd_type=self",
    )
    opd_teacher_load: str | None = arg(
        None,
        "Folder of the teacher: a Hugging Face model of any supported architecture and size, or "
        "checkpoints of the policy's. It must share the policy's tokenizer, and uses its parallel "
        "layout.",
        needs="use_opd",
        required_with=("opd_type=megatron", "use_opd"),
        excludes=("opd_type=self", "opd_type=sglang, whose servers --opd-teacher-url names"),
    )
    opd_teacher_ckpt_step: int | None = arg(
        None,
        "If --opd-teacher-load is a checkpoint folder: load this step instead of the newest.",
        needs="opd_teacher_load",
    )
    opd_teacher_url: list[str] | None = arg(
        None,
        "SGLang servers of the teacher, http://host:port each, with the policy's tokenizer. "
        "Default: --rm-url, as slime spells it.",
        nargs="+",
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_timeout_s: float = arg(
        300.0,
        "Time limit of a teacher server per sample, in seconds.",
        legal=POSITIVE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_attempts: int = arg(
        4,
        "Attempts at the teacher's servers per sample before it is dropped.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )
    opd_teacher_concurrency: int = arg(
        64,
        "Concurrent requests to the teacher's servers.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron|opd_type=self",
    )

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy itself, with additional context in its prompt."""
        return self.use_opd and self.opd_type == "self"

    @property
    def own_teacher(self) -> bool:
        """Whether the teacher has its own weights."""
        return self.teaches_itself and self.opd_self_teacher != "live"

    @property
    def served(self) -> bool:
        """Whether the teacher is behind servers."""
        return self.use_opd and self.opd_type == "sglang"
