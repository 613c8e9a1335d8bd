"""One op, one file: a public function, its PyTorch reference, its Triton kernel and that kernel's one launcher.

On a CPU, fp32 tensors take a body that numba compiles (_cpu_<op>.py), others the reference. The contract is stated in
AGENTS.md and checked by tests/test_contract.py.
"""
