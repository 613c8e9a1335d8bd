"""What may be written of a fault: its type and its place. Its message may quote a prompt."""

import traceback


def describe(error: BaseException) -> str:
    """The stack and the type of an exception, without its message or those of its causes."""
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
