"""On-policy distillation: a teacher model grades every token that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, arg


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    use_opd: bool = arg(
        False,
        "On-policy distillation: take opd_kl_coef times the log-probability gap to a teacher off the advantage of every token.",
    )
    opd_type: str | None = arg(
        None,
        "Who computes the teacher's log-probs. megatron: a frozen model beside the policy, from --opd-teacher-load. sglang: servers, at "
        "--opd-teacher-url.",
        choices=("megatron", "sglang"),
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
    opd_teacher_load: str | None = arg(
        None,
        "Folder of the teacher: a Hugging Face model of any supported shape, or checkpoints of the policy's shape. It has the policy's tokenizer "
        "and parallel layout.",
        needs="use_opd",
        required_with=("opd_type=megatron", "use_opd"),
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
        excludes="opd_type=megatron",
    )
    opd_teacher_timeout_s: float = arg(
        300.0,
        "Seconds for a teacher's server to answer about one sample.",
        legal=POSITIVE,
        needs="use_opd",
        excludes="opd_type=megatron",
    )
    opd_teacher_attempts: int = arg(
        4,
        "Times that a teacher's servers are asked about a sample before it is dropped.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron",
    )
    opd_teacher_concurrency: int = arg(
        64,
        "Requests that wait for the teacher's servers at a time.",
        legal=AT_LEAST_ONE,
        needs="use_opd",
        excludes="opd_type=megatron",
    )

    @property
    def served(self) -> bool:
        """Whether the teacher is behind servers."""
        return self.use_opd and self.opd_type == "sglang"
