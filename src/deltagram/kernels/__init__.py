"""One op, one file: a public function, its PyTorch reference, its Triton kernel and that kernel's one launcher.

CPU tensors take the reference, which is the CPU production path. The contract is stated in AGENTS.md and checked by
tests/test_contract.py.
"""
