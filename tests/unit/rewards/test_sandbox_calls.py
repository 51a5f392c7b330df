"""Tests of programs: what honest ones may use, and that no program writes its own verdict."""

from __future__ import annotations

import functools

import pytest

from slime_like.rewards import sandbox
from slime_like.rewards.sandbox import SandboxLimits

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
run = functools.partial(sandbox.run, limits=SandboxLimits(wall_s=60))

# program, statements that pass
HONEST = {
    "numbers": (
        "def f(x): return x + 1",
        "assert f(1) == 2 and f(0.5) == 1.5 and f(10**30) == 10**30 + 1",
    ),
    "containers": (
        "def f(x): return {'a': [x, (1, 2)], 'b': {x}, 3: None, (1,): b'x'}",
        "assert f(7) == {'a': [7, (1, 2)], 'b': {7}, 3: None, (1,): b'x'} and type(f(7)['a'][1]) is tuple",
    ),
    "odd numbers": (
        "def f(): return [float('inf'), 1j, 1e300]",
        "import math\nassert f()[0] == math.inf and f()[1:] == [1j, 1e300]",
    ),
    "library values": (
        "from collections import Counter, deque, OrderedDict, namedtuple\nfrom fractions import Fraction\n"
        "from decimal import Decimal\nimport datetime\nP = namedtuple('P', 'x y')\n"
        "def f(): return [Counter('aab'), deque([1]), OrderedDict(a=1), P(1, 2), Fraction(1, 3), "
        "Decimal('0.1'), datetime.date(2024, 1, 2)]",
        "from collections import deque\nfrom fractions import Fraction\nimport datetime, decimal\n"
        "assert f() == [{'a': 2, 'b': 1}, deque([1]), {'a': 1}, (1, 2), Fraction(1, 3), "
        "decimal.Decimal('0.1'), datetime.date(2024, 1, 2)]",
    ),
    "a class": (
        "class Stack:\n    size = 0\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, i): return self.items[i]\n    def __repr__(self): return f'Stack({self.items})'",
        "s = Stack()\ns.push(1); s.push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s[0] == 1\n"
        "assert str(s) == 'Stack([1, 2])' and 2 in s and s.pop() == 2 and s.items == [1]\n"
        "assert isinstance(s, Stack) and not isinstance(1, Stack) and s\ns.size = 5\nassert s.size == 5",
    ),
    "leetcode": (
        "from typing import List\nclass Solution:\n    def two(self, a: List[int], t: int) -> List[int]:\n"
        "        return [[i, j] for i in range(len(a)) for j in range(i) if a[i] + a[j] == t][0][::-1]",
        "assert Solution().two([2, 7, 11], 9) == [0, 1]",
    ),
    "objects of objects": (
        "class Node:\n    def __init__(self, v, n=None): self.v, self.next = v, n\n"
        "    def __eq__(self, o): return self.v == o.v\n"
        "def rev(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p",
        "n = rev(Node(1, Node(2, Node(3))))\nassert [n.v, n.next.v, n.next.next.v] == [3, 2, 1]\n"
        "assert Node(1) == Node(1) and Node(1) != Node(2) and n.next.next.next is None",
    ),
    "in place": (
        "def f(a, d, s): a.sort(); a.append(9); d['x'] = 1; s.add(3)",
        "a, d, s = [3, 1], {}, {1}\nassert f(a, d, s=s) is None and (a, d, s) == ([1, 3, 9], {'x': 1}, {1, 3})",
    ),
    "callbacks": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef twice(f): return lambda x: f(f(x))",
        "seen = []\nassert apply(lambda x: x * x, [1, 2]) == [1, 4] and apply(seen.append, [5]) == [None]\n"
        "assert seen == [5] and twice(lambda x: x + 1)(1) == 3",
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0",
    ),
    "exceptions": (
        "class Empty(ValueError): pass\ndef f(x):\n    if x < 0: raise ValueError('negative')\n    raise Empty('none')",
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative'\nelse:\n    assert False\n"
        "try:\n    f(1)\nexcept Empty as e:\n    assert str(e) == 'none'\nelse:\n    assert False",
    ),
    "printing": (
        "def f(x): print('got', x)",
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f(3)\n"
        "assert out.getvalue() == 'got 3\\n'",
    ),
    "its imports and data": (
        "import math\nLIMIT = 5\nTABLE = {1: 'a'}\ndef area(r): return math.pi * r * r",
        "assert abs(area(1) - math.pi) < 1e-9 and LIMIT == 5 and TABLE[1] == 'a'",
    ),
    "a built-in name": ("def sum(xs): return -1", "assert sum([1, 2]) == -1"),
    "a check function": (
        "def add(a, b): return a + b",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\ncheck(add)",
    ),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __eq__(self, o): return self.x == o.x",
        "assert V(1) + V(2) == V(3) and V(1) < V(2) and max([V(1), V(3)]).x == 3",
    ),
    "a context": (
        "class C:\n    def __enter__(self): self.n = 1; return self\n    def __exit__(self, *e): self.n = 2",
        "c = C()\nwith c as d:\n    assert d.n == 1\nassert c.n == 2",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name: str) -> None:
    program, check = HONEST[name]
    outcome = run(program, check=check)
    assert outcome.status == "ok", outcome.stderr


