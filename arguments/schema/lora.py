"""Low-rank adapters (LoRA): a pair of small matrices per linear layer is trained; the base model's
weights are frozen."""

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
MIXTRAL_MLP = ("w1", "w3", "w2")  # Mixtral's names of the three projections of an expert
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
        "LoRA rank (arXiv 2106.09685): train adapters of this rank instead of the model's weights; "
        "0: train all weights.",
        legal=NON_NEGATIVE,
        excludes=(
            "@reward_model",
            "optimizer=muon, which needs parameters other than matrices; use adam",
        ),
        needs="hf_checkpoint, the base model of the adapters",
    )
    lora_alpha: float = arg(
        32.0,
        "LoRA scaling: the update is multiplied by lora_alpha / lora_rank.",
        legal=POSITIVE,
        needs="lora_rank",
    )
    lora_target_modules: list[str] = arg(
        ["all-linear"],
        "Linear layers with adapters: Hugging Face module names, or attn, mlp (including experts), "
        "all-linear (both), unembed (lm_head).",
        choices=tuple(TARGETS),
        nargs="+",
        aliases=("--target-modules",),
        needs="lora_rank",
    )
    lora_sync: str = arg(
        "merged",
        "What the rollout engine gets. merged: the weights with the adapter added, rounded to the "
        "model's dtype. adapter: the adapter alone, which the engine applies beside its own base "
        "model: nothing is rounded, an update has megabytes, and servers do not pause. Needs "
        "servers started with --enable-lora, as a run starts them. Of the Tinker server: what "
        "sampling clients get; several adapters are then sampled from in one batch.",
        choices=("merged", "adapter"),
        needs="lora_rank",
    )
    lora_rounding_interval: int = arg(
        10,
        "With merged weights narrower than float32: what rounding leaves of an update, "
        "lora/merged_*, is measured for the second update and then for every so many; 0: never. It "
        "takes a few times as long as merging.",
        legal=NON_NEGATIVE,
        needs="lora_rank",
    )
    lora_adapter_path: str | None = arg(
        None,
        "Initial adapter: a folder in PEFT format with the same rank, alpha and target modules. "
        "Default: a new one, initialised from --seed.",
        needs="lora_rank",
    )
    lora_save_path: str | None = arg(
        None,
        "Folder for the adapter at the end of the run, in PEFT format; {rollout_id} is replaced by "
        "the number of the last rollout.",
        needs="lora_rank",
    )
