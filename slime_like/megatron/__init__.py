"""Models, optimizer steps and checkpoints on megatron-core. Call `megatron_patches.apply()` before
importing any module of it."""
