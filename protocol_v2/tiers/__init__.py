"""Tiers: where stored objects are kept.

    base        what a tier is, and how one fails
    residency   which chunks a tier has, what they cost, and which goes first
    memory      objects in this process
    disk        objects as files
    layout      what stands where in a disk tier's folder
    files       atomic writes, whole reads, typed errors
    scan        what a folder holds, when a server starts
    quarantine  where broken and foreign files go
    ownership   one live server for a folder

Policy (budgets, leases, recency) lives on the loop, in `Residency`; blocking I/O lives in `disk`, driven from an
executor.
"""

from protocol_v2.tiers.base import FolderInUseError as FolderInUseError
from protocol_v2.tiers.base import Tier as Tier
from protocol_v2.tiers.base import TierError as TierError
from protocol_v2.tiers.base import TierFullError as TierFullError
from protocol_v2.tiers.base import TierIOError as TierIOError
from protocol_v2.tiers.base import TierReadOnlyError as TierReadOnlyError
from protocol_v2.tiers.base import TierUsage as TierUsage
from protocol_v2.tiers.disk import DiskTier as DiskTier
from protocol_v2.tiers.files import Fsync as Fsync
from protocol_v2.tiers.memory import MemoryTier as MemoryTier
from protocol_v2.tiers.residency import Residency as Residency
