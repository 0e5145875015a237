"""Everything that `keying` refuses, by type.

One base, `KeyingError`, which is a `ValueError`; where the fault is a wrong type the class is a `TypeError` as well.
Messages name the field, what was got, what was wanted and what to do. They never contain a salt, a token or a payload.
"""


class KeyingError(ValueError):
    """Base of every refusal of this package."""


class KeyingTypeError(KeyingError, TypeError):
    """A value has the wrong type."""


class SpaceError(KeyingError):
    """A field of a `KeySpace` is out of its bounds."""


class SpaceTypeError(SpaceError, KeyingTypeError):
    """A field of a `KeySpace` has the wrong type."""


class TokenError(KeyingError):
    """A token is not an integer in [0, 2**32)."""


class TokenTypeError(TokenError, KeyingTypeError):
    """The token container, or a token in it, has a type that cannot hold token ids."""


class ExtraKeyError(KeyingError):
    """A field of an extra key is out of its bounds, or extra keys do not go together."""


class ExtraKeyTypeError(ExtraKeyError, KeyingTypeError):
    """A field of an extra key has the wrong type."""


class UnsupportedExtraKeyError(ExtraKeyTypeError):
    """Something that is none of the five extra-key types was given as one."""


class DuplicateExtraKeyError(ExtraKeyError):
    """An item, an adapter (name and revision) or a tag name came twice, or two salts came."""


class OverlappingEmbedsError(ExtraKeyError):
    """Two ranges of prompt embeddings overlap, so a position would have two sources."""


class LateExtraKeyError(ExtraKeyError):
    """An extra key would change a key that was already handed out."""


class PreimageError(KeyingError):
    """Bytes are not a pre-image that the encoder can write."""


class UncacheableRequest(KeyingError):  # noqa: N818  (the name is part of the public surface of key schema 2)
    """A request whose identity is missing or malformed: bypass the cache and count it, never key without the identity.

    Attributes:
        reason: a short stable word for counters and logs, such as ``missing_attribute``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"uncacheable ({reason}): {message}")
        self.reason = reason
        self._message = message

    def __reduce__(self) -> tuple[type["UncacheableRequest"], tuple[str, str]]:
        return (type(self), (self.reason, self._message))
