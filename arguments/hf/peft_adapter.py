"""adapter_config.json of PEFT: what an adapter is, and what it must not be to mean the same here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
# key -> values under which it has no effect; anything else would change the result, and is refused
# by name
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
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "orthogonal",
    ),  # others change the base's weights
}


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """target_modules: as PEFT has it, names or a pattern; the tensors say which modules there are."""

    rank: int
    alpha: float
    base_model: str | None


def read_adapter_config(folder: str) -> PeftAdapter:
    """Raises ValueError naming the file and the key."""
    path = Path(folder) / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not of a LoRA adapter (peft_type LORA)")
    for key, neutral in NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise ValueError(f"{path}: {key} is {config[key]!r}, which is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"{path}: r is {rank!r}, must be a whole number above 0")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise ValueError(f"{path}: lora_alpha is {alpha!r}, must be a number above 0")
    return PeftAdapter(rank, float(alpha), config.get("base_model_name_or_path"))


def adapter_config(
    *, rank: int, alpha: float, modules: list[str], base_model: str | None
) -> dict[str, object]:
    """What PEFT reads."""
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
