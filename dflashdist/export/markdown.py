"""Markdown that the parts of a model card share."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table with this head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
