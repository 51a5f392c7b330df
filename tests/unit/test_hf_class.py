from __future__ import annotations

import threading

import torch
from transformers import PreTrainedModel

from slime_like.hf_class import uninitialised_weights


def test_models_of_two_threads_leave_transformers_as_it_was() -> None:
    before = (PreTrainedModel.init_weights, torch.nn.init.normal_)
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with uninitialised_weights():
            inside.set()
            leave.wait(10)

    def second() -> None:
        inside.wait(10)
        with uninitialised_weights():
            threads[0].join(10)  # it leaves last

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    assert PreTrainedModel.init_weights is not before[0]
    threads[1].join(0.2)  # without a lock, it is inside now
    leave.set()
    for thread in threads:
        thread.join()
    assert (PreTrainedModel.init_weights, torch.nn.init.normal_) == before
