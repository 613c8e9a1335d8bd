"""Every choice among kernels that a step's number of rows makes, in one place.

Where a kernel gives way to another the bits of a row may change, so each bound stands here with its reason. FEW_STATES
changes no bits, nor do the two bounds of an exchange between ranks: MOST_TOKENS and MOST_GATHERED in
ngram/exchange_choice.py.
"""

# Up to here a product streams its weight through the kernel in _few_rows.py; with 24 rows the library's products were
# faster on an H200.
FEW_ROWS = 16

# Up to here products on compute capability 9.0 are those of _some_rows.py: its tiles have so many rows of x.
SOME_ROWS = 64

# Up to here the library multiplies a weight with few outputs in parts, where the product adds to a residual
# (_parts.py): so many rows were measured on an H200.
ROWS_IN_PARTS = 96

# Up to here kernels/hyper_mix.py fuses its products with what lies between them. They take 16 rows at a time and read
# all weights for each 16; the library's products read them once, however many rows there are.
FEW_HYPER_ROWS = 64

# Up to here, rows an expert on average, kernels/moe takes tiles of 16 rows, so that little of a tile is padding; above,
# tiles of 64 (32 in fp32), which read an expert's weights fewer times.
FEW_EXPERT_ROWS = 8

# Steps of up to so many sequences store every recurrent state they go on from; those of more, one of several
# (step/history.py). Few states are written while the next weights are read, but whoever finds tokens that no state has
# taken takes them again first, one after the other.
FEW_STATES = 2
