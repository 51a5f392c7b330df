"""The served base model, and what clients may request: its name, adapters and optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.tinker import schemas
from slime_like.tinker.errors import Refused


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model."""

    folder: str  # its Hugging Face folder
    name: str  # shown to clients
    arch: str  # its class
    supports_unembed: bool = True  # samplers can load a trained output layer
    no_adapters: str = ""  # why it has none

    def check_name(self, name: str) -> None:
        """Raise Refused for any other model."""
        if name not in (self.name, self.folder):
            raise Refused(f"base_model {name!r} is not served here, must be {self.name!r}")


def adapter_of(
    lora: schemas.LoraConfig | None, role: str, base: BaseModel
) -> dict[str, object] | None:
    """Adapter settings of a new model; None trains all weights, as does rank 0. For a critic
    `train_unembed`, which the SDK sets by default, has no effect and is stored as False, because a
    critic has no output layer. Raises Refused."""
    if lora is None or lora.rank == 0:
        return None
    if base.no_adapters:
        raise Refused(
            f"lora_config.rank {lora.rank} is {base.no_adapters}; set it to 0, which trains all "
            "weights"
        )
    settings = {
        name: getattr(lora, name)
        for name in ("rank", "seed", "train_unembed", "train_mlp", "train_attn")
    }
    if role == "critic":
        settings["train_unembed"] = False
    check_unembed(settings, base)
    return settings


def check_unembed(lora: dict[str, object] | None, base: BaseModel) -> None:
    """Raise Refused for an adapter if the sampler cannot load its merged weights."""
    if lora is not None and lora["train_unembed"] and not base.supports_unembed:
        raise Refused(
            "train_unembed is not supported with --rollout-engine sglang for a model with tied "
            "embeddings: SGLang cannot load an untied output layer into it; set "
            "train_unembed=False, or serve with --rollout-engine local"
        )


def check_optimizer(config: schemas.OptimizerConfig | None) -> None:
    """Raise Refused for an unsupported optimizer configuration."""
    if config is not None and config.type != "adamw":
        raise Refused(f"optimizer {config.type!r} is not supported, must be adamw")
