"""Pure key derivation for KV caches: ``key = hash(tokens, extra_keys)``, key schema 2.

Imports go one way: ``compat -> protocol_v2 -> keying``. This package does no I/O, reads no clock and no environment,
and imports the standard library only; torch and numpy values are accepted by their shape, never imported.

    errors       what is refused, by type
    encoding     the bytes: primitives, domain tags, bounds
    space        KeySpace and its root
    extra_keys   the five extra-key types
    tokens       any container of token ids -> packed u32
    parts        which extra keys touch which chunk
    chunks       keys of a whole prompt, segment keys
    chain        keys of a growing sequence
    preimage     pre-images taken apart again
    engines      from an engine's request and configuration to key inputs (imported by name)
"""

# what a deployment shares
from keying.chain import ChunkKeyChain as ChunkKeyChain
from keying.chain import KeysView as KeysView

# keys
from keying.chunks import ChunkKey as ChunkKey
from keying.chunks import chunk_digests as chunk_digests
from keying.chunks import chunk_keys as chunk_keys
from keying.chunks import segment_key as segment_key
from keying.chunks import segment_keys as segment_keys
from keying.encoding import DIGEST_SIZE as DIGEST_SIZE
from keying.encoding import KEY_SCHEMA as KEY_SCHEMA
from keying.encoding import PartKind as PartKind
from keying.encoding import format_digest as format_digest

# refusals
from keying.errors import DuplicateExtraKeyError as DuplicateExtraKeyError
from keying.errors import ExtraKeyError as ExtraKeyError
from keying.errors import ExtraKeyTypeError as ExtraKeyTypeError
from keying.errors import KeyingError as KeyingError
from keying.errors import KeyingTypeError as KeyingTypeError
from keying.errors import LateExtraKeyError as LateExtraKeyError
from keying.errors import OverlappingEmbedsError as OverlappingEmbedsError
from keying.errors import PreimageError as PreimageError
from keying.errors import SpaceError as SpaceError
from keying.errors import SpaceTypeError as SpaceTypeError
from keying.errors import TokenError as TokenError
from keying.errors import TokenTypeError as TokenTypeError
from keying.errors import UncacheableRequest as UncacheableRequest
from keying.errors import UnsupportedExtraKeyError as UnsupportedExtraKeyError

# what tells two requests with the same tokens apart
from keying.extra_keys import CacheSalt as CacheSalt
from keying.extra_keys import ExtraKey as ExtraKey
from keying.extra_keys import LoraAdapter as LoraAdapter
from keying.extra_keys import MultimodalItem as MultimodalItem
from keying.extra_keys import PromptEmbeds as PromptEmbeds
from keying.extra_keys import Tag as Tag

# pre-images, readable
from keying.preimage import ChunkPreimage as ChunkPreimage
from keying.preimage import EmbedsPart as EmbedsPart
from keying.preimage import LoraPart as LoraPart
from keying.preimage import MultimodalPart as MultimodalPart
from keying.preimage import SaltPart as SaltPart
from keying.preimage import SegmentPreimage as SegmentPreimage
from keying.preimage import TagPart as TagPart
from keying.preimage import UnknownPart as UnknownPart
from keying.preimage import decode_part as decode_part
from keying.preimage import decode_preimage as decode_preimage
from keying.preimage import encode_preimage as encode_preimage
from keying.space import KeySpace as KeySpace
from keying.tokens import pack_tokens as pack_tokens
from keying.tokens import unpack_tokens as unpack_tokens

__all__ = [
    "DIGEST_SIZE",
    "KEY_SCHEMA",
    "CacheSalt",
    "ChunkKey",
    "ChunkKeyChain",
    "ChunkPreimage",
    "DuplicateExtraKeyError",
    "EmbedsPart",
    "ExtraKey",
    "ExtraKeyError",
    "ExtraKeyTypeError",
    "KeySpace",
    "KeyingError",
    "KeyingTypeError",
    "KeysView",
    "LateExtraKeyError",
    "LoraAdapter",
    "LoraPart",
    "MultimodalItem",
    "MultimodalPart",
    "OverlappingEmbedsError",
    "PartKind",
    "PreimageError",
    "PromptEmbeds",
    "SaltPart",
    "SegmentPreimage",
    "SpaceError",
    "SpaceTypeError",
    "Tag",
    "TagPart",
    "TokenError",
    "TokenTypeError",
    "UncacheableRequest",
    "UnknownPart",
    "UnsupportedExtraKeyError",
    "chunk_digests",
    "chunk_keys",
    "decode_part",
    "decode_preimage",
    "encode_preimage",
    "format_digest",
    "pack_tokens",
    "segment_key",
    "segment_keys",
    "unpack_tokens",
]
