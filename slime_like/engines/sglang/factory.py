"""Build the SGLang engine from the run's configuration: find or start servers and the router."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from arguments.hf.indexers import indexer_layers
from arguments.hf.lora_modules import target_modules
from arguments.hf.model import read_hf_model
from arguments.hf.moe import moe_layers
from arguments.run_config import RunConfig
from arguments.schema import SglangConfig
from arguments.sglang_install import interpreter, packages_of
from slime_like.engines.registry import EngineContext
from slime_like.engines.serving_factory import (
    ServerKind,
    request_settings,
    start_servers,
    update_settings,
)
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.images.settings import VisionFamily
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.indexer_topk import POSITIONS, IndexerFormat
from slime_like.servers.launches import ServerProgram, Slot
from slime_like.servers.processes import (
    LOOPBACK,
    Launch,
    command_line_of,
    free_ports,
    router_command,
    server_command,
    server_settings,
)
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.servers.router import Router
from slime_like.servers.server_pool import ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.transports.handles import without_broken_handles
from slime_like.weight_sync.updater import WeightUpdater
from slime_like.weights.families import model_families

logger = logging.getLogger(__name__)
ROUTES_SETTING = "enable_return_routed_experts"  # server argument
KEYS_SETTING = "enable_return_indexer_topk"  # likewise
MASKS_SETTING = "sampling_mask_max_tokens"  # likewise
DETERMINISTIC = "enable_deterministic_inference"
# Servers keep the features of images that they have seen, and no update of weights drops them.
NO_FEATURE_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
# /health, which the router asks, generates a token by default: not while weights are loaded, nor
# in memory that was released. Our health checks ask /health_generate where there is something to
# generate.
PLAIN_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
UNCHANGED = "default"  # the version of weights that a server has loaded at its start
FUSED = {  # module -> the layer that servers may name in its place
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
AXES = "rotary_emb.axis_map"


def make_sglang_engine(context: EngineContext) -> SglangEngine:
    """Build the engine. Collective; see `start_servers`. Server logs are in the run's folder under
    engines, on the server's node."""
    config = context.config
    device = context.device
    assert config.model.hf_checkpoint is not None
    model = config.model.hf_checkpoint
    settings = update_settings(config)
    python = interpreter(config.sglang.sglang_python)
    transport = without_broken_handles(settings.transport, python, device)
    settings = replace(settings, transport=transport)
    pool, updater, agent = start_servers(
        SglangKind(),
        config,
        lambda pool: WeightUpdater(pool, settings, model, device),
        device=device,
        logs=context.output_dir / "engines",
    )
    return SglangEngine(
        pool,
        updater,
        replace(request_settings(config.sglang), images=context.image_processor),
        model,
        check_updates=config.sglang.check_weight_update_equal,
        left_out=left_out(config),
        colocated=bool(config.sglang.offload_rollout),
        routed_experts=routes_format(config),
        indexer_topk=indexer_format(config),
        agent=agent,
        takes_adapter=config.sends_adapter,
    )


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """Of adapters that servers get."""

    rank: int
    modules: tuple[str, ...]  # last components of the names of adapted modules


