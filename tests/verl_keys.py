"""The tables of keys in docs/coming-from-verl.md; ``python tests/verl_keys.py`` writes them from rollcast-verl."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from rollcast_verl.keys import RULES, Rule

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-verl.md"
_BLOCK = re.compile(r"(?<=<!-- verl-keys -->\n).*?(?=<!-- end -->)", re.DOTALL)
_TITLES = {
    "actor_rollout_ref.actor": "Actor",
    "actor_rollout_ref.rollout": "Rollout",
    "actor_rollout_ref.model": "Model",
    "actor_rollout_ref.ref": "Reference",
    "critic": "Critic",
    "data": "Data",
    "algorithm": "Algorithm",
    "reward": "Reward",
    "trainer": "Trainer",
    "": "Others",
}


def section(rule: Rule) -> str:
    """Return the section of a rule's key."""
    key = rule.theirs.replace("custom_reward_function", "reward").replace("reward_model", "reward")
    return next(name for name in _TITLES if not name or key == name or key.startswith(f"{name}."))


def render() -> str:
    """Return the tables: keys with a counterpart, and below each table the reasons of those without."""
    order = list(_TITLES)
    parts = []
    for name, found in groupby(sorted(RULES, key=lambda rule: order.index(section(rule))), section):
        rules = list(found)
        parts.append(f"### {_TITLES[name]}\n\n| verl | rollcast | |\n|---|---|---|\n")
        parts += [f"| `{rule.theirs}` | `{rule.ours}` | {rule.note} |\n" for rule in rules if rule.ours]
        reasons: dict[str, list[str]] = {}
        for rule in rules:
            if not rule.ours:
                reasons.setdefault(rule.note, []).append(f"`{rule.theirs.removeprefix(f'{name}.')}`")
        if reasons:
            prefix = f", below `{name}`" if name else ""
            parts.append(f"\n| no counterpart{prefix} | why |\n|---|---|\n")
            parts += [f"| {', '.join(keys)} | {note} |\n" for note, keys in reasons.items()]
        parts.append("\n")
    return "".join(parts)


def replaced(page: str) -> str:
    """Return the page with its tables as the code has them."""
    return _BLOCK.sub(lambda _: render(), page)


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(replaced(PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(main())
