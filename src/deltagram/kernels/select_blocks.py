"""The indexer's choice: the complete blocks of keys that a query attends to.

    score(block) = sum over heads of relu(q_h . key(block)) / sqrt(D)      in fp32

A query at position p sees blocks 0 .. (p + 1) // block_size - 1, those complete at its own position. The `top_k` best
are chosen; of equal scores the lower block number wins.

Shapes: q [T, heads, D]; block_keys [pages, blocks a page, D]; page_table [rows, pages a request], row [N], cu_tokens
[N + 1], length [N], position [T]: int32. Returns int32 [T, top_k], block numbers within the request in no particular
order, -1 where there are fewer. The kernels score in one launch and choose in a second; a query that sees no more
blocks than are chosen is not scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, power_of_two, tl


def select_blocks(
    q: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    position: Tensor,
    block_size: int,
    top_k: int,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _launch, _compiled if block_keys.dtype == torch.float32 else None)
    return body(q, block_keys, page_table, row, cu_tokens, length, position, block_size, top_k)


def _reference(
    q: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    position: Tensor,
    block_size: int,
    top_k: int,
) -> Tensor:
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    a_page = block_keys.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for n in (cu_tokens.diff() > 0).nonzero().squeeze(1).tolist():
        tokens = slice(int(cu_tokens[n]), int(cu_tokens[n + 1]))
        num_blocks = int(length[n]) // block_size
        if num_blocks == 0:
            continue
        pages = page_table[int(row[n]), : -(-num_blocks // a_page)].long()
        keys = block_keys[pages].flatten(0, 1)[:num_blocks].to(dtype)
        score = (q[tokens].to(dtype) @ keys.T).relu_().sum(1) / q.shape[2] ** 0.5  # [n, blocks]
        complete = (position[tokens].long() + 1) // block_size
        score.masked_fill_(
            torch.arange(num_blocks, device=q.device) >= complete[:, None], -1
        )  # relu: real scores are >= 0
        best = score.sort(dim=1, descending=True, stable=True)
        chosen = torch.where(best.values >= 0, best.indices, -1)[:, :top_k].int()
        out[tokens, : chosen.shape[1]] = chosen
    return out


_compiled = on_cpu("select_blocks")


@jit(
    do_not_specialize=["num_sequences", "num_blocks", "pages"],
    do_not_specialize_on_alignment=["row", "cu_tokens", "length"],
)
def _score_kernel(  # type: ignore[no-untyped-def]
    q,
    block_keys,
    page_table,
    row,
    cu_tokens,
    length,
    scores,  # [T, num_blocks]
    num_sequences,
    num_blocks,
    pages,
    q_stride,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    A_PAGE: tl.constexpr,  # blocks a page
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    TOKENS: tl.constexpr,  # a program's tokens, all of one sequence
    BH: tl.constexpr,
    BN: tl.constexpr,  # a program's blocks
    BD: tl.constexpr,
    NB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequence n's tokens take the tiles from cu_tokens[n] // TOKENS + n on; some of the last have none."""
    tile = tl.program_id(0)
    ticks = tl.arange(0, NB)
    begins = tl.load(cu_tokens + ticks, mask=ticks < num_sequences, other=0)
    n = tl.sum(((begins // TOKENS + ticks <= tile) & (ticks < num_sequences)).to(tl.int32)) - 1
    begin = tl.load(cu_tokens + n)
    new = tl.load(cu_tokens + n + 1) - begin
    offset = (tile - begin // TOKENS - n) * TOKENS
    context = tl.load(length + n)
    complete = (context - new + tl.minimum(offset + TOKENS, new)) // BLOCK  # those the last of the tokens sees
    low = tl.program_id(1) * BN
    idle = (offset >= new) | (low >= complete) | (complete <= TOP)
    block = low + tl.arange(0, BN)
    table = page_table + tl.load(row + n).to(tl.int64) * pages
    page = tl.load(table + block // A_PAGE, mask=(block < complete) & (idle == 0), other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if idle:
        return
    d = tl.arange(0, BD)
    rows = tl.arange(0, TOKENS * BH)
    token = offset + rows // BH
    line = q + (begin + token).to(tl.int64) * q_stride + (rows % BH) * D
    real = (token < new) & (rows % BH < H)
    query = tl.load(line[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0)
    at = (page * A_PAGE + block % A_PAGE) * D
    keys = tl.load(block_keys + at[:, None] + d[None, :], mask=(block < complete)[:, None] & (d < D)[None, :], other=0)
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    positive = tl.where(products > 0, products, 0.0)  # never -0.0, whose bits would sort below all others
    score = tl.sum(tl.reshape(positive, [TOKENS, BH, BN]), 1) * scale
    token = offset + tl.arange(0, TOKENS)
    out = scores + (begin + token).to(tl.int64)[:, None] * num_blocks + block[None, :]
    tl.store(out, score, mask=(token < new)[:, None] & (block < complete)[None, :])


@jit(do_not_specialize=["num_sequences", "num_blocks"], do_not_specialize_on_alignment=["position", "cu_tokens"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    scores,
    position,
    cu_tokens,
    out,
    num_sequences,
    num_blocks,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    complete = (tl.load(position + t) + 1) // BLOCK
    complete = tl.where(t < tl.load(cu_tokens + num_sequences), complete, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if complete <= TOP:
        place = tl.arange(0, BT)
        tl.store(out + t * TOP + place, tl.where(place < complete, place, -1), mask=place < TOP)
        return
    block = tl.arange(0, BN)
    score = tl.load(scores + t * num_blocks + block, mask=block < complete, other=0)
    bits = tl.where(block < complete, score.to(tl.int32, bitcast=True), -1)  # of floats from 0 up: in the same order
    least = 0  # of the scores chosen, found from its highest bit down
    for bit in range(30, -1, -1):
        raised = least | (1 << bit)
        least = tl.where(tl.sum((bits >= raised).to(tl.int32)) >= TOP, raised, least)
    above, equal = bits > least, bits == least
    wanted = TOP - tl.sum(above.to(tl.int32))  # of the equal ones: the first
    upto = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 0)
    rank = upto % 65536
    chosen = above | (equal & (rank <= wanted))
    tl.store(out + t * TOP + upto // 65536 + tl.minimum(rank, wanted) - 1, block, mask=chosen)


def _launch(
    q: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    position: Tensor,
    block_size: int,
    top_k: int,
) -> Tensor:
    num_rows, heads, size = q.shape
    num_sequences, pages, a_page = len(row), page_table.shape[1], block_keys.shape[1]
    num_blocks = pages * a_page
    assert q.stride()[1:] == (size, 1) and block_keys.is_contiguous() and page_table.is_contiguous()
    assert num_blocks < 65536, "ranks share a word"
    sizes = _sizes(q.dtype == torch.float32, heads, size, num_sequences)
    scores = q.new_empty((num_rows, num_blocks), dtype=torch.float32)
    out = torch.empty((num_rows, top_k), dtype=torch.int32, device=q.device)
    grid = (num_rows // sizes["TOKENS"] + num_sequences, -(-num_blocks // sizes["BN"]))
    pdl = dependent_launch(q)
    if num_blocks > top_k:
        _score_kernel[grid](
            q, block_keys, page_table, row, cu_tokens, length, scores, num_sequences, num_blocks, pages, q.stride(0),
            size**-0.5, H=heads, D=size, A_PAGE=a_page, BLOCK=block_size, TOP=top_k, **sizes, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip
    wide = power_of_two(num_blocks)
    _choose_kernel[(num_rows,)](
        scores, position, cu_tokens, out, num_sequences, num_blocks, BLOCK=block_size, TOP=top_k,
        BT=power_of_two(top_k), BN=wide, PDL=pdl, num_warps=4 if wide <= 2048 else 8 if wide <= 8192 else 16,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def _sizes(full: bool, heads: int, size: int, num_sequences: int) -> dict[str, int]:
    """`full`: fp32 inputs, whose products no tensor core takes."""
    rows, columns = power_of_two(heads), power_of_two(size, 16)
    tile = {"TOKENS": max(1, (16 if full else 64) // rows), "BH": rows, "BD": columns}
    return tile | {
        "BN": 32 if full else 128 if columns <= 128 else 64,
        "NB": 32 if num_sequences <= 32 else power_of_two(num_sequences, 256),
    }


def ahead_of_time() -> list[Build]:
    sizes = ("num_sequences", "num_blocks", "pages", "q_stride")
    indices = ("page_table", "row", "cu_tokens", "length", "position", "out")
    types = dict.fromkeys(sizes, "i32") | dict.fromkeys(indices, "*i32") | {"scores": "*fp32", "scale": "fp32"}
    builds = []
    for dtype, heads, size, block_size, top_k in (("*bf16", 4, 128, 16, 128), ("*fp32", 3, 80, 12, 5)):
        constants = {"H": heads, "D": size, "A_PAGE": 4, "BLOCK": block_size, "TOP": top_k}
        constants |= _sizes(dtype == "*fp32", heads, size, 1)
        builds.append(Build(_score_kernel, types | {"q": dtype, "block_keys": dtype}, constants))
        constants = {"BLOCK": block_size, "TOP": top_k, "BT": power_of_two(top_k), "BN": 8192}
        builds.append(Build(_choose_kernel, types, constants, {"num_warps": 8}))
    return builds
