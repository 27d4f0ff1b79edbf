"""`once.py`: what one process of a run has made, the others read."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.once import Once

pytest.importorskip("fcntl")


def test_a_value_is_made_once_for_all_who_ask(tmp_path):
    made = []

    def make() -> int:
        made.append("value")
        return len(made)

    def ask(_: int) -> int:
        return Once(tmp_path)("value", make)  # with a lock of its own, as a process has

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(8))] == [1] * 8
    assert made == ["value"]


def test_what_fails_is_tried_again(tmp_path):
    once = Once(tmp_path)
    with pytest.raises(ZeroDivisionError):
        once("value", lambda: 1 // 0)
    assert once("value", lambda: 2) == 2 == once("value", lambda: 3)
