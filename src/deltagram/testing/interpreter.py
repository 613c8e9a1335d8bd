"""Triton's interpreter, as scripts need it that run kernels without a GPU to check masks and indices."""

from typing import Any

import triton.runtime.interpreter as interpreter


def take_one_element_as_index() -> None:
    """NumPy 2.4 no longer turns an array of one element into an index by itself, which Triton 3.6 counts on."""
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