@dataclass(frozen=True, slots=True)
class SglangProgram(ServerProgram):
    python: str
    model: str  # --hf-checkpoint
    dtype: str  # e.g. bfloat16
    cuda: bool
    memory_saver: bool = False
    reports_routed_experts: bool = False
    reports_indexer_topk: bool = False
    longest_mask: int | None = None  # tokens of a sampling mask, if they are reported
    overrides: Mapping[str, object] = field(default_factory=dict)  # the user's --sglang flags
    tower: str | None = None  # of a run with images: "frozen" or "trained"
    adapter: AdapterNeeds | None = None  # servers get adapters
    deterministic: bool = False

    def command(self, slot: Slot) -> tuple[str, ...]:
        settings: dict[str, object] = {}
        if slot.nodes > 1:
            settings = {"nnodes": slot.nodes, "dist_init_addr": slot.meeting}
        settings |= server_settings(
            model=self.model,
            port=slot.port,
            host=slot.host,
            gpus=slot.gpus,
            base_gpu=slot.first_gpu,
            dtype=self.dtype,
            cuda=self.cuda,
            memory_saver=self.memory_saver,
            overrides=self.overrides,
        )
        if slot.nodes > 1:
            settings["node_rank"] = slot.node_rank
        if self.reports_routed_experts:
            settings[ROUTES_SETTING] = True
        if self.reports_indexer_topk:
            settings[KEYS_SETTING] = True
        if self.deterministic:
            settings[DETERMINISTIC] = True
        if self.longest_mask is not None:
            settings.setdefault(MASKS_SETTING, self.longest_mask)
        if self.adapter is not None:
            for name, value in adapter_settings(self.adapter, cuda=self.cuda).items():
                settings.setdefault(name, value)
        if self.tower == "frozen" and settings.get("enable_memory_saver"):
            # updates would not bring back the part that they leave out
            settings["enable_weights_cpu_backup"] = True
        return server_command(self.python, settings)

    def environment(self, slot: Slot) -> Mapping[str, str]:
        variables = PLAIN_HEALTH | (NO_FEATURE_CACHE if self.tower == "trained" else {})
        return variables | (POSITIONS if self.reports_indexer_topk else {})


class SglangKind(ServerKind):
    api = SglangApi()

    def program(self, config: RunConfig, device: torch.device) -> SglangProgram:
        assert config.model.hf_checkpoint is not None, "checked on the command line"
        vision = config.gpt.vision
        return SglangProgram(
            interpreter(config.sglang.sglang_python),
            config.model.hf_checkpoint,
            str(config.megatron.transformer.params_dtype).removeprefix("torch."),
            device.type == "cuda",
            bool(config.sglang.offload_rollout),
            config.rollout.use_rollout_routing_replay,
            config.rollout.use_rollout_indexer_replay,
            longest_mask(config),
            config.sglang.sglang_server_flags or {},
            None if vision is None else "trained" if vision.trained else "frozen",
            adapter_needs(config),
            config.guards.true_on_policy_mode,
        )

    def router(self, config: SglangConfig, logs: Path) -> Router | None:
        return make_router(config, logs)

    def check(self, config: RunConfig, pool: ServerPool) -> None:
        if config.model.train_vision_tower and config.sglang.rollout_num_gpus is None:
            ((variable, value),) = NO_FEATURE_CACHE.items()
            logger.warning(
                "servers that others started must have %s=%s in their environment: with "
                "--train-vision-tower they would keep features of images of older weights",
                variable,
                value,
            )
        if (needs := adapter_needs(config)) is not None:
            require_adapters(pool, needs)
        if config.guards.true_on_policy_mode:
            require_deterministic(pool)
        if config.rollout.use_rollout_routing_replay:
            require_routed_experts(pool)
        if config.rollout.use_rollout_indexer_replay:
            require_indexer_topk(pool)
        if (longest := longest_mask(config)) is not None:
            require_sampling_masks(pool, longest)


def longest_mask(config: RunConfig) -> int | None:
    """Tokens of the longest sampling mask that servers report; None if they report none."""
    if not config.rollout.renormalize_sampled_log_probs:
        return None
    assert config.rollout.rollout_top_k > 0, "checked on the command line"
    return config.rollout.rollout_top_k


def adapter_needs(config: RunConfig) -> AdapterNeeds | None:
    """None if servers get whole weights."""
    if not config.sends_adapter:
        return None
    model = read_hf_model(str(config.model.hf_checkpoint))
    modules = target_modules(config.lora.lora_target_modules, model)
    return AdapterNeeds(config.lora.lora_rank, modules)


def adapter_settings(needs: AdapterNeeds, *, cuda: bool) -> dict[str, object]:
    """Server settings. With strict loading the first request with an adapter that has weights which
    the server does not apply fails, where SGLang otherwise ignores these weights."""
    settings: dict[str, object] = {
        "enable_lora": True,
        "lora_strict_loading": True,
        "max_lora_rank": needs.rank,
        "lora_target_modules": list(needs.modules),
    }
    return settings if cuda else settings | {"lora_backend": "torch_native"}