@pytest.mark.parametrize("name", HONEST)
def test_and_fails_where_it_is_wrong(name: str) -> None:
    program, check = HONEST[name]
    assert run(program, check=check + "\nassert False").status == "error"
    assert run("x = 1", check=check).status == "error"


TEST = "assert f(2) == 4\nassert f(3) == 9"
ALWAYS = (
    "class Always:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "    def __ne__(self, other): return False\n    def __lt__(self, other): return True\n"
    "    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0\n"
    "    def __contains__(self, other): return True\n"
    "def f(x): return Always()\n"
)
# programs that do not compute what is asked, with the statements that they attack
FORGERS = {
    "equal to everything": (ALWAYS, TEST),
    "less than everything": (ALWAYS, "assert f(2) < 5"),
    "near everything": (ALWAYS, "assert abs(f(2) - 4) < 1e-9"),
    "holds everything": (ALWAYS, "assert 4 in f(2)"),
    "inside a list": (ALWAYS, "assert f(2) in [4]"),
    "an int that is equal to everything": (
        "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(x): return I(0)",
        TEST,
    ),
    "a text that is equal to everything": (
        "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return S('')",
        "assert f(2) == 'four'",
    ),
    "exit": ("def f(x): raise SystemExit(0)", TEST),
    "exit of the process": ("import os\ndef f(x): os._exit(0)", TEST),
    "exit at the start": ("import os; os._exit(0)", TEST),
    "no assertions": ("import builtins\nbuiltins.AssertionError = type('N', (BaseException,), {})\ndef f(x): return 0", TEST),
    "other built-ins": ("abs = lambda x: 0\nall = any = lambda x: True\ndef f(x): return 1", "assert abs(f(2) - 4) < 1e-9"),
    "other modules": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 1",
        "assert math.isclose(f(2), 4)",
    ),
    "the stack": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in list(frame.f_locals.values()):\n"
        "            if isinstance(v, dict) and 'check' in v: v['check'] = ''\n        frame = frame.f_back\n    return 0",
        TEST,
    ),
    "the garbage collector": (
        "import gc, os, sys\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'proof' in o:\n"
        "            sys.stdout.write(o['proof']); sys.stdout.flush(); os._exit(0)\n    return 0",
        TEST,
    ),
    "every descriptor": (
        "import os, struct, json\ndef f(x):\n    for fd in range(3, 64):\n        for text in (b'E' + struct.pack('<H', 4) + bytes(4), b'{}'):\n"
        "            try: os.write(fd, text)\n            except OSError: pass\n    os._exit(0)",
        TEST,
    ),
    "a reply of its own": (
        "import os, struct, json\ndef f(x):\n    for fd in range(3, 64):\n        body = json.dumps(['value', {'yours': 0}, [], '']).encode()\n"
        "        try: os.write(fd, struct.pack('<Q', len(body)) + body)\n        except OSError: pass\n    return 0",
        TEST,
    ),
    "another exception class": ("class AssertionError(Exception): pass\ndef f(x): return 0", TEST),
    "a text without an end": ("def f(x): return 'x' * (2 ** 28)", TEST),
    "a list in a list in a list": ("def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a", TEST),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERS)
def test_no_program_writes_its_own_verdict(name: str) -> None:
    program, check = FORGERS[name]
    outcome = run(program, check=check)
    assert outcome.status in ("error", "killed", "output"), outcome
    assert run("x = 1\ndef f(y): return y * y", check="assert f(2) == 4").status == "ok"


def test_a_program_sees_nothing_of_its_test() -> None:
    """Not in its memory, and not in what it is asked."""
    program = (
        "import gc\ndef f(x):\n    word = ''.join(map(chr, (122, 113, 122, 113)))\n"
        "    found = [o for o in gc.get_objects() if word in str(o)[:10**6]]\n"
        "    raise RuntimeError(f'saw {len(found)}')"
    )
    check = "try:\n    f(2)\nexcept RuntimeError as e:\n    assert str(e) == 'saw 0', e\n'zqzq'"
    outcome = run(program, check=check)
    assert outcome.status == "ok", outcome.stderr


def test_a_program_that_waits_is_ended_with_its_test() -> None:
    outcome = sandbox.run(
        "import time\ndef f(x): time.sleep(100)", check=TEST, limits=SandboxLimits(wall_s=0.7)
    )
    assert outcome.status == "timeout" and outcome.seconds < 60
    assert run("def f(x): return x * x", check=TEST).status == "ok"
