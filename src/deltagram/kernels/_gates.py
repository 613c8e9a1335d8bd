"""Every choice that a step's number of rows makes, in one place.

Where a kernel gives way to another the bits of a row may change, so each bound stands here with its reason.
"""

FEW_ROWS = 64  # up to here a product is bound by its weight's bytes, and streams them (see _few_rows.py)
