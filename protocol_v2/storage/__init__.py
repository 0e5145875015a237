"""Storage schema 2: what a stored object is called, what it looks like, and how it is checked before use.

    schema        the number, and what other numbers mean
    errors        what is refused or missed, by type
    names         `xk2/<root>/<key>/w<world>r<rank>g<group>`, formatted and parsed
    objects       a value in memory: identity, tensors, read-only buffers
    envelope      the header that every object carries, byte for byte
    descriptions  one readable file per space, for people and tools

Nothing here does I/O. Tiers (`protocol_v2.tiers`) keep objects; docs/spec/storage-2.md is enough to write
them elsewhere.
"""

# the number
# the envelope
from protocol_v2.storage.envelope import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from protocol_v2.storage.envelope import Header as Header
from protocol_v2.storage.envelope import decode_header as decode_header
from protocol_v2.storage.envelope import encode_header as encode_header
from protocol_v2.storage.envelope import open_object as open_object

# refusals and misses
from protocol_v2.storage.errors import EnvelopeError as EnvelopeError
from protocol_v2.storage.errors import ObjectMissError as ObjectMissError
from protocol_v2.storage.errors import StorageError as StorageError
from protocol_v2.storage.errors import StorageValueError as StorageValueError

# names
from protocol_v2.storage.names import ChunkId as ChunkId
from protocol_v2.storage.names import ObjectId as ObjectId
from protocol_v2.storage.names import ObjectName as ObjectName
from protocol_v2.storage.names import Shard as Shard
from protocol_v2.storage.names import parse_name as parse_name
from protocol_v2.storage.names import schema_of as schema_of

# values
from protocol_v2.storage.objects import StoredObject as StoredObject
from protocol_v2.storage.objects import TensorSpec as TensorSpec
from protocol_v2.storage.objects import stored_object as stored_object
from protocol_v2.storage.schema import STORAGE_SCHEMA as STORAGE_SCHEMA
from protocol_v2.storage.schema import schema_fault as schema_fault
