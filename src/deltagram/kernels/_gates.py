"""Every choice that a step's number of rows makes, in one place.

Where a kernel gives way to another the bits of a row may change, so each bound stands here with its reason.
"""

# Up to here a product streams its weight through the kernel in _few_rows.py, which takes 16 rows at a time. With 48
# rows the library's products were as fast on an H200, or faster.
FEW_ROWS = 16
