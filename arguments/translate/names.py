"""Flags of slime, SkyRL, Megatron-LM, verl, TRL and OpenRLHF: aliases of our flags, and flags that
are not implemented, which are rejected with a message."""

from __future__ import annotations

import re
from collections.abc import Mapping

# typed -> our flag
ALIASES: Mapping[str, str] = {
    # SkyRL
    "--eps-clip-low": "--eps-clip",
    "--clip-ratio-c": "--eps-clip-c",
    "--kl-estimator-type": "--kl-loss-type",
    "--entropy-loss-coef": "--entropy-coef",
    "--max-seq-len": "--loss-norm-length",
    "--cispo-cispo-eps-clip-low": "--cispo-eps-clip-low",
    "--cispo-cispo-eps-clip-high": "--cispo-eps-clip-high",
    "--dppo-dppo-type": "--dppo-type",
    "--clip-cov-clip-ratio": "--clip-cov-ratio",
    "--clip-cov-clip-cov-lb": "--clip-cov-lb",
    "--clip-cov-clip-cov-ub": "--clip-cov-ub",
    "--kl-cov-kl-cov-frac": "--kl-cov-frac",
    "--kl-cov-ppo-kl-coef": "--kl-cov-coef",
    "--policy-loss": "--policy-loss-type",
    "--tis-imp-ratio-cap": "--token-tis-ratio-clip-high",
    # Megatron-LM
    "--no-query-key-layer-scaling": "--no-apply-query-key-layer-scaling",
    # slime
    "--tis-clip": "--token-tis-ratio-clip-high",
    "--tis-clip-low": "--token-tis-ratio-clip-low",
}
# typed switch -> our switch that means the opposite
NEGATED_ALIASES: Mapping[str, str] = {"--grpo-norm-by-std": "--disable-grpo-std-normalization"}
# typed switch -> field name -> value
PRESETS: Mapping[str, Mapping[str, object]] = {
    "--calculate-per-token-loss": {"loss_reduction": "token_mean"},
    "--allgather-cp": {"cp_comm_type": "all_gather"},
    "--use-kl-in-reward": {"use_kl_in_reward": True},
    "--use-tis": {"tis_ratio_type": "token"},
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--use-tensorboard": {"no_tensorboard": False},
    "--offload": {"offload_train": True, "offload_rollout": True},
}
# Accepted, because what they ask for always applies.
NO_EFFECT: Mapping[str, str] = {
    "--get-mismatch-metrics": "mismatch metrics are always computed",
    "--use-entropy-loss": "controlled by --entropy-coef",
    "--no-check-for-nan-in-loss-and-grad": "steps with non-finite gradients are always skipped",
    "--no-position-embedding": "controlled by --position-embedding-type",
    "--recompute-loss-function": "logits are always recomputed in the backward pass",
    "--use-mcore-models": "all models are megatron-core models",
    "--balance-by-flops": "--balance-data always balances by compute cost",
    "--use-fault-tolerance": "servers are always monitored, and restarted if the run started them",
    "--enable-experimental": "experimental features of megatron-core are not used",
    "--no-create-attention-mask-in-dataloader": "data loaders create no attention masks",
    "--no-async-tensor-model-parallel-allreduce": "controlled by --sequence-parallel",
    "--no-scatter-gather-tensors-in-pipeline": "pipeline stages always exchange full rows",
    "--no-barrier-with-level-1-timing": "no timer waits for other ranks",
    "--no-data-sharding": "rank 0 draws the samples of a rollout",
    "--no-mmap-bin-files": "prompts are not read from Megatron-LM's .bin files",
    "--no-one-logger": "one-logger is not supported",
    "--no-use-tokenizer-model-from-checkpoint-args": "the tokenizer is --hf-checkpoint's",
    "--use-flash-attn": "controlled by --attention-backend",
    "--auto-detect-ckpt-format": "the format of a checkpoint is always detected",
    "--freeze-indexer": "the indexers of sparse attention are never trained",
    "--exit-signal-handler": "a run with --save always saves on SIGTERM",
}
_DELTA = "weight deltas are always XOR-encoded, with SHA-256 per tensor"
# Like NO_EFFECT, with or without a value.
IGNORED: Mapping[str, str] = {
    f"--{name}": why
    for why, names in {
        "metrics are always logged by rollout": "wandb-always-use-train-step",
        _DELTA: "update-weight-delta-encoding update-weight-delta-checksum",
        "rows are padded as the parallel layout requires": "data-pad-size-multiplier",
        "weights are converted by this package's own mappings": "megatron-to-hf-mode",
    }.items()
    for name in names.split()
}
# flags that are not implemented -> values that ask for nothing
NEUTRAL_VALUES: Mapping[str, tuple[str, ...]] = {
    "--lora-dropout": ("0", "0.0", "0."),
    "--eval-min-new-tokens": ("0",),
    "--min-batch-collection-ratio": ("1", "1.0"),
    "--update-weights-interval": ("1",),
    "--start-rollout-id": ("0",),
    "--ckpt-format": ("torch_dist",),
    "--no-rope-freq": ("0",),
}
_ENGINES = "this setting of rollout engines"
_HOOKS = "custom functions at this place"
_ALL_SAMPLES = "filtered samples are not gathered on rank 0; use --rollout-function-path"
_WANDB = "use --save-debug-rollout-data; the report of the run has these metrics"
_CRITIC = "the critic runs on the policy's processes; see --critic-tensor-model-parallel-size"
_CLUSTER = "set by torchrun (or SLURM) and the parallel sizes"
_SYNC = "this setting of weight sync"
_DEBUG = "this debugging aid"

