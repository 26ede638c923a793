"""Batches: columns, sizes, mini-batches and their balance over ranks."""