def require_adapters(pool: ServerPool, needs: AdapterNeeds) -> None:
    """Raise RunError naming a server that does not take such adapters."""
    flags = command_line_of(adapter_settings(needs, cuda=True))
    for url, info in _settings_of_servers(pool, "lora_path"):
        rank = info.get("max_lora_rank")
        enabled = info.get("enable_lora") is True and info.get("lora_strict_loading") is True
        missing = _unserved_modules(needs, info.get("lora_target_modules"))
        if not enabled or not isinstance(rank, int) or rank < needs.rank or missing:
            of_modules = f" on {', '.join(missing)}" if missing else ""
            raise RunError(
                f"--lora-sync adapter: the engine {url} does not take adapters of rank "
                f"{needs.rank}{of_modules}; start it with {' '.join(flags)}, or use --lora-sync "
                "merged"
            )


def _unserved_modules(needs: AdapterNeeds, served: object) -> list[str]:
    """Modules that a server applies no adapters to. served: what it reports; anything but a list of
    names says nothing."""
    if not isinstance(served, list) or {"all", "all-linear"}.intersection(served):
        return []
    return [m for m in needs.modules if m not in served and FUSED.get(m) not in served]


def require_base_model(pool: ServerPool, model: str) -> None:
    """Raise RunError naming a server that others started and that may hold other weights than the
    base model's, which it keeps. model: folder of the base model."""
    for worker in pool.alive():
        try:
            info = pool.call(worker, pool.api.info_path, timeout_s=CONTROL_S, method="GET")
            version = pool.weight_version(worker)
        except RequestFailed as failure:
            raise RunError(str(failure)) from None
        flag = f"--lora-sync adapter: the engine {worker.url}"
        path = str(info.get("model_path"))
        if Path(path).resolve() != Path(model).resolve():
            raise RunError(f"{flag} has the model {path}; start it with --model-path {model}")
        if str(info.get("dp_size", 1)) != "1":
            raise RunError(f"{flag} has data parallelism; start it without --dp-size")
        if version != UNCHANGED:
            raise RunError(
                f"{flag} reports weights of version {version}, as after an update; start it anew. "
                "If a Tinker server was killed that had left them as they are, say so: curl -H "
                "'Content-Type: application/json' -d "
                f"'{json.dumps({'new_version': UNCHANGED})}' {worker.url}/update_weight_version"
            )


def left_out(config: RunConfig) -> tuple[str, ...]:
    """Parts of the names of weights that updates leave as the servers have loaded them: of a model
    that sees, SGLang's table of rotary axes, and the vision tower, unless it is trained."""
    hf = read_hf_model(str(config.model.hf_checkpoint))
    family = model_families.get(hf.architecture).vision
    if not isinstance(family, VisionFamily):
        return ()
    if config.gpt.vision is not None and config.gpt.vision.trained:
        return (AXES,)
    return (AXES, *(f"{module}." for module, _ in family.modules))


def routes_format(config: RunConfig) -> RoutesFormat | None:
    """The format of routed experts; None for a dense model."""
    transformer = config.megatron.transformer
    if not transformer.num_moe_experts:
        return None
    return RoutesFormat(
        tuple(moe_layers(transformer.moe_layer_freq, transformer.num_layers)),
        transformer.moe_router_topk,
        transformer.num_moe_experts,
    )


def require_routed_experts(pool: ServerPool) -> None:
    """Raise RunError naming a server that does not report routed experts."""
    for url, info in _settings_of_servers(pool, "return_routed_experts"):
        flag = f"--use-rollout-routing-replay: the engine {url}"
        if ROUTES_SETTING not in info:
            raise RunError(
                f"{flag} reports no routed experts: its /server_info has no {ROUTES_SETTING}; use "
                "a version of SGLang that has --enable-return-routed-experts"
            )
        if info[ROUTES_SETTING] is not True:
            raise RunError(
                f"{flag} does not report routed experts; start it with "
                "--enable-return-routed-experts"
            )


