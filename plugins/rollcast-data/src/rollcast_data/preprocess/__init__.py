"""Preprocessors that convert public data sets into files; run by ``rollcast preprocess``."""
