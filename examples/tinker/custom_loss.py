"""A client-side custom loss on log-probs: REINFORCE with the mean reward as baseline, in three
lines of torch.

python examples/tinker/custom_loss.py --model outputs/demo/model
"""

from __future__ import annotations

import numpy as np
import torch
from common import connect, mean_reward, sample, settings
from tinker import types


def main() -> None:
    options = settings(steps=20, group=8, learning_rate=3e-3)
    client = connect(options)
    training = client.create_lora_training_client(options.model, rank=0).result()
    tokenizer = training.get_tokenizer()
    for step in range(options.steps):
        groups = sample(training, tokenizer, group=options.group, seed=step)
        responses = [response for group in groups for response in group]
        baseline = mean_reward(groups)

        def reinforce(
            data: list[types.Datum],
            log_probs: list[torch.Tensor],
            responses=responses,
            baseline=baseline,
        ) -> tuple[torch.Tensor, dict[str, float]]:
            terms = [
                -(r.reward - baseline) * scores[r.start - 1 :].mean()
                for r, scores in zip(responses, log_probs, strict=True)
            ]
            return torch.stack(terms).mean() * 10, {"baseline": baseline}

        data = [
            types.Datum(
                model_input=r.inputs(),
                loss_fn_inputs={"target_tokens": np.array(r.tokens[1:], dtype=np.int64)},
            )
            for r in responses
        ]
        training.forward_backward_custom(data, reinforce).result()
        training.optim_step(
            types.AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0)
        ).result()
        print(f"step {step:3d}  reward {baseline:.3f}", flush=True)
    print(
        "reward "
        f"{mean_reward(sample(training, tokenizer, group=options.group, seed=options.steps)):.3f}"
    )
    client.close("success").result()


if __name__ == "__main__":
    main()
