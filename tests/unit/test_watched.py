"""Files that change while they are in use."""

from __future__ import annotations

import os
from pathlib import Path

from wire.watched import WatchedFiles


def test_each_change_is_told_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    watched = WatchedFiles(str(one), str(two), "")
    assert not watched.changed()
    two.write_text("b")
    assert watched.changed()
    assert not watched.changed()
    one.unlink()
    assert watched.changed()
    assert not watched.changed(), "still absent"


def test_another_file_of_the_same_size_and_time_counts(tmp_path: Path) -> None:
    path, other = tmp_path / "one", tmp_path / "other"
    for file in (path, other):
        file.write_text("a")
        os.utime(file, ns=(1, 1))
    watched = WatchedFiles(str(path))
    os.utime(path, ns=(1, 1))
    assert not watched.changed(), "no fact about the content moved"
    other.rename(path)
    assert watched.changed()


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """As the kubelet changes a volume: one link is put in another's place."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text("a")
    (tmp_path / "data").symlink_to("first")
    watched = WatchedFiles(str(tmp_path / "data" / "token"))
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").rename(tmp_path / "data")
    assert watched.changed()


def test_a_path_that_is_none_is_absent() -> None:
    assert not WatchedFiles("a\0b").changed()
