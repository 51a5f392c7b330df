"""Gated short convolutions in place of attention (LFM2): out = W (c * conv(b * x)), with b, c and x
projections of the hidden state and a causal depthwise convolution over a few tokens.

Channels are independent, and are cut into as many groups as attention has heads. So tensor-parallel
ranks have whole groups, and context-parallel ranks exchange groups, as those of delta nets.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from slime_like.megatron.model.delta_net import DeltaNet
from slime_like.megatron.ops.delta_rule import DeltaRows, causal_conv


class ShortConv(DeltaNet):
    """A gated short convolution. Its input projection yields b, c and x of each group.

    conv_weight: [groups * channels of a group, 1, taps].
    """

    has_kernels = False

    def _projected(self) -> int:
        return 3 * self.values

    def sharded(self) -> tuple[str, ...]:
        """See `DeltaNet.sharded`."""
        return ("conv_weight",)

    def _make_parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        taps = self.config.linear_conv_kernel_dim
        shape = (self.groups * self.values, 1, taps)
        conv = torch.empty(shape, dtype=self.config.params_dtype, device=device)
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                conv.uniform_(-(taps**-0.5), taps**-0.5)
        yield "conv_weight", conv

    def mix(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """See `DeltaNet.mix`."""
        size = x.size(1)
        before, after, value = x.chunk(3, -1)
        channels = slice(first * self.values, (first + size) * self.values)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.conv_weight[channels].squeeze(1).to(dtype)
        convolved = causal_conv((before * value).flatten(1).to(dtype), weight, rows)
        return after * convolved.to(x.dtype).view_as(after)
