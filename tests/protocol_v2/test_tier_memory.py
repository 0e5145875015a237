"""The memory tier."""

from __future__ import annotations

import pytest

from protocol_v2.codes import MissReason
from protocol_v2.storage import ObjectMissError, Shard
from protocol_v2.storage.objects import OBJECT_OVERHEAD
from protocol_v2.tiers import MemoryTier, Tier, TierFullError, TierUsage
from tests.protocol_v2.storage_samples import ROOT, chain, make_object

KEYS = chain("memory", 4)
COST = 64 + OBJECT_OVERHEAD


def test_it_is_a_tier() -> None:
    """The memory tier has every call that a tier has."""
    tier: Tier = MemoryTier(COST)
    assert "memory" == tier.name
    assert TierUsage(0, 0) == tier.usage()
    assert [] == list(tier.names())


def test_objects_come_and_go() -> None:
    """What was put is got, the very object; what was not, or was deleted, is absent."""
    tier = MemoryTier(10 * COST)
    obj = make_object(KEYS, 0)
    tier.put(obj)
    assert obj is tier.get(obj.id)
    assert tier.contains(obj.id)
    assert [obj.id.name] == list(tier.names())
    assert TierUsage(1, COST) == tier.usage()
    other = make_object(KEYS, 0, shard=Shard(2, 1, 0)).id
    assert not tier.contains(other)
    with pytest.raises(ObjectMissError) as caught:
        tier.get(other)
    assert MissReason.ABSENT is caught.value.reason
    assert tier.delete(obj.id)
    assert not tier.delete(obj.id)
    assert TierUsage(0, 0) == tier.usage()


def test_a_replacement_is_charged_once() -> None:
    """P5: putting an identity again replaces the object and its charge."""
    tier = MemoryTier(10 * COST)
    tier.put(make_object(KEYS, 0, size=64))
    larger = make_object(KEYS, 0, size=1000)
    tier.put(larger)
    assert larger is tier.get(larger.id)
    assert TierUsage(1, larger.charge) == tier.usage()


def test_evicted_chunks_are_told() -> None:
    """Whoever keeps an index hears of each chunk that goes for want of room, suffix first."""
    gone: list[bytes] = []
    tier = MemoryTier(2 * COST, evicted=lambda resident: gone.append(resident.id[1]))
    for index in range(2):
        tier.put(make_object(KEYS, index))
    tier.put(make_object(chain("other", 1), 0))
    assert [KEYS[1]] == gone
    assert 1 == tier.residency.evicted


def test_leased_chunks_and_too_large_objects_are_refused_room() -> None:
    """What does not fit, or would need the room of leased chunks, is a typed error that changes nothing."""
    tier = MemoryTier(2 * COST, protected=lambda chunk: chunk == (ROOT, KEYS[0]))
    tier.put(make_object(KEYS, 0))
    for wrong in (make_object(KEYS, 1, size=2 * COST), make_object(KEYS, 1, size=COST)):
        with pytest.raises(TierFullError):
            tier.put(wrong)
    assert TierUsage(1, COST) == tier.usage()
    tier.put(make_object(KEYS, 1))
    assert 2 == tier.usage().objects


def test_empty_objects_are_bounded_too() -> None:
    """R: objects without a byte of payload cost an overhead, so a budget bounds their number."""
    tier = MemoryTier(3 * OBJECT_OVERHEAD)
    for key in chain("empty", 10):
        tier.put(make_object([key], 0, size=0, parent=bytes(32)))
    assert TierUsage(3, 3 * OBJECT_OVERHEAD) == tier.usage()


def test_what_a_reader_has_outlives_eviction() -> None:
    """J9: a buffer that was handed out keeps its bytes whatever is evicted meanwhile."""
    tier = MemoryTier(COST)
    tier.put(make_object(KEYS, 0))
    view = tier.get(make_object(KEYS, 0).id).buffers[0]
    before = bytes(view)
    tier.put(make_object(chain("other", 1), 0))
    assert before == bytes(view)
    with pytest.raises(TypeError):
        view[0] = 0
