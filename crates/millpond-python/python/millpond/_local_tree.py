"""Trees of local files, without those that links lead to."""

import os
import shutil


def tree_of(path: str, maxdepth: "int | None") -> "tuple[list[str], list[str]]":
    """The files and links, and the directories, at `path` and as deep below it. A directory is before those in it."""
    if os.path.islink(path) or not os.path.isdir(path):
        return [path], []
    files: "list[str]" = []
    folders, level, depth = [path], [path], 0
    while level and (maxdepth is None or depth < maxdepth):
        below: "list[str]" = []
        for folder in level:
            with os.scandir(folder) as entries:
                for entry in entries:
                    (below if entry.is_dir(follow_symlinks=False) else files).append(entry.path)
        folders += below
        level, depth = below, depth + 1
    return files, folders


def remove(path: str, maxdepth: "int | None", removed: "list[str]") -> None:
    """Removes a file, a link, or a directory with what is as deep below it; adds the names of files to `removed`."""
    files, folders = tree_of(path, maxdepth)
    removed += files
    if folders and maxdepth is None:
        # By descriptors, so that a link that replaces a directory during the removal is not followed either.
        shutil.rmtree(path)
        return
    for one in files:
        os.unlink(one)
    for one in reversed(folders):
        os.rmdir(one)


def follows_link(pattern: str, name: str) -> bool:
    """Whether the way from the part of a pattern before its `**` to a name that it matches leads through a link."""
    parts, path = pattern.split("/"), name.split("/")
    recursive = [n for n, part in enumerate(parts) if "**" in part]
    above = range(recursive[0] + 1, len(path)) if recursive else ()
    return any(os.path.islink("/".join(path[:n])) for n in above)
