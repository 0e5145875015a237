"""The deprecation warning: shown by default, complete, at the caller's line."""

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import compat
from compat import (
    REMOVALS,
    CompatError,
    Deprecation,
    ExtraKeysDeprecationWarning,
    deprecation_of,
    mm_hash_to_token_values,
)
from compat.deprecations import deprecated
from keying import KeySpace


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_warning_names_since_removal_and_replacement_at_the_callers_line() -> None:
    """Text, category, file and line lead the author to the code that has to change."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = _line() + 1
        mm_hash_to_token_values("img-A", 1)
    expected = (
        "compat.mm_hash_to_token_values is deprecated since extra-keys 2.0.0 and will be removed in 3.0.0; "
        "use keying.MultimodalItem(identifier, offset, length) in extra_keys instead"
    )
    assert [(expected, ExtraKeysDeprecationWarning, __file__, line)] == [
        (str(w.message), w.category, w.filename, w.lineno) for w in caught
    ]


def test_apply_warns_once_at_the_callers_line() -> None:
    """One call is one warning: the producer does not warn about its own use of the other."""
    import torch

    class Span:
        offset, length = 0, 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = _line() + 1
        compat.apply_mm_hashes_to_token_ids(torch.zeros(4, dtype=torch.int64), ["a"], [Span()])
    assert [(ExtraKeysDeprecationWarning, __file__, line)] == [(w.category, w.filename, w.lineno) for w in caught]


def test_old_argument_shapes_work_with_a_warning_or_are_refused_by_type() -> None:
    """L4: producers take LMCache's arguments by place and by name; a database built as LMCache's is a typed error."""
    import torch

    span = SimpleNamespace(offset=1, length=2)
    with pytest.warns(ExtraKeysDeprecationWarning):
        values = mm_hash_to_token_values("img-A", 2)
    with pytest.warns(ExtraKeysDeprecationWarning):
        assert mm_hash_to_token_values(identifier="img-A", length=2) == values
    for hashes, spans in [(["img-A"], [span]), (("img-A",), (span,))]:
        prompt = torch.zeros(4, dtype=torch.int64)
        with pytest.warns(ExtraKeysDeprecationWarning):
            compat.apply_mm_hashes_to_token_ids(token_ids=prompt, mm_hashes=hashes, mm_positions=spans)
        assert prompt.tolist() == [0, *values, 0]
    config, metadata = SimpleNamespace(chunk_size=256), SimpleNamespace(model_name="org/model")
    for build in (
        lambda: compat.ChunkedTokenDatabase(config),  # type: ignore[arg-type]
        lambda: compat.ChunkedTokenDatabase(config, metadata),  # type: ignore[arg-type, call-arg]
        lambda: compat.ChunkedTokenDatabase(config=config, metadata=metadata),  # type: ignore[call-arg]
        lambda: compat.SegmentTokenDatabase(config, metadata),  # type: ignore[arg-type, call-arg]
    ):
        with pytest.raises(TypeError):
            build()
    space = KeySpace("org/model", chunk_size=256, kv_dtype="bfloat16")
    assert compat.ChunkedTokenDatabase(space).chunk_size == 256


def test_it_warns_also_when_the_call_is_refused() -> None:
    """A refusal does not hide that the call will go away."""
    with pytest.warns(ExtraKeysDeprecationWarning), pytest.raises(CompatError):
        mm_hash_to_token_values("img-A", -1)


def test_python_shows_it_without_any_option(tmp_path: Path) -> None:
    """Visible by default in a module that is not ``__main__``, unlike a DeprecationWarning (negative control)."""
    module = tmp_path / "connector.py"
    module.write_text(
        "import warnings\nfrom compat import mm_hash_to_token_values\n"
        "mm_hash_to_token_values('a', 1)\nwarnings.warn('hidden', DeprecationWarning, stacklevel=1)\n"
    )
    root = Path(compat.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", "import connector"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{module}:3: ExtraKeysDeprecationWarning: compat.mm_hash_to_token_values" in done.stderr
    assert "hidden" not in done.stderr


def test_the_removal_table_is_what_is_promised() -> None:
    """A change of the calendar is a visible diff here."""
    assert [(row.name, row.since, row.removal) for row in REMOVALS] == [
        ("compat.apply_mm_hashes_to_token_ids", "2.0.0", "3.0.0"),
        ("compat.mm_hash_to_token_values", "2.0.0", "3.0.0"),
    ]


def test_every_row_names_an_importable_entry_point_that_carries_it() -> None:
    """The table and the code cannot drift apart."""
    for row in REMOVALS:
        package, _, name = row.name.rpartition(".")
        assert package == "compat"
        assert row == deprecation_of(getattr(compat, name))


def test_nothing_is_removed_in_the_release_that_first_warns() -> None:
    """One whole major release warns first."""
    for row in REMOVALS:
        assert int(row.removal.split(".")[0]) > int(row.since.split(".")[0])


@pytest.mark.parametrize("missing", ["name", "since", "removal", "instead"])
def test_an_incomplete_row_is_refused(missing: str) -> None:
    """A deprecation without a date or a replacement cannot be declared."""
    fields = {"name": "f", "since": "1", "removal": "2", "instead": "g"} | {missing: ""}
    with pytest.raises(CompatError, match=missing):
        Deprecation(**fields)
    with pytest.raises(CompatError, match=missing):
        deprecated(**fields)


def test_the_fields_are_mandatory() -> None:
    """Leaving one out is a TypeError, not a default."""
    with pytest.raises(TypeError, match="removal"):
        deprecated(name="f", since="1", instead="g")  # type: ignore[call-arg]


def test_what_is_not_deprecated_has_no_row() -> None:
    """Asking for the row of an ordinary function is refused."""
    with pytest.raises(CompatError, match="not deprecated"):
        deprecation_of(len)


def test_the_wrapped_function_keeps_its_name_and_docs() -> None:
    """``help()`` and signatures show the entry point, not the wrapper."""
    assert mm_hash_to_token_values.__name__ == "mm_hash_to_token_values"
    assert list(inspect.signature(mm_hash_to_token_values).parameters) == ["identifier", "length"]


def test_importing_compat_loads_no_torch() -> None:
    """A router that only reads v1 names does not pay for torch or numpy."""
    code = "import sys, compat, compat.v1; print([m for m in ('torch', 'numpy', 'zmq') if m in sys.modules])"
    root = Path(compat.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
