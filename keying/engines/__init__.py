"""From an engine's request and configuration to key inputs, by duck typing: no engine is imported.

These functions are the only place in which an engine's attribute names appear. They fail closed: an attribute that an
engine is known to have and does not have, and an identity that is missing, empty or malformed, is `UncacheableRequest`
with an `UncacheableReason`, never a key without the identity.

    reasons         why a request is uncacheable, one word a kind
    reading         attributes, and what every engine's function gives
    adapters        an adapter's name, revision and start
    tensors         embedding rows as bytes
    configuration   configuration values as canonical text
    vllm, sglang, tensorrt_llm
                    one engine each: key inputs from its request
    vllm_space, sglang_space, tensorrt_llm_space
                    and the space from its configuration
    vllm_blocks     what vLLM itself would put on its blocks

Source: docs/engines.md, docs/spec/key-schema-2.md §13.
"""

# adapters
from keying.engines.adapters import AdapterRevision as AdapterRevision
from keying.engines.adapters import AdapterSource as AdapterSource
from keying.engines.adapters import AdapterSpan as AdapterSpan
from keying.engines.adapters import AdapterStart as AdapterStart
from keying.engines.adapters import ImpliedAdapters as ImpliedAdapters
from keying.engines.adapters import invocation_start as invocation_start

# requests and spaces, an engine each
from keying.engines.reading import EngineInputs as EngineInputs
from keying.engines.reasons import UncacheableReason as UncacheableReason
from keying.engines.sglang import from_sglang as from_sglang
from keying.engines.sglang_space import space_from_sglang as space_from_sglang
from keying.engines.tensorrt_llm import from_tensorrt_llm as from_tensorrt_llm
from keying.engines.tensorrt_llm_space import space_from_tensorrt_llm as space_from_tensorrt_llm
from keying.engines.vllm import from_vllm as from_vllm
from keying.engines.vllm import vllm_extra_keys as vllm_extra_keys
from keying.engines.vllm import vllm_tokens as vllm_tokens
from keying.engines.vllm_blocks import to_vllm_event_extra_keys as to_vllm_event_extra_keys
from keying.engines.vllm_blocks import to_vllm_extra_keys as to_vllm_extra_keys
from keying.engines.vllm_space import space_from_vllm as space_from_vllm

__all__ = [
    "AdapterRevision",
    "AdapterSource",
    "AdapterSpan",
    "AdapterStart",
    "EngineInputs",
    "ImpliedAdapters",
    "UncacheableReason",
    "from_sglang",
    "from_tensorrt_llm",
    "from_vllm",
    "invocation_start",
    "space_from_sglang",
    "space_from_tensorrt_llm",
    "space_from_vllm",
    "to_vllm_event_extra_keys",
    "to_vllm_extra_keys",
    "vllm_extra_keys",
    "vllm_tokens",
]
