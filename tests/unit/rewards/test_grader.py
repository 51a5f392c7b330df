"""The grader: outcomes, deadlines, and that nothing survives it."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path

import pytest
import torch

from arguments.schema.rollout import RewardConfig
from slime_like.rewards.grader import Grader
from slime_like.types import Sample, SampleStatus
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(300)


def make(i, response="", label=None, **fields):
    return Sample(
        group_id=i // 4,
        sample_id=i,
        tokens=torch.tensor([1, 2, 3, 4]),
        response_length=2,
        loss_mask=torch.ones(2, dtype=torch.bool),
        text=f"prompt {i}",
        response=response,
        label=label,
        **fields,
    )


def test_a_graded_sample_is_the_sample_with_its_reward(custom):
    """Of the class itself, frozen, with every other field as it was."""
    sample = make(3, "a", weight_versions=(1, 2), metadata={"k": 1}, branches=(make(3, "b"),))
    (graded,) = custom("def score(args, sample):\n    return 0.5").grade([sample])
    assert type(graded) is Sample and graded.reward == 0.5 and sample.reward is None
    for field in fields(Sample):
        if field.name != "reward":
            assert getattr(graded, field.name) is getattr(sample, field.name), field.name
    with pytest.raises(FrozenInstanceError):
        graded.reward = 1.0
    assert replace(graded, reward=None).reward is None and "reward=0.5" in repr(graded)


@pytest.fixture
def custom(tmp_path):
    """custom(source, ...) -> a Grader of the function `score` in that source; closed with the
    test."""
    graders = []

    def build(source, **options):
        path = tmp_path / f"reward_{len(graders)}.py"
        path.write_text(textwrap.dedent(source))
        graders.append(Grader(custom_rm_path=f"{path}:score", **options))
        return graders[-1]

    yield build
    for grader in graders:
        grader.close()


def pids(path):
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_settings_are_those_of_the_command_line():
    with Grader(**asdict(RewardConfig(rm_type="gsm8k"))) as grader:
        assert [
            s.reward for s in grader.grade([make(0, "#### 7", "#### 7"), make(1, "8", "#### 7")])
        ] == [1.0, 0.0]


def test_samples_keep_everything_else():
    sample = make(
        3, "a", "a", metadata={"x": 1}, weight_versions=(4, 4), status=SampleStatus.TRUNCATED
    )
    with Grader(rm_type="exact_match") as grader:
        (graded,) = grader.grade([sample])
        assert grader.last_counts == dict(
            graded=1, nonfinite=0, unfit=0, raised=0, timeout=0, died=0, skipped=0
        )
        assert grader.grade([]) == []
    assert graded.reward == 1.0
    assert sample.reward is None
    assert (graded.metadata, graded.weight_versions, graded.status) == (
        {"x": 1},
        (4, 4),
        SampleStatus.TRUNCATED,
    )
    assert graded.tokens is sample.tokens


def test_what_looks_at_no_text_starts_no_process():
    with Grader(rm_type="zero") as grader:
        assert [s.reward for s in grader.grade([make(i, "7", "7") for i in range(10)])] == [
            0.0
        ] * 10
        assert grader._pool is None


def test_batches_of_a_bounded_reward():
    """Several batches, responses that fill one alone, and a label that cannot be graded."""
    samples = [make(i, str(i), str(i - i % 2)) for i in range(300)]
    samples[7] = make(7, "x" * 2**20 + " 7", "7")
    samples[9] = make(9, "9", "no number")
    with Grader(rm_type="gsm8k", rm_num_workers=2) as grader:
        graded = grader.grade(samples)
    expected = [float(i % 2 == 0) for i in range(300)]
    expected[7] = 1.0
    assert [s.reward for s in graded if s.sample_id != 9] == [
        value for i, value in enumerate(expected) if i != 9
    ]
    assert "raised ValueError: the label holds no number" in graded[9].metadata["failure"]


def test_a_row_names_its_own_reward():
    pytest.importorskip("math_verify")
    samples = [
        make(0, "\\boxed{\\frac12}", "0.5", metadata={"rm_type": "math"}),
        make(1, "0.5", "0.5"),
        make(2, "x", "0.5"),
    ]
    words = "sample 0: the row's metadata asks for rm_type 'math'; allow rows to choose"
    with Grader(rm_type="exact_match") as grader, pytest.raises(ValueError, match=words):
        grader.grade(samples)
    with Grader(rm_type="exact_match", rm_type_from_metadata=True) as grader:
        assert [s.reward for s in grader.grade(samples)] == [1.0, 1.0, 0.0]
        with pytest.raises(
            ValueError,
            match=r"sample 3: metadata rm_type 'maths': .* code, .*exact_match, .*gsm8k",
        ):
            grader.grade([make(3, metadata={"rm_type": "maths"})])


def test_a_reward_that_comes_later_is_prepared(tmp_path):
    pytest.importorskip("math_verify")
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    metadata = {
        "rm_type": "task",
        "task": {"name": "chain_sum", "options": {"size": 1, "seed": 1}},
        "entry": entry,
    }
    with Grader(rm_type="math", rm_num_workers=1, rm_type_from_metadata=True) as grader:
        assert grader.grade([make(0, "$7$", "7")])[0].reward == 1.0
        first = grader._pool.workers[0].process.pid
        assert [
            s.reward
            for s in grader.grade(
                [make(1, "$7$", "7"), make(2, entry["answer"], metadata=metadata)]
            )
        ] == [1.0, 1.0]
        assert grader.grade([make(0, "$8$", "7")])[0].reward == 0.0
        assert not is_alive(first)
        environment = (
            Path(f"/proc/{grader._pool.workers[0].process.pid}/environ").read_bytes().split(b"\0")
        )
    assert all(
        not variable
        or variable.split(b"=")[0]
        in (
            b"PATH",
            b"PYTHONHOME",
            b"LANG",
            b"LC_ALL",
            b"LD_LIBRARY_PATH",
            b"TMPDIR",
            b"OMP_NUM_THREADS",
        )
        for variable in environment
    )


def test_a_reward_that_is_not_there(monkeypatch):
    """A command line with one is refused by `arguments`; a row may still name one."""
    with pytest.raises(
        ValueError,
        match=r"sample 5: --rm-type 'maths': .*exact_match, .*gsm8k, .*math",
    ):
        Grader(rm_type="maths").grade([make(5)])
    with pytest.raises(
        ValueError,
        match="sample 5: no reward: give --rm-type, --custom-rm-path, or --rm-type-from-metadata "
        "and",
    ):
        Grader().grade([make(5)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"reward math needs math-verify; .* pip install -e '/.*\[tasks\]'",
    ):
        Grader(rm_type="math").grade([make(5)])


def test_custom_function_sees_the_sample_and_the_settings(custom):
    grader = custom(
        """
        def score(args, sample, **kwargs):
            assert not kwargs
            assert (sample.prompt, sample.response) == ("prompt 6", "réponse")
            assert (sample.label, sample.metadata) == ({"a": (1,)}, {"k": [1]})
            assert (sample.tokens, sample.response_length) == ([1, 2, 3, 4], 2)
            assert sample.status == "truncated"
            assert (sample.index, sample.group_index) == (6, 1)
            assert (args.reward_key, args.max_abs_reward) == (None, 9.0)
            print("this goes to standard error")
            return 0.25
        """,
        max_abs_reward=9.0,
    )
    sample = make(6, "réponse", {"a": (1,)}, metadata={"k": [1]}, status=SampleStatus.TRUNCATED)
    (graded,) = grader.grade([sample])
    assert graded.metadata == {"k": [1]}
    assert graded.reward == 0.25


def test_workers_do_not_load_torch_and_stay(custom):
    grader = custom(
        "import sys, os\ndef score(args, sample):\n"
        "    return {'torch': float('torch' in sys.modules), 'pid': os.getpid()}\n",
        reward_key="torch",
        rm_num_workers=1,
    )
    graded = [grader.grade([make(0)])[0] for _ in range(3)]
    assert [s.reward for s in graded] == [0.0] * 3
    assert len({s.metadata["reward_details"]["pid"] for s in graded}) == 1


def test_order_is_kept_over_workers(custom):
    grader = custom(
        "import time\ndef score(args, sample):\n"
        "    time.sleep(0.05 if sample.index % 3 == 0 else 0)\n    return sample.index\n",
        rm_num_workers=3,
    )
    assert [s.reward for s in grader.grade([make(i) for i in range(30)])] == list(range(30))


def test_jobs_that_were_sent_ahead_are_graded_once(custom, tmp_path):
    """Of many quick ones a worker has some in its pipe: they are no victims of the one that hangs
    or kills it, and their own time starts with their turn."""
    seen = tmp_path / "seen"
    grader = custom(
        f"""
        import os, time
        def score(args, sample):
            with open({str(seen)!r}, "a") as file:
                file.write(f"{{sample.index}} ")
            if sample.index == 70: time.sleep(1000)
            if sample.index == 140: os._exit(3)
            if sample.index > 180: time.sleep(0.2)
            return sample.index
        """,
        rm_timeout_s=2,
        rm_num_workers=1,
        max_abs_reward=1e3,
    )
    graded = grader.grade([make(i) for i in range(200)])
    assert [s.reward for s in graded] == [None if i in (70, 140) else i for i in range(200)]
    assert grader.last_counts["timeout"] == grader.last_counts["died"] == 1
    assert sorted(pids(seen)) == list(range(200))


def test_a_large_sample(custom):
    grader = custom(
        "def score(args, sample):\n    return len(sample.response)\n", max_abs_reward=1e9
    )
    assert [s.reward for s in grader.grade([make(i, "é" * 10_000_000) for i in range(2)])] == [
        10_000_000
    ] * 2


def test_values_that_leave_the_baseline_and_samples_that_fail(custom, caplog, capfd):
    grader = custom(
        """
        import os, signal
        def score(args, sample):
            match sample.index:
                case 1: return float("nan")
                case 2: return float("-inf")
                case 3: return None
                case 4: raise KeyError("gone")
                case 5: os._exit(3)
                case 6: os.kill(os.getpid(), signal.SIGSEGV)
                case 7: raise SystemExit(1)
                case 8: return True
            return 0.5
        """,
        rm_num_workers=1,
    )
    samples = [make(i) for i in range(10)]
    graded = grader.grade(
        [*samples, make(10, status=SampleStatus.FAILED), make(11, status=SampleStatus.ABORTED)]
    )
    assert [graded[i].reward for i in (0, 8, 9)] == [0.5, 1.0, 0.5]
    assert all(
        math.isnan(graded[i].reward) and graded[i].status == SampleStatus.COMPLETED
        for i in (1, 2, 3)
    )
    for i, reason in {
        4: "raised KeyError: 'gone'",
        5: "died (exit code 3)",
        6: "died (signal 11)",
        7: "raised SystemExit",
    }.items():
        assert (graded[i].reward, graded[i].status) == (None, SampleStatus.FAILED)
        assert reason in graded[i].metadata["failure"]
    assert [s.reward for s in graded[10:]] == [None, None]
    assert grader.last_counts == dict(
        graded=6, nonfinite=3, unfit=0, raised=2, timeout=0, died=2, skipped=2
    )
    assert grader.last_failure is not None
    assert grader.last_failure.startswith("sample 4: the reward raised KeyError: 'gone' (")
    assert grader.last_failure.endswith("reward_0.py:8)"), "the place in the user's file"
    assert graded[2].metadata["failure"] == "the reward is -inf"
    assert grader.last_nonfinite == "sample 1: the reward is nan"
    assert (caplog.text, *capfd.readouterr()) == (
        "",
        "",
        "",
    )  # every rank grades: reports are the trainer's
    grader.grade(samples[2:4])
    assert (grader.last_failure, grader.last_nonfinite) == (None, "sample 2: the reward is -inf")
    grader.grade([samples[3], samples[5]])
    assert (grader.last_failure, grader.last_nonfinite) == (
        "sample 5: the reward process died (exit code 3)",
        "sample 3: the reward function returned None (a path through it without a return?)",
    )
    grader.grade(samples[8:])
    assert (grader.last_failure, grader.last_nonfinite) == (None, None)


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        ("'0.5'", {}, "returned str; return a number, one for each token of the response"),
        ("['1', 2]", {}, "returned list;"),
        (
            "{'score': 1, 'x': 2}",
            {},
            "returned a dict with the keys 'score', 'x'; name the one to train on with "
            "--reward-key",
        ),
        (
            "{'score': 1}",
            {"reward_key": "total"},
            "a dict with the keys 'score'; --reward-key total is not among them",
        ),
        ("{'score': 'high'}", {"reward_key": "score"}, "returned str"),
        ("1e30", {}, r"the reward 1e\+30 is beyond --max-abs-reward 1e\+06"),
        ("-3", {"max_abs_reward": 2.0}, "the reward -3 is beyond --max-abs-reward 2"),
    ],
)
def test_values_that_are_errors(custom, value, options, words):
    grader = custom(
        f"def score(args, sample):\n    return {value} if sample.index == 41 else 1\n",
        rm_num_workers=1,
        **options,
    )
    with pytest.raises(ValueError, match=f"sample 41: .*{words}"):
        grader.grade([make(i) for i in range(40, 43)])


def test_dict_with_a_reward_key(custom):
    grader = custom(
        "def score(args, sample):\n    return {'score': 0.5, 'format': 1}\n", reward_key="score"
    )
    (graded,) = grader.grade([make(0)])
    assert (graded.reward, graded.metadata) == (0.5, {"reward_details": {"format": 1.0}})


IMMUNE = """
    import os, signal, subprocess, time
    def score(args, sample):
        if sample.index % 4 == 1:
            with open({pids!r}, "a") as file:
                file.write(f"{{os.getpid()}} ")
                file.write(f"{{subprocess.Popen(['sleep', '1000']).pid}} ")
            for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                {body}
        return 1.0
