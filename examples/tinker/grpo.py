"""GRPO with importance_sampling: advantages are the rewards less the mean of their group, over its
deviation.

python examples/tinker/grpo.py --model outputs/demo/model
"""

from __future__ import annotations

import numpy as np
from common import Response, connect, mean_reward, sample, settings
from tinker import types


def datums(group: list[Response]) -> list[types.Datum]:
    rewards = np.array([response.reward for response in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [
        types.Datum(
            model_input=response.inputs(),
            loss_fn_inputs={
                "target_tokens": np.array(response.tokens[1:], dtype=np.int64),
                "logprobs": response.spread(response.log_probs),
                "advantages": response.spread(
                    advantage / len(response.log_probs) / len(group)
                ),  # losses are sums: the mean is ours to take
            },
        )
        for response, advantage in zip(group, advantages, strict=True)
    ]


def main() -> None:
    options = settings(steps=20, group=8, learning_rate=3e-3)
    client = connect(options)
    training = client.create_lora_training_client(options.model, rank=0).result()
    tokenizer = training.get_tokenizer()
    for step in range(options.steps):
        groups = sample(training, tokenizer, group=options.group, seed=step)
        data = [datum for group in groups for datum in datums(group)]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(
            types.AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0)
        )
        passed.result()
        print(
            f"step {step:3d}  reward {mean_reward(groups):.3f}  grad_norm "
            f"{stepped.result().metrics['grad_norm']:.3f}",
            flush=True,
        )
    print(
        "reward "
        f"{mean_reward(sample(training, tokenizer, group=options.group, seed=options.steps)):.3f}"
    )
    client.close("success").result()


if __name__ == "__main__":
    main()