NOT_IMPLEMENTED_GROUPS: Mapping[str, str] = {
    _ENGINES: """
        use-distributed-post http-proxy
        rollout-data-transport release-train
    """,
    _HOOKS: "custom-update-weight-post-write-path megatron-config-path",
    _ALL_SAMPLES: "rollout-all-samples-process-path",
    _WANDB: "log-multi-turn log-passrate log-reward-category log-correct-samples",
    _CRITIC: "critic-num-nodes critic-num-gpus-per-node",
    "the critic is saved in every checkpoint in --save": "critic-save",
    "training a critic or a policy without the other": "critic-train-only",
    "prefill servers": "prefill-num-servers",
    _CLUSTER: "train-env-vars qwen-gdn-backend rank local-rank",
    _SYNC: "update-weights-interval keep-old-actor force-fp8-ue8m0-scale",
    _DEBUG: """
        save-debug-train-data dump-details load-debug-rollout-data-subsample
        load-forge-rollout-data memory-recorder profile-target ci-test
        ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm
        ci-train-rollout-logprob-abs-diff-threshold
    """,
    "dropout in adapters, which would depend on the layout": "lora-dropout",
    "use --lora-target-modules": "exclude-modules",
    "this way to collect rollouts": """
        min-batch-collection-ratio start-rollout-id disable-rollout-global-dataset
        rollout-task-type rollout-buffer-url fetch-trajectory-retry-times
    """,
    "a separate tool key for evaluation sets": "eval-tool-key",
    "--advantage-estimator normalises rewards; the function of --custom-reward-post-process-path "
    "can return them as they are": "disable-rewards-normalization",
    "this setting of evaluation": "eval-max-prompt-len eval-min-new-tokens eval-max-context-len",
    "this model setting": "padded-vocab-size seq-length decoder-seq-length no-rope-freq",
    "this optimizer setting": "reset-optimizer-states use-stateless-adam use-rollout-entropy",
    "training runs on megatron-core, without DeepSpeed and FSDP; "
    "--use-distributed-optimizer shards the optimizer's state": """
        deepspeed deepspeed-config ds-config zero-stage adam-offload
        fsdp use-fsdp fsdp-config strategy actor-strategy
    """,
    "torchrun starts one process per GPU: --nproc-per-node, --nnodes": """
        n-gpus-per-node nnodes nproc-per-node
    """,
    "Megatron-LM's own training loop": """
        train-iters train-samples lr-decay-samples lr-warmup-samples eval-iters
        data-path split tokenizer-type tokenizer-model vocab-file merge-file num-workers
        ckpt-format use-checkpoint-opt_param-scheduler override-opt-param-scheduler
        use-checkpoint-args rampup-batch-size
    """,
}
NOT_IMPLEMENTED: Mapping[str, str] = {
    "--" + name.replace("_", "-"): reason
    for reason, names in NOT_IMPLEMENTED_GROUPS.items()
    for name in names.split()
}
# Last words of a setting in verl, TRL or OpenRLHF -> our flag, for "did you mean". Only those
# whose value means the same here.
NAMES_ELSEWHERE: Mapping[str, str] = {
    "actor-rollout-ref-model-path": "--hf-checkpoint",
    "model-name-or-path": "--hf-checkpoint",
    "pretrain": "--hf-checkpoint",
    "train-files": "--prompt-data",
    "val-files": "--eval-prompt-data",
    "prompt-key": "--input-key",
    "ground-truth": "--label-key",
    "train-batch-size": "--rollout-batch-size",
    "max-prompt-length": "--rollout-max-prompt-len",
    "max-response-length": "--rollout-max-response-len",
    "max-completion-length": "--rollout-max-response-len",
    "rollout-n": "--n-samples-per-prompt",
    "num-generations": "--n-samples-per-prompt",
    "ppo-micro-batch-size-per-gpu": "--micro-batch-size",
    "micro-train-batch-size": "--micro-batch-size",
    "per-device-train-batch-size": "--micro-batch-size",
    "use-dynamic-bsz": "--use-dynamic-batch-size",
    "ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "adv-estimator": "--advantage-estimator",
    "lam": "--lambd",
    "loss-mode": "--policy-loss-type",
    "loss-agg-mode": "--loss-reduction",
    "clip-ratio": "--eps-clip",
    "clip-ratio-low": "--eps-clip",
    "clip-ratio-high": "--eps-clip-high",
    "kl-ctrl-kl-coef": "--kl-coef",
    "entropy-coeff": "--entropy-coef",
    "optim-lr": "--lr",
    "learning-rate": "--lr",
    "lr-warmup-steps": "--lr-warmup-iters",
    "max-grad-norm": "--clip-grad",
    "total-epochs": "--num-epoch",
    "num-train-epochs": "--num-epoch",
    "save-freq": "--save-interval",
    "save-steps": "--save-interval",
    "test-freq": "--eval-interval",
    "default-local-dir": "--save",
    "gradient-checkpointing": "--recompute-granularity",
}
_PREFIXES = {
    "--megatron-deepgemm-": "fp8 and fp4 training",
    "--lora-": "this setting of adapters",
}

