"""When watched files are checked, and which differences count as changes."""

from __future__ import annotations

from pathlib import Path

from headrace.common.stores.watched_files import LOOK_S, WatchedFiles, stamp_of


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_file_that_was_written_replaced_or_removed_has_another_stamp(tmp_path: Path) -> None:
    path, fresh = tmp_path / "file", tmp_path / "fresh"
    stamps = [stamp_of(path)]
    assert stamps == [None]
    path.write_text("one")
    stamps.append(stamp_of(path))
    path.write_text("longer")
    stamps.append(stamp_of(path))
    fresh.write_text("longer")
    fresh.replace(path)
    stamps.append(stamp_of(path))
    assert stamp_of(path) == stamps[-1]
    assert len(set(stamps)) == 4


def test_the_file_behind_a_link_is_what_counts(tmp_path: Path) -> None:
    link, one = tmp_path / "link", tmp_path / "one"
    one.write_text("x")
    link.symlink_to(one)
    assert stamp_of(link) == stamp_of(one)


def test_a_change_is_told_once_and_not_before_the_next_look(tmp_path: Path) -> None:
    path, absent, clock = tmp_path / "file", tmp_path / "absent", Clock()
    path.write_text("one")
    files = WatchedFiles([path, absent], clock)
    path.write_text("longer")
    assert not files.is_due
    assert not files.changed()
    clock.now_s += LOOK_S
    assert files.is_due
    assert files.changed()
    clock.now_s += LOOK_S
    assert not files.changed()
    absent.write_text("it is there now")
    assert not files.changed()
    clock.now_s += LOOK_S
    assert files.changed()
