"""Checkpoint files: folder layout, finding the newest, completeness, and retention.
Nothing here knows tensors; what is in a checkpoint is the business of megatron_backend/checkpoint/.

    <save>/latest_checkpointed_iteration.txt     the step of the newest complete checkpoint
    <save>/iter_0000010/                         10 rollouts were trained on
        policy/                                  one megatron-core distributed checkpoint for each trained network
        rng/rank_00000.safetensors               random states of each rank
        trainer.json                             everything else, as JSON
        manifest.json                            size and SHA-256 of every other file; written last

A checkpoint is written as `iter_0000010.tmp` and renamed once it is whole and on the disk; the
tracker is replaced after that, and only then are older checkpoints removed. A process may be killed
between any two of these.
"""