"""


@pytest.mark.parametrize(
    "body",
    ["pass", "time.sleep(1000)", "9**9**8"],
    ids=["loop", "sleep", "native-call-that-holds-the-lock"],
)
def test_a_hanging_reward_is_killed_with_its_children(custom, tmp_path, body):
    grader = custom(
        IMMUNE.format(pids=str(tmp_path / "pids"), body=body), rm_timeout_s=3, rm_num_workers=2
    )
    grader.grade([make(0), make(2)])
    start = time.monotonic()
    graded = grader.grade([make(i) for i in range(8)])
    assert time.monotonic() - start < 100
    assert [s.status for s in graded] == [
        SampleStatus.FAILED if i % 4 == 1 else SampleStatus.COMPLETED for i in range(8)
    ]
    assert graded[1].metadata["failure"] == "the reward took longer than --rm-timeout-s 3"
    assert [s.reward for s in graded if s.reward is not None] == [1.0] * 6
    assert grader.last_counts["timeout"] == 2
    hung = pids(tmp_path / "pids")
    assert len(hung) == 4
    wait_until(lambda: not any(map(is_alive, hung)))
    assert [s.reward for s in grader.grade([make(4)])] == [1.0]


def test_close_leaves_no_process(custom):
    grader = custom("def score(args, sample):\n    return 1\n", rm_num_workers=2)
    grader.grade([make(i) for i in range(8)])
    workers = [w.process.pid for w in grader._pool.workers]
    assert workers
    grader.close()
    assert not any(map(is_alive, workers))
    assert grader.grade([make(0)])[0].reward == 1.0


PROGRAM = """
import sys, torch
from slime_like.rewards.grader import Grader
from slime_like.types import Sample
grader = Grader(custom_rm_path=sys.argv[1], rm_timeout_s=100, rm_num_workers=1)
grader.grade([Sample(0, i, torch.tensor([1]), 1, torch.ones(1, dtype=torch.bool)) for i in (1, 2)])
"""


@pytest.mark.parametrize("body", ["pass", "9**9**8"])
def test_workers_die_with_the_program(tmp_path, body):
    file = tmp_path / "reward.py"
    file.write_text(
        textwrap.dedent(IMMUNE.format(pids=str(tmp_path / "pids"), body=body)).replace(
            "subprocess.Popen(['sleep', '1000']).pid", "''"
        )
    )
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, f"{file}:score"], cwd=ROOT)
    try:
        wait_until(lambda: pids(tmp_path / "pids"), 60)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    wait_until(lambda: not any(map(is_alive, pids(tmp_path / "pids"))))


def test_a_program_that_ends_normally_leaves_no_process(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "import os\ndef score(args, sample):\n"
        f"    open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\n    return 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{file}:score"], cwd=ROOT, check=True, timeout=100
    )
    assert len(set(pids(tmp_path / "pids"))) == 1
    assert not any(map(is_alive, pids(tmp_path / "pids")))


def test_an_idle_worker_that_was_killed_is_replaced(custom):
    grader = custom(
        "import os\ndef score(args, sample):\n    return os.getpid()\n",
        rm_num_workers=1,
        max_abs_reward=1e9,
    )
    first = int(grader.grade([make(0)])[0].reward)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    (again,) = grader.grade([make(0)])
    assert again.status == SampleStatus.COMPLETED
    assert int(again.reward) != first


def test_a_worker_that_cannot_start(custom, tmp_path):
    grader = custom(
        f"import os\nif {os.getpid()} != os.getpid():\n    raise OSError('no licence')\n"
        "def score(args, sample):\n    return 1\n"
    )
    with pytest.raises(RuntimeError, match=r"a reward worker cannot start: .*no licence"):
        grader.grade([make(0)])
    grader = custom(
        f"import os\nif {os.getpid()} != os.getpid():\n    os._exit(4)\ndef score(args, sample):\n"
        "    return 1\n"
    )
    with pytest.raises(RuntimeError, match=r"ended before it was ready \(exit code 4\)"):
        grader.grade([make(0)])


@pytest.mark.parametrize(("kills", "started"), [(2, True), (99, False)])
def test_a_worker_that_is_killed_while_it_starts_is_replaced(custom, tmp_path, kills, started):
    """As where memory runs out for a moment; not for ever."""
    count = tmp_path / "starts"
    count.write_text("")
    grader = custom(
        f"import os, signal\nif {os.getpid()} != os.getpid():\n    file = open({str(count)!r}, 'a')\n"
        f"    file.write('x'); file.close()\n"
        f"    if len(open({str(count)!r}).read()) <= {kills}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(args, sample):\n    return 1\n",
        rm_num_workers=1,
    )
    if started:
        assert grader.grade([make(0)])[0].reward == 1.0 and len(count.read_text()) == 3
        return
    with pytest.raises(RuntimeError, match=r"ended before it was ready \(signal 9\)"):
        grader.grade([make(0)])


ASYNC = """
    import asyncio, time
    async def score(args, sample, **kwargs):
        await asyncio.sleep(0.3)
        match sample.metadata.get("do"):
            case "wait": await asyncio.sleep(1000)
            case "block": time.sleep(1000)
            case "raise": raise ValueError("judge is away")
        return sample.index
