"""Datasets of rollcast: prompts for reinforcement learning, supervised samples, and preprocessing.

Importing this package imports none of its modules:

- :mod:`rollcast_data.contract`: the contracts of datasets and of preprocessors.
- :mod:`rollcast_data.schemas`: the config's ``data`` section.
- :mod:`rollcast_data.files`: rows of JSONL and Parquet files, read and written.
- :mod:`rollcast_data.prompts`, :mod:`.supervised`, :mod:`.conversations`: the three datasets.
- :mod:`rollcast_data.messages`: chat messages, tools and template options of a row.
- :mod:`rollcast_data.loader`: batches in a seeded order that resumes exactly.
- :mod:`rollcast_data.tokenizer`: a Hugging Face tokenizer, checked.
- :mod:`rollcast_data.preprocess`: public data sets turned into files for the datasets.
"""
