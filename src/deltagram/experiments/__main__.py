"""`python -m deltagram.experiments compare ...` and `... bench serve ...`, for use without the rest of the package."""

from deltagram.experiments.cli import app

app()
