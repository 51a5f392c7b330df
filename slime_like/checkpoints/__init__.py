"""Checkpoint files: folder layout, finding the newest checkpoint, completeness, and retention. The
content, including all tensors, is handled by megatron/checkpoint/.

    <save>/latest_checkpointed_iteration.txt   tracker: step of the newest complete checkpoint
    <save>/iter_0000010/                       checkpoint after 10 rollouts
        policy/                                megatron-core distributed checkpoint, one folder per
                                               trained network
        rng/rank_00000.safetensors             random states of each rank
        trainer.json                           everything else, as JSON
        manifest.json                          size and SHA-256 of all other files; written last

A checkpoint is written as `iter_0000010.tmp` and renamed once it is complete and synced to disk.
Then the tracker is replaced, and only then are older checkpoints removed. The process may be killed
between any two of these steps.
"""
