"""The served base model, and what clients may request: its name, adapters and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_like.tinker import schemas
from slime_like.tinker.errors import Refused

NO_UNMERGED = (
    "beside the base model, which SGLang servers are not started for: serve with --lora-sync "
    "adapter, or save it again from the model's state"
)
NO_WHOLE = (
    "SGLang servers keep the base model with --lora-sync adapter, and are not sampled from with "
    "whole weights: train an adapter (rank above 0), or serve with --lora-sync merged"
)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model."""

    folder: str  # its Hugging Face folder
    name: str  # shown to clients
    arch: str  # its class
    # of adapters that samplers cannot serve: train_unembed or train_mlp -> why, and the remedy
    unserved: Mapping[str, str] = field(default_factory=dict)
    max_rank: int | None = None  # of an adapter that samplers serve
    # why samplers serve no adapter beside the base model, or no whole weights; "" if they do
    no_unmerged: str = ""
    no_whole: str = ""
    without_attention: str = ""  # why its attention and output layer have no adapters

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
    unembedding = lora.train_unembed and role != "critic"
    if base.without_attention and (lora.train_attn or unembedding):
        name = "train_attn" if lora.train_attn else "train_unembed"
        raise Refused(
            f"lora_config.{name} True is {base.without_attention}, nor has the output layer; "
            "set train_attn and train_unembed to False, or rank to 0, which trains all weights"
        )
    settings = {
        name: getattr(lora, name)
        for name in ("rank", "seed", "train_unembed", "train_mlp", "train_attn")
    }
    if role == "critic":
        settings["train_unembed"] = False
    check_served(settings, role, base)
    return settings


def check_served(
    lora: Mapping[str, object] | None, role: str, base: BaseModel, *, adapter: bool = True
) -> None:
    """Raise Refused for the adapter of a policy that samplers cannot serve. adapter: False for
    weights that it is merged into."""
    if lora is None or role == "critic":
        return
    rank = lora["rank"]
    assert isinstance(rank, int)
    if adapter and base.max_rank is not None and rank > base.max_rank:
        raise Refused(
            f"lora_config.rank {rank} is above {base.max_rank}, the largest that the SGLang "
            "servers take (--max-adapter-rank)"
        )
    for name, reason in base.unserved.items():
        if lora[name] and (adapter or name == "train_unembed"):
            raise Refused(f"{name} is not supported {reason}")


def check_optimizer(config: schemas.OptimizerConfig | None) -> None:
    """Raise Refused for an unsupported optimizer configuration."""
    if config is None:
        return
    if config.type != "adamw":
        raise Refused(f"optimizer {config.type!r} is not supported, must be adamw")
    if extra := sorted(config.model_extra or {}):
        raise Refused(
            f"optimizer_config: {', '.join(extra)} is not supported; every optim_step brings the "
            "settings of adamw"
        )
