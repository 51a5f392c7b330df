"""Low-rank adapters (LoRA): a small pair of matrices beside each linear layer is trained, and the
model's own weights stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_ATTENTION = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)  # DeepSeek-V3's, or q_proj with the last two; and o_proj
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_MLP = ("w1", "w3", "w2")  # the same three, as Mixtral names those of its experts
UNEMBEDDING = ("lm_head",)
TARGETS = {
    "all-linear": (*ATTENTION, *LATENT_ATTENTION, *MLP, *MIXTRAL_MLP),
    "attn": (*ATTENTION, *LATENT_ATTENTION),
    "mlp": (*MLP, *MIXTRAL_MLP),
    "unembed": UNEMBEDDING,
} | {name: (name,) for name in (*ATTENTION, *LATENT_ATTENTION, *MLP, *MIXTRAL_MLP, *UNEMBEDDING)}


@dataclass(frozen=True, slots=True)
class LoraConfig(CheckedSettings):
    lora_rank: int = arg(
        0,
        "Rank of the adapters (LoRA, arXiv 2106.09685) that are trained in place of the model's weights; 0: all weights are trained.",
        legal=NON_NEGATIVE,
    )
    lora_alpha: float = arg(
        32.0,
        "An adapter's product counts times this over --lora-rank.",
        legal=POSITIVE,
        needs="lora_rank",
    )
    lora_target_modules: list[str] = arg(
        ["all-linear"],
        "Which linear layers have adapters: Hugging Face's names, or attn, mlp (experts included), all-linear (both), unembed (lm_head).",
        choices=tuple(TARGETS),
        nargs="+",
        aliases=("--target-modules",),
        needs="lora_rank",
    )
    lora_adapter_path: str | None = arg(
        None,
        "Start from this adapter: a folder in PEFT's format, of the same rank, alpha and modules. Default: a new one, from --seed.",
        needs="lora_rank",
    )
    lora_save_path: str | None = arg(
        None,
        "Write the adapter here at the end of the run, in PEFT's format; {rollout_id} becomes the number of the last rollout.",
        needs="lora_rank",
    )
