"""The formats of LMCache 0.5.x, one module each: read and produced exactly, never extended.

    surrogates       31-bit values that stand for a multimodal item
    chunk_hashes     the two chunk-hash chains
    generations      what a v1 producer hashed: raw, int16, sha31
    operations       the operations of the wire: numbers, payloads, answers
    wire             their frames, both directions
    closed_pickle    a reader of pickles that calls nothing
    pickled_tensors  lists of tensors as LMCache's clients pickle them, read and written
    storage_names    names on disk, in Redis and Valkey, in buckets: recognised or not, never adopted

Nothing here warns: these are definitions, used by the front, the audit and the tests. The entry points that callers of
LMCache know are in `compat` itself, and they do. Source: docs/spec/v1-formats.md.
"""

from compat.v1.chunk_hashes import NONE_HASH as NONE_HASH
from compat.v1.chunk_hashes import VLLM_NONE_HASH_SEED as VLLM_NONE_HASH_SEED
from compat.v1.chunk_hashes import in_process_chunk_hash as in_process_chunk_hash
from compat.v1.chunk_hashes import in_process_chunk_hashes as in_process_chunk_hashes
from compat.v1.chunk_hashes import mp_chunk_hashes as mp_chunk_hashes
from compat.v1.chunk_hashes import vllm_none_hash as vllm_none_hash
from compat.v1.generations import V1Generation as V1Generation
from compat.v1.generations import v1_chunk_hashes as v1_chunk_hashes
from compat.v1.generations import v1_token_ids as v1_token_ids
from compat.v1.storage_names import AmbiguousName as AmbiguousName
from compat.v1.storage_names import NameFormat as NameFormat
from compat.v1.storage_names import StoreKind as StoreKind
from compat.v1.storage_names import V1Name as V1Name
from compat.v1.storage_names import recognise as recognise
from compat.v1.surrogates import SURROGATE_MAX as SURROGATE_MAX
from compat.v1.surrogates import surrogate_values as surrogate_values

__all__ = [
    "NONE_HASH",
    "SURROGATE_MAX",
    "VLLM_NONE_HASH_SEED",
    "AmbiguousName",
    "NameFormat",
    "StoreKind",
    "V1Generation",
    "V1Name",
    "in_process_chunk_hash",
    "in_process_chunk_hashes",
    "mp_chunk_hashes",
    "recognise",
    "surrogate_values",
    "v1_chunk_hashes",
    "v1_token_ids",
    "vllm_none_hash",
]
