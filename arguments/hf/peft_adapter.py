"""PEFT's adapter_config.json: read and write it, and reject settings with another meaning here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arguments.hf.config_keys import LARGEST
from arguments.hf.settings_file import read_settings
from slime_like.text import shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of the names of tensors
# key -> values without effect; any other value would change the result and is rejected
NEUTRAL: dict[str, tuple[object, ...]] = {
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, None),
    "lora_bias": (False,),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "exclude_modules": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    # others change the weights of the base model
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Content of adapter_config.json. target_modules: names or a pattern, as in PEFT; the tensors
    determine the actual modules."""

    rank: int
    alpha: float
    base_model: str | None


def read_adapter_config(folder: str) -> PeftAdapter:
    """Read adapter_config.json. Raises ValueError naming the file and the key."""
    path = Path(folder) / ADAPTER_CONFIG
    try:
        config = read_settings(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} cannot be read: no such file") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not a LoRA adapter: peft_type must be LORA")
    for key, neutral in NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise ValueError(f"{path}: {key} is {shown(config[key])}, which is not supported")
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank < LARGEST:
        raise ValueError(f"{path}: r is {shown(rank)}, must be an integer > 0")
    if alpha is None or type(alpha) not in (int, float) or not 0 < alpha < LARGEST:
        raise ValueError(f"{path}: lora_alpha is {shown(alpha)}, must be > 0")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise ValueError(f"{path}: base_model_name_or_path is {shown(base)}, must be a name")
    return PeftAdapter(rank, float(alpha), base)


def adapter_config(
    *, rank: int, alpha: float, modules: list[str], base_model: str | None
) -> dict[str, object]:
    """Content of adapter_config.json for PEFT."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
