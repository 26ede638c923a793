"""Environments of textarena, gem, reasoning-gym and verifiers for agents."""
