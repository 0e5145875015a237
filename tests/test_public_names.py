"""The public surface of each package, pinned: a change of it is a visible diff of this file."""

import importlib

import pytest

PUBLIC = {
    "keying": """
        DIGEST_SIZE KEY_SCHEMA CacheSalt ChunkKey ChunkKeyChain ChunkPreimage DuplicateExtraKeyError EmbedsPart ExtraKey
        ExtraKeyError ExtraKeyTypeError KeySpace KeyingError KeyingTypeError KeysView LateExtraKeyError LoraAdapter
        LoraPart MultimodalItem MultimodalPart OverlappingEmbedsError PartKind PreimageError PromptEmbeds SaltPart
        SegmentPreimage SpaceError SpaceTypeError Tag TagPart TokenError TokenTypeError UncacheableRequest UnknownPart
        UnsupportedExtraKeyError chunk_digests chunk_keys decode_part decode_preimage encode_preimage format_digest
        pack_tokens segment_key unpack_tokens
    """,
    "protocol_v2": """
        Agreement AsyncCacheClient CacheClient CacheServer ClearResult ClientClosedError ClientConnection
        ClientTerms Code Connection Disagreement EndSessionResult ErrorCode HandshakeError Keys Limits
        LocalProtocolError LocalTypeError LookupResult MissReason NegotiationRefusedError Offer Patience Phase
        PrefetchResult ProbeReport ProtocolError QueueFullError RefusalCode ReleaseResult RemoteProtocolError
        RequestTimeoutError RetrieveResult RetrievedChunk ServerConnection ServerError ServerTerms
        ServerUnavailableError SessionLostError Shard SpaceMismatchError State StoreResult TensorError Tunnel
        UnsupportedServerError answer_hello keys_of_digests keys_of_tokens negotiate probe
    """,
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_exactly_these(package: str) -> None:
    """`__all__` is this list, every name exists and has a docstring."""
    module = importlib.import_module(package)
    assert sorted(PUBLIC[package].split()) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(value, "__doc__", None), name
