"""Roles and the workers that play them."""