"""


def test_async_functions_run_together(custom):
    grader = custom(ASYNC, rm_num_workers=1)
    grader.grade([make(0)])
    start = time.monotonic()
    assert [s.reward for s in grader.grade([make(i) for i in range(100)])] == list(range(100))
    assert time.monotonic() - start < 28  # one after the other: 30 s


def test_async_deadline_and_error(custom):
    grader = custom(ASYNC, rm_num_workers=1, rm_timeout_s=6)
    graded = grader.grade(
        [make(0), make(1, metadata={"do": "wait"}), make(2, metadata={"do": "raise"}), make(3)]
    )
    assert [s.reward for s in graded] == [0.0, None, None, 3.0]
    assert "--rm-timeout-s" in graded[1].metadata["failure"]
    assert "judge is away" in graded[2].metadata["failure"]
    assert (grader.last_counts["timeout"], grader.last_counts["raised"]) == (1, 1)


def test_one_sample_that_blocks_the_event_loop_does_not_take_the_others(custom):
    grader = custom(ASYNC, rm_num_workers=1, rm_timeout_s=5.0)
    graded = grader.grade([make(i, metadata={"do": "block"} if i == 2 else {}) for i in range(6)])
    assert [s.reward for s in graded] == [0.0, 1.0, None, 3.0, 4.0, 5.0]
    assert grader.last_counts["timeout"] == 1


def test_async_callable_object(custom):
    grader = custom(
        "class Judge:\n    async def __call__(self, args, sample):\n        return 0.5\n"
        "score = Judge()\n"
    )
    assert grader.grade([make(0)])[0].reward == 0.5


def test_power_tower_in_a_mathematical_answer():
    """Neither the time nor the memory of the machine is at the model's disposal."""
    pytest.importorskip("math_verify")
    with Grader(rm_type="math", rm_timeout_s=10.0, rm_num_workers=1) as grader:
        tower, fine = grader.grade(
            [make(0, "\\boxed{9^{9^{9^{9^9}}}}", "7"), make(1, "\\boxed{7}", "7")]
        )
    assert fine.reward == 1.0
    assert tower.reward in (0.0, None)
