from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rollcast_trainer.workers.heap import freeze_heap, frozen_heap, unfreeze_heap


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    unfreeze_heap()
    yield
    unfreeze_heap()


def test_what_was_there_is_left_alone_and_what_comes_is_collected() -> None:
    before = Node()
    old = weakref.ref(before)
    with frozen_heap():
        del before
        inside = Node()
        new = weakref.ref(inside)
        del inside
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_garbage_from_before_goes_first() -> None:
    node = weakref.ref(Node())
    with frozen_heap():
        assert node() is None


def test_an_error_unfreezes() -> None:
    with pytest.raises(KeyError), frozen_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_a_heap_that_was_frozen_stays_frozen() -> None:
    freeze_heap()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0
