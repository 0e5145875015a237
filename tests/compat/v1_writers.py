"""How LMCache 0.5.6 writes names, written down once more from the facts, for the recogniser to be held against."""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class MpObject:
    """Fields of an MP object key."""

    model: str
    kv_rank: int
    group: int
    chunk_hash: bytes
    salt: str = ""

    def _tail(self) -> str:
        return f"@{self.group:x}@{self.chunk_hash.hex()}" + (f"@{self.salt}" if self.salt else "")

    def fs(self) -> str:
        """File name of the fs and fs_native adapters."""
        return f"{self.model.replace('/', '-SEP-')}@{self.kv_rank:#010x}{self._tail()}.data"

    def native(self) -> str:
        """Key of the native connectors and of S3."""
        return f"{self.model}@{self.kv_rank:08x}{self._tail()}"

    def valkey(self, prefix: str) -> str:
        """Key of the Valkey adapter with a key prefix."""
        return f"{prefix}@{self.native()}"

    def raw_block(self) -> str:
        """Entry of a raw block index."""
        return f"{quote(self.model, safe='')}@{self.kv_rank:#010x}{self._tail()}"


@dataclass(frozen=True)
class EngineKey:
    """Fields of an in-process engine key."""

    model: str
    world_size: int
    worker: int
    chunk_hash: int | bytes
    dtype: str
    layer: int | None = None
    tags: tuple[tuple[str, str], ...] = ()

    def hash_text(self) -> str:
        """The hash as it is printed."""
        return self.chunk_hash.hex() if isinstance(self.chunk_hash, bytes) else f"{self.chunk_hash:x}"

    def text(self) -> str:
        """``to_string``."""
        layer = "" if self.layer is None else f"@{self.layer}"
        tags = "".join(f"@{name}%{value}" for name, value in self.tags)
        return f"{self.model}@{self.world_size}@{self.worker}@{self.hash_text()}@{self.dtype}{layer}{tags}"

    def disk(self) -> str:
        """File name of the local disk backend."""
        return self.text().replace("/", "-") + ".pt"

    def fs(self) -> str:
        """File name of the fs connector."""
        return self.text().replace("/", "-SEP-") + ".data"

    def s3(self) -> str:
        """Object key of the S3 connector."""
        return self.text().replace("/", "_")

    def redis(self) -> tuple[str, str]:
        """The two keys of the Redis connector."""
        return self.text() + "metadata", self.text() + "kv_bytes"

    def gds(self) -> str:
        """File name of the GDS backend."""
        return quote(self.text(), safe="") + ".kvcache.safetensors"
