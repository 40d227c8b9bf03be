"""The app for files, which exist in memory only."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import PAGE_LIMIT, App, check_path, has_text, page_of
from roost.app_world.signature import MOST_TEXT
from roost.app_world.state import ApiError, Record, unknown


class Files(App):
    """Keep files of text under full paths."""

    name = "files"

    def show_folder(self, *, folder: str = "/") -> list[str]:
        """Show the paths of all files below a folder.

        folder: its full path
        Returns: a list of paths, sorted
        """
        start = folder if folder.endswith("/") else f"{folder}/"
        return sorted(row["path"] for row in self._state.rows("files") if row["path"].startswith(start))

    def search(self, *, query: str = "", page_index: int = 0, page_limit: int = PAGE_LIMIT) -> list[Record]:
        """Find files by their path or text, page by page.

        query: text that the path or the content contains; all files if empty
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of files (path, content, modified_on); an empty one after the last page
        """
        rows = [row for row in self._state.rows("files") if has_text(query, row["path"], row["content"])]
        return page_of(rows, page_index, page_limit)

    def read(self, *, path: str) -> Record:
        """Read a file.

        path: its full path
        Returns: path, content and modified_on
        """
        return self._file(path)

    def write(self, *, path: str, content: str, overwrite: bool = False) -> Record:
        """Write a file.

        path: its full path
        content: its text
        overwrite: whether a file that is there already is replaced
        Returns: the file
        """
        check_path("path", path)
        if path in self._state.tables["files"]:
            if not overwrite:
                raise ApiError(f"{path!r} is there already; overwrite=True replaces it")
            return self._put(self._file(path), content)
        return self._state.add("files", records.file(path, self._state.today, content))

    def append(self, *, path: str, content: str) -> Record:
        """Add text at the end of a file.

        path: its full path
        content: the text; a line break before it is not added by itself
        Returns: the file
        """
        file = self._file(path)
        if len(file["content"]) + len(content) > MOST_TEXT:
            raise ApiError(f"a file holds {MOST_TEXT} characters; {path!r} would hold more")
        return self._put(file, file["content"] + content)

    def move(self, *, path: str, new_path: str) -> Record:
        """Move or rename a file.

        path: its full path
        new_path: its full path afterwards
        Returns: the file
        """
        self._file(path)
        check_path("new_path", new_path)
        if new_path in self._state.tables["files"]:
            raise ApiError(f"{new_path!r} is there already; delete it first")
        file = self._state.remove("files", path)
        return self._state.add("files", {**file, "path": new_path})

    def delete(self, *, path: str) -> Record:
        """Delete a file.

        path: its full path
        Returns: the file that is gone
        """
        self._file(path)
        return self._state.remove("files", path)

    def _file(self, path: str) -> Record:
        if path not in self._state.tables["files"]:
            raise unknown("file", path, (str(key) for key in self._state.tables["files"]))
        return self._state.find("files", path)

    def _put(self, file: Record, content: str) -> Record:
        file.update(content=content, modified_on=self._state.today)
        return file
