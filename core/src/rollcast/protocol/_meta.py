"""Rules for merging the meta dicts of batches that are concatenated, such as the results of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch

from rollcast.errors import DataProtoError

__all__ = ["MetaRule", "MetaRules", "merge_metrics", "meta_rules"]

#: A function of a key's differing values, in the order of the members, that returns the value of the joined batch.
MetaRule = Callable[[Sequence[Any]], Any]


class MetaRules:
    """Rules, by meta key, for joining batches whose values of the key differ.

    Equal values are kept without a rule; a key without a rule must be equal in all batches.

    Example::

        meta_rules.register("timing", max)
        with meta_rules.temporarily("metrics", list):
            ...

    Args:
        rules: initial rules.
    """

    def __init__(self, rules: Mapping[str, MetaRule]) -> None:
        self._rules = dict(rules)

    def find(self, key: str) -> MetaRule | None:
        """Return the rule of a key; None if there is none."""
        return self._rules.get(key)

    def register(self, key: str, rule: MetaRule, *, replace: bool = False) -> MetaRule:
        """Register the rule of a key in this process.

        Raises:
            DataProtoError: the key already has a rule and ``replace`` is False, or the rule is not callable.
        """
        if not callable(rule):
            raise DataProtoError(f"the rule of meta_info key {key!r} is called with a list of values; got {rule!r}")
        if key in self._rules and not replace:
            raise DataProtoError(f"meta_info key {key!r} has a rule; pass replace=True to take its place")
        self._rules[key] = rule
        return rule

    def unregister(self, key: str) -> None:
        """Remove the rule of a key; its values must be equal from now on.

        Raises:
            DataProtoError: the key has no rule.
        """
        if key not in self._rules:
            raise DataProtoError(f"meta_info key {key!r} has no rule; there are rules of {sorted(self._rules)}")
        del self._rules[key]

    @contextmanager
    def temporarily(self, key: str, rule: MetaRule | None) -> Iterator[None]:
        """Set the rule of a key inside a ``with`` block; None to remove it."""
        before = self._rules.pop(key, None)
        if rule is not None:
            self.register(key, rule)
        try:
            yield
        finally:
            self._rules.pop(key, None)
            if before is not None:
                self._rules[key] = before


def merge_metrics(values: Sequence[Any]) -> Any:
    """Merge the metrics of several ranks; this is the rule of the meta key ``metrics``.

    Dicts are merged by name. Numbers are averaged, or reduced to the largest or smallest if their name ends in ``max``
    or ``min``; lists are concatenated; the first of other values is kept. All ranks have equal weight, whatever their
    number of rows. A name that only some ranks have is merged over those ranks.
    """
    return _merged("", values)


def _merged(name: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        names = dict.fromkeys(key for value in values for key in value)
        return {key: _merged(str(key), [value[key] for value in values if key in value]) for key in names}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    numbers = [_number(value) for value in values]
    if len(values) == 1 or any(number is None for number in numbers):
        return values[0]
    known = [number for number in numbers if number is not None]
    if name.lower().endswith("max"):
        return max(known)
    return min(known) if name.lower().endswith("min") else sum(known) / len(known)


def _number(value: Any) -> float | None:
    if type(value) is bool:
        return None
    if isinstance(value, Real | np.number):
        return float(value)
    single = isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0
    return float(value) if single else None


#: The merge rules of this process.
meta_rules = MetaRules({"metrics": merge_metrics})
