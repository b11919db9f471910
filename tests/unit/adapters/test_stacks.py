"""Stacks of another process, as py-spy and faulthandler tell them."""

from __future__ import annotations

import json

import pytest

from keepstep.adapters import stacks
from keepstep.adapters.stacks import Frame, Thread

SPIED = [
    {
        "thread_name": "MainThread", "os_thread_id": 7,
        "frames": [
            {"name": "wait", "filename": "/usr/lib/python3.12/threading.py", "line": 355},
            {"name": "main", "filename": "/opt/ml/code/train.py", "line": 50},
        ],
    },
    {"thread_name": None, "os_thread_id": 9, "frames": []},
]  # fmt: skip

WRITTEN = """Thread 0x00007f1c (most recent call first):
  File "/opt/ml/code/data.py", line 7 in load

Current thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/opt/ml/code/train.py", line ??? in <module>
"""


def test_what_py_spy_says_is_read():
    main, other = stacks.parse_spy(json.dumps(SPIED))
    assert main.is_main and main.frames[1] == Frame("/opt/ml/code/train.py", 50, "main")
    assert other == Thread("9", False, ())


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', '[{"thread_name": "x"}]', '[{"frames": 1}]'])
def test_what_it_does_not_say_is_no_stack(text):
    with pytest.raises(OSError, match="py-spy's answer"):
        stacks.parse_spy(text)


def test_what_faulthandler_writes_is_read():
    other, main = stacks.parse_faulthandler(WRITTEN)
    assert other == Thread("0x00007f1c", False, (Frame("/opt/ml/code/data.py", 7, "load"),))
    assert main.is_main and main.frames[1] == Frame("/opt/ml/code/train.py", 0, "<module>")
    assert stacks.parse_faulthandler("") == ()


def test_stacks_are_shown_with_the_innermost_call_first():
    shown = stacks.show(stacks.parse_faulthandler(WRITTEN)).splitlines()
    assert shown[2:4] == ["thread 0x00007f2a (main)", "    wait (/usr/lib/python3.12/threading.py:355)"]


def test_a_process_that_is_gone_has_no_state():
    assert stacks.look(2**22 + 1) == stacks.Look("", 0.0)
    assert stacks.kernel_side(2**22 + 1) == ""
