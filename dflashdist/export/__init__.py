"""Folders that serve: a drafter's weights, its config.json and a model card."""

FORMATS = ("hf", "speculators")
DTYPES = ("bfloat16", "float16", "float32")
