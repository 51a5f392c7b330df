"""Rules about the network of a run with images."""

from __future__ import annotations

from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.pipeline import first_layers, virtual_stages_of
from slime_like.config import Problem, flag_name
from slime_like.engines.registry import engine_traits


def asked_by(s: Settings) -> str:
    """The setting that asks for images."""
    return "serve_images" if s.server.serve_images else "multimodal_keys"


def check_deepstack_layers(s: Settings) -> list[Problem]:
    """The layers whose outputs get features of images are in the first (virtual) pipeline stage,
    with the tower."""
    if s.gpt.vision is None:
        return []
    needed = s.gpt.vision.deepstack_layers
    starts = first_layers(s)
    if not starts or starts[0] >= needed:
        return []
    chunks = virtual_stages_of(s.parallel, s.core)
    stage = "pipeline stage" if chunks is None else "virtual pipeline stage"
    return problem(
        asked_by(s),
        None,
        f"images enter the outputs of the first {needed} layers of this model, and the first "
        f"{stage} has {starts[0]}; use fewer stages, or give the first one more layers with "
        "--decoder-first-pipeline-num-layers",
    )


def check_rope_kernel(s: Settings) -> list[Problem]:
    """The fused kernel of rotary embeddings counts positions by itself."""
    if s.gpt.vision is None or not s.gpt.vision.sections or not s.core.get("apply_rope_fusion"):
        return []
    images = flag_name(asked_by(s))
    message = f"cannot be combined with {images}: images have positions on three axes"
    return problem("apply_rope_fusion", True, message)


def check_image_attention(s: Settings) -> list[Problem]:
    """Transformer Engine's attention has no mask of images."""
    if s.gpt.vision is None or not s.gpt.vision.rule.both_directions:
        return []
    if resolve_transformer_impl(s.model, s.machine) == "local":
        return []
    message = "images of this model need attention in both directions; add --transformer-impl local"
    return problem(asked_by(s), None, message)


def check_served_images(s: Settings) -> list[Problem]:
    """SGLang has the mask of images in one of its kernels for attention, without its cache of
    prefixes and with whole prompts in one step; and it reads such a prompt from its text."""
    engine = s.rollout.rollout_engine
    samples = s.generates or s.evaluates
    if s.gpt.vision is None or not s.gpt.vision.rule.both_directions or not samples:
        return []
    if not engine_traits(engine).has_servers:
        return []
    message = (
        "images of this model need attention in both directions, which servers are not asked for; "
        "use --rollout-engine local"
    )
    return problem("multimodal_keys", None, message)


IMAGE_NETWORK_RULES: tuple[Rule, ...] = (
    check_deepstack_layers,
    check_rope_kernel,
    check_image_attention,
)
IMAGE_RULES: tuple[Rule, ...] = (*IMAGE_NETWORK_RULES, check_served_images)
