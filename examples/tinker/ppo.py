"""PPO with a critic: values from `ppo_critic`, generalised advantage estimation in the client,
`ppo` for the policy.

python examples/tinker/ppo.py --model outputs/demo/model

Policy and critic train all weights; with --rank 32 they are adapters on one base.
"""

from __future__ import annotations

import numpy as np
from common import Response, connect, mean_reward, sample, settings
from tinker import types

GAMMA, LAMBDA = 1.0, 0.95


def gae(values: np.ndarray, reward: float) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of the response's tokens; the reward comes with the last."""
    advantages = np.zeros_like(values)
    last, following = 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + GAMMA * following - values[t]
        last = delta + GAMMA * LAMBDA * last
        advantages[t], following = last, values[t]
    return advantages, advantages + values


def main() -> None:
    options = settings(steps=20, group=8, learning_rate=3e-3, critic_learning_rate=1e-2, rank=0)
    client = connect(options)
    policy = client.create_lora_training_client(options.model, rank=options.rank).result()
    critic = client.create_lora_training_client(
        options.model, rank=options.rank, user_metadata={"model_role": "critic"}
    ).result()
    tokenizer = policy.get_tokenizer()
    for step in range(options.steps):
        groups = sample(policy, tokenizer, group=options.group, seed=step)
        responses: list[Response] = [response for group in groups for response in group]
        asked = [types.Datum(model_input=r.inputs(), loss_fn_inputs={}) for r in responses]
        told = critic.forward(asked, "ppo_critic").result().loss_fn_outputs
        values = [
            out["values"].to_numpy()[r.start - 1 :] for out, r in zip(told, responses, strict=True)
        ]
        results = [gae(v, r.reward) for v, r in zip(values, responses, strict=True)]
        weight = 1.0 / sum(
            len(v) for v in values
        )  # losses are sums: over all response tokens this makes the mean
        flat = np.concatenate([advantages for advantages, _ in results])
        mean, deviation = flat.mean(), flat.std() + 1e-6
        of_policy, of_critic = [], []
        for r, v, (advantages, returns) in zip(responses, values, results, strict=True):
            of_policy.append(
                types.Datum(
                    model_input=r.inputs(),
                    loss_fn_inputs={
                        "target_tokens": np.array(r.tokens[1:], dtype=np.int64),
                        "logprobs": r.spread(r.log_probs),
                        "advantages": r.spread((advantages - mean) / deviation * weight),
                    },
                )
            )
            arrays = {
                "values": r.spread(v),
                "returns": r.spread(returns),
                "weights": r.spread(np.full(len(v), weight)),
            }
            of_critic.append(types.Datum(model_input=r.inputs(), loss_fn_inputs=arrays))
        critic_passed = critic.forward_backward(of_critic, "ppo_critic", {"value_clip": 0.5})
        critic.optim_step(
            types.AdamParams(learning_rate=options.critic_learning_rate, grad_clip_norm=1.0)
        )
        policy.forward_backward(of_policy, "ppo")
        policy.optim_step(
            types.AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0)
        ).result()
        loss = critic_passed.result().metrics["loss:sum"]
        print(
            f"step {step:3d}  reward {mean_reward(groups):.3f}  critic loss {loss:.4f}", flush=True
        )
    print(
        "reward "
        f"{mean_reward(sample(policy, tokenizer, group=options.group, seed=options.steps)):.3f}"
    )
    client.close("success").result()


if __name__ == "__main__":
    main()
