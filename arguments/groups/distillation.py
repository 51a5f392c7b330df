"""On-policy distillation: a teacher model grades every token that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, arg


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    use_opd: bool = arg(
        False, "On-policy distillation: take opd_kl_coef times the log-probability gap to a teacher off the advantage of every token."
    )
    opd_type: str | None = arg(
        None, "Who computes the teacher's log-probs. megatron: a frozen model beside the policy, from --opd-teacher-load.",
        choices=("megatron",),
    )  # fmt: skip
    opd_kl_coef: float = arg(1.0, "Weight of the gap.", legal=POSITIVE)
    opd_teacher_load: str | None = arg(
        None, "Folder of the teacher (Hugging Face), of any supported shape; it has the policy's tokenizer and parallel layout."
    )
