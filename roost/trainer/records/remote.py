"""A run on object storage (s3://, gs://, any URL of fsspec): what is there, upload and download.

Checkpoints and the policy are whole folders: the object COMPLETE, which lists their files, is written last and removed
first, so a folder without it does not count. Stores write an object whole or not at all, so other files need no mark.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from roost.learner.checksums import Damaged
from roost.procs.files import put_in_place, unfinished
from roost.trainer.records.run_folder import ASIDE, NAME

T = TypeVar("T")

CHECKPOINTS, POLICY, LOGS = "checkpoints", "policy", "logs"
SCALE = "scale"  # requests to the process of a run on one machine
COMPLETE = "complete.json"
WRITER = "writer.json"
AT_ONCE = 4  # files that are transferred concurrently; each may take a buffer of 50 MB
TRIES = 4
RETRY_S = 1.0  # doubled after each failure
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?!/)(.+)")


class StorageError(RuntimeError):
    """Object storage cannot be used, or lacks what was asked for."""


class Missing(StorageError):
    """An object is not there."""


class Taken(StorageError):
    """Another process continues the run."""


def url_of(text: str) -> str | None:
    """Return the URL in a word of the command line, also one that passed through `Path`; None for a local path.

    >>> url_of("s3://bucket/runs/"), url_of(str(Path("gs://bucket/runs/a"))), url_of("runs/a"), url_of("/data/runs")
    ('s3://bucket/runs', 'gs://bucket/runs/a', None, None)
    """
    found = _URL.fullmatch(text)
    return f"{found[1]}://{found[2].rstrip('/')}" if found and found[1] != "file" else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files of a whole folder with their sizes; `stamp` tells two folders of one name apart."""

    files: dict[str, int]
    stamp: str = ""

    @classmethod
    def of(cls, folder: Path, stamp: str = "") -> Manifest:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return cls({file.relative_to(folder).as_posix(): file.stat().st_size for file in files}, stamp)


