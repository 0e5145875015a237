"""LMCache's own MP connector for a vLLM engine on CPU; runs in the engine's environment, with LMCache on its path.

vLLM 0.32 looks through all loaded modules once, and trips over llvmlite, which LMCache loads: it is hidden meanwhile.
"""

import sys
from typing import Any

from vllm.triton_utils import dispatcher

_rebind = dispatcher._rebind_kernels


def _rebind_without_llvmlite(*arguments: Any) -> Any:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
    try:
        return _rebind(*arguments)
    finally:
        sys.modules.update(hidden)


dispatcher._rebind_kernels = _rebind_without_llvmlite

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector  # noqa: E402

__all__ = ["LMCacheMPConnector"]
