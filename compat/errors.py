"""Everything that `compat` refuses, by type.

One base, `CompatError`, which is a `ValueError`; where the fault is a wrong type the class is a `TypeError` as well.
Messages name the field, what was got, what was wanted and what to do. They never contain a salt, a token or a payload.
"""


class CompatError(ValueError):
    """Base of every refusal of this package."""


class CompatTypeError(CompatError, TypeError):
    """A value has the wrong type."""


class SpanError(CompatError):
    """Placeholder spans and identifiers do not describe one prompt, so no v1 producer could have keyed it rightly."""


class SpanTypeError(SpanError, CompatTypeError):
    """A span, an identifier or the token tensor has a type that v1 producers cannot work on."""