# field name -> value -> reason
VALUES_NOT_IMPLEMENTED: Mapping[str, Mapping[str, str]] = {
    "rm_type": {"random": "this reward"},
    "optimizer": {"dist_muon": "Muon with sharded state; use muon"},
    "moe_router_load_balancing_type": {"sinkhorn": "this balancing"},
}
# values of slime's `--advantage-estimator` that select a loss
ESTIMATORS_THAT_ARE_LOSSES = ("gspo", "cispo")
# sections of SkyRL's YAML files
SECTIONS = ("trainer", "megatron")
SKYRL_PREFIX = re.compile(
    "--(?:(?:trainer-)?algorithm-(?:off-policy-correction-)?|off-policy-correction-)"
)
# Names that SkyRL itself calls deprecated. slime's --use-tis is not deprecated: SkyRL's long name
# distinguishes the two.
DEPRECATED: Mapping[str, str] = {
    "--tis-imp-ratio-cap": "--token-tis-ratio-clip-high",
    "--trainer-algorithm-use-tis": "--tis-ratio-type token",
    "--algorithm-use-tis": "--tis-ratio-type token",
}


def not_implemented(name: str) -> str | None:
    """Why a known flag cannot be used here; None for unknown names."""
    if name in NOT_IMPLEMENTED:
        return NOT_IMPLEMENTED[name]
    return next((reason for prefix, reason in _PREFIXES.items() if name.startswith(prefix)), None)
