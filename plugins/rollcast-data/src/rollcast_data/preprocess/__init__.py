"""Public data sets turned into files for the datasets; run by ``rollcast preprocess``."""