class RemoteRun:
    """A run on object storage."""

    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files, self._root, self.url = files, root.rstrip("/"), url

    @classmethod
    def open(cls, url: str) -> RemoteRun:
        """Open a run by its URL, and look at it once: raise StorageError if the store cannot be used."""
        try:
            from fsspec.core import url_to_fs

            # Listings must be fresh: another machine may have written the run.
            files, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            package = PACKAGES.get(url.partition(":")[0])
            fix = f"pip install {package}" if package else str(error)
            raise StorageError(f"{url} needs a package that is not installed: {fix}") from None
        except ValueError as error:  # a protocol that is not known
            raise StorageError(f"{url} cannot be used: {error}; --runs takes a folder or a URL of fsspec") from None
        if "memory" in url.partition("://")[0].split("::"):
            why = "it is this process's own memory, and what is written there ends with it"
            raise StorageError(f"{url} cannot keep a run: {why}; name a folder, or a store such as s3://bucket/runs")
        run = cls(files, root, url)
        run._reached(run.exists, 1)  # packages of fsspec try several times themselves; a person waits here
        return run

    # What is there ------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return True if a run was started here."""
        return self.has("config.yaml") or self.has("metrics.jsonl")

    def has(self, name: str) -> bool:
        """Return True if there is an object, or a folder, of this name."""
        try:
            self._files.info(self._path(name))  # not `exists`, which is False where a store cannot be reached
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """All objects of the run, by name relative to it."""
        found = self._files.find(self._root)
        return sorted(PurePosixPath(path).relative_to(self._root.lstrip("/")).as_posix() for path in map(_bare, found))

    def steps(self) -> dict[int, bool]:
        """Steps with a checkpoint; False for one whose upload did not end."""
        found: dict[int, bool] = {}
        for name in self.names():
            parts = PurePosixPath(name).parts
            step = NAME.fullmatch(parts[1]) if len(parts) > 2 and parts[0] == CHECKPOINTS else None
            if step is not None:
                found[int(step[1])] = found.get(int(step[1]), False) or parts[2:] == (COMPLETE,)
        return found

    def complete_steps(self) -> list[int]:
        """Steps with a complete checkpoint, newest last."""
        return sorted(step for step, is_complete in self.steps().items() if is_complete)

    def manifest(self, folder: str) -> Manifest | None:
        """The manifest of a whole folder; None if it is not there."""
        found = self._json(f"{folder}/{COMPLETE}")
        return None if found is None else Manifest(found["files"], found["stamp"])

    def writer(self) -> dict[str, Any]:
        """The process that last claimed the run."""
        return self._json(WRITER) or {}

    # Upload -------------------------------------------------------------------------------------------------------

    def write(self, name: str, value: Any) -> None:
        """Write a small object of JSON."""
        self._files.pipe_file(self._path(name), json.dumps(value).encode())

    def upload(self, folder: Path, names: Sequence[str], under: str = "", may_vanish: bool = False) -> None:
        """Upload files of a folder, replacing objects of the same names; `may_vanish`: pass over files just removed."""

        def put(name: str) -> None:
            try:
                self._files.put_file(str(folder / name), self._path(f"{under}/{name}" if under else name))
            except FileNotFoundError:  # also of a bucket that does not exist
                if not may_vanish or (folder / name).exists():
                    raise

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(put, names))

    def upload_whole(self, folder: Path, name: str, stamp: str, check: Callable[[], None]) -> None:
        """Upload a folder so that it is complete, or not there, at any moment; `check` may raise before it counts."""
        manifest = Manifest.of(folder, stamp)
        self.remove(f"{name}/{COMPLETE}")
        self.upload(folder, list(manifest.files), name)
        check()
        self.write(f"{name}/{COMPLETE}", {"files": manifest.files, "stamp": manifest.stamp})

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        if self.has(name):
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a whole folder, its mark first."""
        self.remove(f"{name}/{COMPLETE}")
        if self.has(name):
            self._files.rm(self._path(name), recursive=True)

    def set_aside(self, step: int) -> str:
        """Move the checkpoint of a step that the run repeats to a free name, and return it."""
        name, count = checkpoint_name(step), 1
        while self.has(aside := f"{name}{ASIDE}{f'-{count}' if count > 1 else ''}"):
            count += 1
        manifest = self.manifest(name)
        for file in [*manifest.files, COMPLETE] if manifest is not None else ():
            with contextlib.suppress(FileNotFoundError):  # of a damaged checkpoint
                self._files.cp_file(self._path(f"{name}/{file}"), self._path(f"{aside}/{file}"))
        self.remove_folder(name)
        return aside

    # Download -----------------------------------------------------------------------------------------------------

    def download(self, names: Sequence[str], folder: Path, under: str = "", may_vanish: bool = False) -> None:
        """Download objects into a folder, below their names; `may_vanish`: pass over objects just removed."""
        here = [folder / name for name in names]
        for parent in {file.parent for file in here}:
            parent.mkdir(parents=True, exist_ok=True)

        def get(name: str, file: Path) -> None:
            there = self._path(f"{under}/{name}" if under else name)
            try:
                self._reached(lambda: self._files.get_file(there, str(file)))
            except Missing:
                file.unlink(missing_ok=True)
                if not may_vanish:
                    raise

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(get, names, here))

    def download_records(self, folder: Path) -> None:
        """Download everything but checkpoints and policy."""
        left_out = (CHECKPOINTS, POLICY, SCALE, WRITER)
        names = [name for name in self._reached(self.names) if PurePosixPath(name).parts[0] not in left_out]
        self.download(names, folder, may_vanish=True)

    def download_run(self, folder: Path, step: int | None = None) -> None:
        """Download a run to look at, with no checkpoint but that of `step`; `folder` appears when it is done."""
        draft = unfinished(folder)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        self.download_records(draft)
        if self._reached(lambda: self.manifest(POLICY)) is not None:
            self.download_whole(POLICY, draft / POLICY)
        if step is not None:
            self.download_whole(checkpoint_name(step), draft / checkpoint_name(step))
        put_in_place(folder)

    def download_whole(self, name: str, folder: Path) -> None:
        """Download a whole folder to `folder`, which appears when all of it is there.

        Raise Missing if the remote has none, Damaged if its files are not those that were uploaded.
        """
        manifest = self._reached(lambda: self.manifest(name))
        if manifest is None:
            raise Missing(f"{self.url} has no complete {name}")
        draft = unfinished(folder)
        shutil.rmtree(draft, ignore_errors=True)
        self.download(list(manifest.files), draft, name, may_vanish=True)
        for file, size in manifest.files.items():
            found = (draft / file).stat().st_size if (draft / file).exists() else None
            if found != size:
                shutil.rmtree(draft)
                what = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
                raise Damaged(f"{self.url}/{name} is damaged: {file} {what}")
        put_in_place(folder)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        return found if isinstance(found, dict) else None

    def _reached(self, call: Callable[[], T], tries: int = TRIES) -> T:
        """Call the store, again after an error that may pass; raise StorageError if none succeeds."""
        for attempt in range(tries):
            try:
                return call()
            except Exception as error:  # stores raise errors of their own, which have no common type
                if isinstance(error, PermissionError | FileNotFoundError) or attempt == tries - 1:
                    kind = Missing if isinstance(error, FileNotFoundError) else StorageError
                    raise kind(f"{self.url} cannot be reached: {one_line(error)}; {FIX}") from error
                time.sleep(RETRY_S * 2**attempt)
        raise AssertionError("unreachable")


FIX = "check the bucket's name and the credentials that fsspec finds (environment, profile, FSSPEC_* variables)"


def one_line(error: BaseException) -> str:
    """An error as one line, with its type if that says more."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | StorageError) and text else f"{type(error).__name__}: {text}"


def checkpoint_name(step: int) -> str:
    return f"{CHECKPOINTS}/step-{step:06d}"


def _bare(path: str) -> str:
    """Path of an object without a leading slash, which some file systems add."""
    return path.lstrip("/")
