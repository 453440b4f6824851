"""Reading and writing files, of which other people may own some.

`read` takes regular files up to a size, and never waits. `write` replaces a file whole, and only
one that ficco has written: it begins as ficco's files of the kind do, or is empty. Neither follows
another user's link to write, and nothing is written to a folder of another user, who could replace
files in it. Folders of root are trusted, so /tmp is an ordinary folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ficco.core.errors import InputError

MIB = 1 << 20
PLAN_BYTES = SWEEP_BYTES = 64 * MIB  # the largest plan, journal or results; others have 1 MiB
PARTIAL = ".ficco-"  # how names of unfinished files begin
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_ROOT = 0
_HEAD_BYTES = 1024  # of a file, to see whether ficco has written it


def read(path: Path, most: int | None = MIB) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file, or a link to it.
        most: the largest size in bytes; None: any.

    Raises:
        OSError: it cannot be read, is not a regular file, or is too large.
    """
    with open_regular(path) as file:
        contents = file.read(-1 if most is None else most + 1)
    if most is not None and len(contents) > most:
        raise OSError(
            errno.EFBIG,
            f"it is larger than {most // MIB} MiB, the most that ficco reads",
            str(path),
        )
    return contents


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    with _named(path):
        _check_regular(os.stat(path), path)  # to open a device may change its state
        file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
        try:
            _check_regular(os.fstat(file.fileno()), path)
        except OSError:
            file.close()
            raise
        return file


def read_text(path: Path, most: int | None = MIB) -> str:
    """Return the text of a regular file; see `read`.

    Raises:
        OSError: see `read`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read(path, most).decode("utf-8")


def write(target: Path, contents: str | bytes, begins: str | None = None) -> None:
    """Write a file whole, or not at all.

    Args:
        target: the file.
        contents: all of it; text is stored in UTF-8.
        begins: a regular expression for the beginning of ficco's files of this kind; None: the file
            must be new.

    Raises:
        OSError: the file or its folder is not ficco's or this user's, or cannot be written.
    """
    data = contents.encode("utf-8") if isinstance(contents, str) else contents
    with _folder(target) as folder, _named(target):
        mode = _replaceable(target, folder, begins)
        name = f"{PARTIAL}{secrets.token_hex(8)}"
        part = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666,
            dir_fd=folder,
        )  # fmt: skip
        try:
            with noted(target.with_name(name)), os.fdopen(part, "wb") as file:
                if mode is not None:
                    os.fchmod(part, mode)
                file.write(data)
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def check_writable(target: Path, begins: str | None = None) -> None:
    """Raise the OSError that `write` would raise, without writing the file."""
    with _folder(target) as folder, _named(target):
        _replaceable(target, folder, begins)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(target))


def check_new(path: str, option: str) -> Path:
    """Return the path of an option, after a check that the file can be created.

    Raises:
        InputError: the file exists, or it cannot be written.
    """
    try:
        check_writable(Path(path))
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}") from None
    return Path(path)


def open_to_append(path: Path) -> int:
    """Return a descriptor to read a file and append to it; the file is made if there is none.

    Raises:
        OSError: see `write`. The caller checks that it is ficco's.
    """
    with _folder(path) as folder, _named(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | _FLAGS
        with suppress(FileNotFoundError):
            _check_own(os.stat(path.name, dir_fd=folder, follow_symlinks=False), path)
        descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
        try:
            _check_own(os.fstat(descriptor), path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def make_folder(path: Path) -> None:
    """Make a folder and its parents where there are none.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    with _folder(there / "any"), _named(path):
        path.mkdir(parents=True, exist_ok=True)
    with _folder(path / "any"):
        pass


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what Python raises for a path with a null byte into an OSError."""
    try:
        yield
    except ValueError as wrong:
        raise OSError(errno.EINVAL, str(wrong), repr(str(path))) from None


@contextmanager
def _folder(target: Path) -> Iterator[int]:
    """Yield a descriptor of a file's folder.

    Raises:
        OSError: it cannot be opened, it belongs to another user, or the path leads to it by a link
            of another user.
    """
    parent = Path(os.path.abspath(target.parent))
    trusted = (_ROOT, os.geteuid())
    with _named(target):
        for each in (parent, *parent.parents):
            status = os.lstat(each)
            if stat.S_ISLNK(status.st_mode) and status.st_uid not in trusted:
                raise OSError(errno.EPERM, f"{each} is a link of user {status.st_uid}", str(target))
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in trusted:
            raise OSError(
                errno.EPERM,
                f"the folder {parent} belongs to user {owner}, who could replace files in it; name "
                "a folder of your own",
                str(target),
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _replaceable(target: Path, folder: int, begins: str | None) -> int | None:
    """Return the permissions of a file that may be replaced; None if there is no file.

    Raises:
        OSError: the file must not be replaced.
    """
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        status = os.stat(target.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if begins is None:
        raise FileExistsError(
            errno.EEXIST, "the file exists; remove it, or name another file", str(target)
        )
    _check_own(status, target)
    if status.st_size:
        descriptor = os.open(target.name, os.O_RDONLY | os.O_NOFOLLOW | _FLAGS, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            if not re.match(begins.encode("utf-8"), file.read(_HEAD_BYTES)):
                raise FileExistsError(
                    errno.EEXIST,
                    "the file exists, and ficco has not written it; remove it, or name another "
                    "file",
                    str(target),
                )
    return status.st_mode & 0o777


def _check_own(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link; name the file itself", str(path))
    _check_regular(status, path)
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"the file belongs to user {status.st_uid}", str(path))


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


_open: set[str] = set()


@contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, whose name begins with `prefix`, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name, noted(Path(name)):
        yield Path(name)


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Let `remove_all` remove this folder or file too while the context is active."""
    _open.add(str(path))
    try:
        yield
    finally:
        _open.discard(str(path))


def remove_all() -> None:
    """Remove all open folders and files, for a process that ends without closing them."""
    for name in list(_open):
        shutil.rmtree(name, ignore_errors=True)
        with suppress(OSError):  # a folder is gone
            os.unlink(name)
