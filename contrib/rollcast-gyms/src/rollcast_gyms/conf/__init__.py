"""The recipe of an environment that generates its questions."""
