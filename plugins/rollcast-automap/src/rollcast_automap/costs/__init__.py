"""Clusters, lengths, and the cost models that price stages."""
