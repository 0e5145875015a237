"""Lets the torchvision of the package index be imported beside a torch without CUDA, in every process of the engine.

Its compiled operators link CUDA libraries and do not load; its Python part then fails at import, since it gives two of
them a fake implementation and they are not defined. They are defined here, as the first import of torchvision begins.
Image transforms, which is all that vLLM's processors use, work without them.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class OperatorsBeforeTorchvision:
    """A finder that finds nothing: it acts when torchvision is looked for, once."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Define the operators if it is torchvision that is looked for, and leave the search to the others."""
        del path, target
        if name == "torchvision":
            sys.meta_path.remove(cls)
            from torch import library, version

            if version.cuda is None:
                for operator in ("nms", "qnms"):
                    library.define(f"torchvision::{operator}", SIGNATURE)
        return None


sys.meta_path.insert(0, OperatorsBeforeTorchvision)