def indexer_format(config: RunConfig) -> IndexerFormat | None:
    """The format of selected keys; None for a model without indexers, or one whose servers do not
    report them."""
    transformer = config.megatron.transformer
    has_indexers = transformer.multi_latent_attention and hasattr(transformer, "index_topk")
    if not has_indexers or transformer.index_pool > 1:
        return None
    return IndexerFormat(tuple(indexer_layers(transformer)), transformer.index_topk)


def require_indexer_topk(pool: ServerPool) -> None:
    """Raise RunError naming a server that does not report selected keys."""
    for url, info in _settings_of_servers(pool, "return_indexer_topk"):
        if info.get(KEYS_SETTING) is not True:
            raise RunError(
                f"--use-rollout-indexer-replay: the engine {url} does not report selected keys; "
                "use SGLang 0.5.23 or a later one, and start it with --enable-return-indexer-topk, "
                "and with SGLANG_DSA_FUSE_TOPK=0 in its environment"
            )


def require_deterministic(pool: ServerPool) -> None:
    """Raise RunError naming a server whose results depend on the other requests of a batch."""
    for url, info in _settings_of_servers(pool):
        if info.get(DETERMINISTIC) is not True:
            raise RunError(
                f"--true-on-policy-mode: the engine {url} is not deterministic; start it with "
                "--enable-deterministic-inference"
            )


def require_sampling_masks(pool: ServerPool, longest: int) -> None:
    """Raise RunError naming a server that does not report sampling masks of this length."""
    for url, info in _settings_of_servers(pool, "return_sampling_mask"):
        allowed = info.get(MASKS_SETTING)
        flag = f"--renormalize-sampled-log-probs: the engine {url}"
        if not isinstance(allowed, int):
            raise RunError(
                f"{flag} reports no sampling masks: its /server_info has no {MASKS_SETTING}; use a "
                "version of SGLang that has --sampling-mask-max-tokens"
            )
        if allowed < longest:
            raise RunError(
                f"{flag} reports sampling masks of at most {allowed} tokens; start it with "
                f"--sampling-mask-max-tokens {longest}, or lower --rollout-top-k"
            )


def _settings_of_servers(
    pool: ServerPool, field: str | None = None
) -> Iterator[tuple[str, dict[str, object]]]:
    """URL and settings of each server. field: of requests, which sglang_router drops."""
    if pool.router is not None and field is not None:
        logger.info("rollout requests bypass sglang_router, which drops %s", field)
    for worker in pool.alive():
        try:
            info = pool.call(worker, "/server_info", timeout_s=CONTROL_S, method="GET")
        except RequestFailed as failure:
            raise RunError(str(failure)) from None
        yield worker.url, info


def make_router(config: SglangConfig, logs: Path) -> Router | None:
    if config.no_sglang_router:
        return None
    if config.sglang_router_ip is not None:
        return Router(
            f"http://{config.sglang_router_ip}:{config.sglang_router_port}",
            None,
            config.rollout_connect_timeout_s,
        )
    python = interpreter(config.sglang_python)
    if packages_of(python)[1] is None:  # without sglang_router
        python = interpreter(None)
    free_port, metrics_port = free_ports(2)
    port = config.sglang_router_port or free_port
    settings = {
        "host": LOOPBACK,
        "port": port,
        "prometheus_host": LOOPBACK,
        "prometheus_port": metrics_port,
        "log_level": "warn",
        "request_timeout_secs": int(config.rollout_request_timeout_s) + 1,
        "retry_max_retries": 2,
        "health_check_interval_secs": 5,
    }
    command = router_command(python, settings | (config.sglang_router_flags or {}))
    return Router(
        f"http://{LOOPBACK}:{port}",
        Launch(command, logs / "router.log"),
        config.rollout_connect_timeout_s,
    )
