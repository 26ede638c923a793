"""The environment ``my_plugin``: a shop in which the model has to spend its budget to the last coin."""

from typing import Any

PRICES = {"apple": 2, "bread": 3, "cheese": 5}


class MyPlugin:
    """A shop; every public method but ``reset`` and ``get_reward`` is a tool of the model."""

    def reset(self, budget: int, **task: Any) -> str:
        """Begin an episode and return its prompt. Arguments are columns of the dataset's row."""
        self.left = budget
        return f"Spend exactly {budget} coins. Prices: {PRICES}."

    def buy(self, item: str) -> str:
        """Buy one item.

        Args:
            item: Name of the item.
        """
        price = PRICES.get(item)
        if price is None:
            return f"There is no {item}. There are: {', '.join(PRICES)}."
        if price > self.left:
            return f"{item} costs {price} coins; you have {self.left}."
        self.left -= price
        return f"You have {self.left} coins left."

    def get_reward(self) -> float:
        """Return the reward of the whole episode."""
        return float(self.left == 0)
