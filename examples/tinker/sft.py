"""Supervised fine-tuning: cross_entropy on answers that are all vowels, then what the model writes
by itself.

python examples/tinker/sft.py --model outputs/demo/model
"""

from __future__ import annotations

import numpy as np
from common import PROMPTS, connect, mean_reward, sample, settings
from tinker import types


def main() -> None:
    options = settings(steps=20, learning_rate=3e-3)
    client = connect(options)
    training = client.create_lora_training_client(options.model, rank=0).result()
    tokenizer = training.get_tokenizer()
    rng = np.random.default_rng(options.seed)
    for step in range(options.steps):
        data = []
        for text in PROMPTS:
            prompt = tokenizer.encode(f"<|user|>{text}<|assistant|>", add_special_tokens=False)
            answer = tokenizer.encode(
                "".join(rng.choice(list("aeiou"), 8)), add_special_tokens=False
            )
            tokens = [*prompt, *answer]
            weights = np.zeros(len(tokens) - 1, dtype=np.float32)
            weights[len(prompt) - 1 :] = (
                1.0 / len(answer) / len(PROMPTS)
            )  # losses are sums: this makes the mean
            targets = np.array(tokens[1:], dtype=np.int64)
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": targets, "weights": weights},
                )
            )
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=options.learning_rate))
        print(f"step {step:3d}  loss {passed.result().metrics['loss:sum']:.3f}", flush=True)
    print(f"reward {mean_reward(sample(training, tokenizer, group=8, seed=options.seed)):.3f}")
    print(f"saved {training.save_state('final').result().path}")
    client.close("success").result()


if __name__ == "__main__":
    main()
