"""The public surface of each package, pinned: a change of it is a visible diff of this file."""

import importlib
import inspect

import pytest

PUBLIC = {
    "keying": """
        DIGEST_SIZE KEY_SCHEMA CacheSalt ChunkKey ChunkKeyChain ChunkPreimage DuplicateExtraKeyError EmbedsPart
        ExtraKey ExtraKeyError ExtraKeyTypeError KeySpace KeyingError KeyingTypeError KeysView LateExtraKeyError
        LoraAdapter LoraPart MultimodalItem MultimodalPart OverlappingEmbedsError PartKind PreimageError
        PromptEmbeds SaltPart SegmentPreimage SpaceError SpaceTypeError Tag TagPart TokenError TokenTypeError
        UncacheableRequest UnknownPart UnsupportedExtraKeyError chunk_digests chunk_keys decode_part decode_preimage
        encode_preimage format_digest pack_tokens segment_key segment_keys unpack_tokens
    """,
    "keying.engines": """
        AdapterRevision AdapterSource AdapterSpan AdapterStart EngineInputs ImpliedAdapters UncacheableReason
        from_sglang from_tensorrt_llm from_vllm invocation_start space_from_sglang space_from_tensorrt_llm
        space_from_vllm to_vllm_event_extra_keys to_vllm_extra_keys vllm_extra_keys vllm_tokens
    """,
    "protocol_v2": """
        Agreement AsyncCacheClient CacheClient CacheServer ChunkRemoved ChunkStored ChunkView ChunksHeld
        ClearResult ClientClosedError ClientConnection ClientTerms Code Connection Disagreement EndSessionResult
        ErrorCode EventError EventSubscriber HandshakeError Keys Limits LocalProtocolError LocalTypeError
        LookupResult Lost MissReason NegotiationRefusedError Offer Patience Phase PrefetchResult ProbeReport
        ProtocolError QueueFullError RefusalCode ReleaseResult RemoteProtocolError RequestTimeoutError Restarted
        RetrieveResult RetrievedChunk ServerConnection ServerError ServerTerms ServerUnavailableError
        SessionLostError Shard SpaceCleared SpaceDescribed SpaceMismatchError State StoreResult TensorError
        TensorMeta Tunnel UnsupportedServerError answer_hello keys_of_digests keys_of_tokens negotiate probe to_numpy
    """,
    "compat": """
        REMOVALS ChunkedTokenDatabase CompatError CompatTypeError Deprecation ExtraKeysDeprecationWarning
        SegmentTokenDatabase SpanError SpanHazardWarning SpanTypeError TokenDatabaseKey TunnelPolicy V1Front
        apply_mm_hashes_to_token_ids bypass deprecation_of mm_hash_to_token_values refuse tunnel_tokens
    """,
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_exactly_these(package: str) -> None:
    """`__all__` is this list; every name of it exists, and every class and function says what it is."""
    module = importlib.import_module(package)
    assert sorted(PUBLIC[package].split()) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
