"""The model and the source of its weights. Its shape is set by megatron-core's TransformerConfig
flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_like.config import (
    AT_LEAST_ONE,
    NO_FLAG,
    POSITIVE,
    UNIT_OPEN_LOW,
    CheckedSettings,
    arg,
)
from slime_like.images.settings import VisionSettings


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckedSettings):
    hf_checkpoint: str | None = arg(
        None,
        "Folder of a Hugging Face model: config.json defines the model, the safetensors are the "
        "initial weights, and its tokenizer is used.",
        required_with=("opd_type=sglang, for the tokenizer that it must share", "use_opd"),
    )
    ref_load: str | None = arg(
        None,
        "Folder of the reference model: a Hugging Face model, or checkpoints (--save) of the same "
        "shape. Needed by --use-kl-loss and --kl-coef; usually the same as --hf-checkpoint.",
        idle_without="@reference_or_start",
    )
    ref_ckpt_step: int | None = arg(
        None,
        "If --ref-load is a checkpoint folder: load this step instead of the newest.",
        needs="ref_load",
    )
    ref_offload: bool = arg(
        False,
        "Keep the reference model's weights in host memory (a memory-mapped file without a GPU) "
        "and swap them with the policy's for a forward pass, so that no second model is resident.",
        needs="ref_load",
        idle_without="@reference",
    )
    ref_update_interval: int | None = arg(
        None,
        "Reset the reference model to the current policy every N rollouts; it is then saved in "
        "every checkpoint.",
        legal=AT_LEAST_ONE,
        needs="ref_load",
        excludes=("ref_offload", "lora_rank"),
        idle_without="@reference",
    )
    only_train_params_name_list: list[str] = arg(
        [],
        "Regular expressions: train only the policy parameters with a name that matches (search) "
        "one of them, e.g. mlp.experts or layers\\.0\\.; layers and experts have global indices.",
        nargs="+",
        excludes=("freeze_params_name_list", "lora_rank"),
    )
    freeze_params_name_list: list[str] = arg(
        [],
        "Regular expressions: freeze the policy parameters with a name that matches (search) one "
        "of them, e.g. embedding output_layer.",
        nargs="+",
        excludes="lora_rank",
    )
    train_vision_tower: bool = arg(
        False,
        "Train the vision tower with the language model. It is frozen otherwise: neither synced to "
        "engines nor changed when the model is saved.",
        needs="multimodal_keys",
        excludes=("lora_rank", "optimizer=muon, which needs matrices only; use adam"),
    )
    vision_tower_lr: float | None = arg(
        None,
        "Peak learning rate of the vision tower, in place of --lr; the schedule is the same.",
        legal=POSITIVE,
        needs="train_vision_tower",
    )
    allow_untested: list[str] | None = arg(
        None,
        "NAME:VALUE settings of megatron-core that are rejected otherwise, because no test covers "
        "them: fp8 and fp4 with their recipes, CUDA graphs, offloaded activations, overlapped "
        "communication, fused kernels. They are passed on as they are.",
        nargs="+",
    )
    transformer_impl: str = arg(
        "auto",
        "Layer implementation. auto: Transformer Engine if it is installed and CUDA is available, "
        "otherwise local.",
        choices=("auto", "local", "transformer_engine"),
    )
    trust_remote_code: bool = arg(False, "Allow Python code in the Hugging Face checkpoint to run.")
    seed: int = arg(1234, "Seed of weight initialisation and dropout.")


@dataclass(frozen=True, slots=True)
class GPTModelConfig:
    """Arguments of megatron-core's GPTModel that are not in TransformerConfig; None means: take it
    from --hf-checkpoint."""

    model_base: str = arg(
        "auto",
        "Class of megatron-core that the network is built of: gpt, its GPTModel, or hybrid, its "
        "HybridModel, which needs 0.18. Both give the same numbers, and each resumes the other's "
        "checkpoints. auto: HybridModel since 0.19, which calls GPTModel deprecated.",
        choices=("auto", "gpt", "hybrid"),
    )
    vocab_size: int | None = arg(None, "Vocabulary size before padding.", legal=POSITIVE)
    make_vocab_size_divisible_by: int = arg(
        128,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        legal=AT_LEAST_ONE,
    )
    max_position_embeddings: int | None = arg(None, "Largest position.", legal=POSITIVE)
    position_embedding_type: str | None = arg(
        None,
        "Position embedding; yarn only as --hf-checkpoint's config.json has it.",
        choices=("rope", "learned_absolute", "none", "yarn"),
    )
    rotary_base: float | None = arg(None, "Base period of rotary embeddings.", legal=POSITIVE)
    rotary_percent: float | None = arg(
        None, "Fraction of each head's dimensions that is rotated.", legal=UNIT_OPEN_LOW
    )
    use_rope_scaling: bool = arg(False, "Scale rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float | None = arg(
        None, "Factor of --use-rope-scaling (default 8).", legal=POSITIVE
    )
    rotary_seq_len_interpolation_factor: float | None = arg(
        None, "Linear interpolation factor of rotary positions.", legal=POSITIVE
    )
    untie_embeddings_and_output_weights: bool = arg(
        False, "Untie the output layer from the embedding."
    )
    custom_model_provider_path: str | None = arg(
        None,
        "module.function or file.py:function that builds the policy's network, and the reference "
        "model's: function(pre_process, post_process, vp_stage=None) returns model_class()("
        "**model_settings(), ...), both of slime_like.compat.slime.api.",
        excludes=("lora_rank", "mtp_num_layers"),
    )
    mtp_num_layers: int | None = arg(
        None,
        "Multi-token prediction (MTP) layers to train with the policy, as many as --hf-checkpoint "
        "has; they are saved and synced to the servers. Without this flag they stay unchanged.",
        legal=AT_LEAST_ONE,
        excludes=(
            "lora_rank",
            "@reward_model",
        ),
    )
    enable_mtp_training: bool = arg(
        False,
        "slime's switch for MTP training, which --mtp-num-layers already enables.",
        needs="mtp_num_layers",
    )
    mtp_soft_targets: bool = arg(
        False,
        "MTP layers learn the policy's (detached) distribution of each token instead of the token "
        "itself.",
        needs="mtp_num_layers",
    )
    mtp_loss_scaling_factor: float = arg(
        0.2,
        "Weight of the mean MTP loss. It has no gradient with respect to the policy.",
        legal=POSITIVE,
        needs="mtp_num_layers",
    )
    # the tower of a run with images; no flag: from --hf-checkpoint
    vision: VisionSettings | None = field(default=None, metadata=NO_FLAG)
