"""Goal: `millpond+file` treats trees of files, links among them, as fsspec's own `file` does."""

import os
import stat
from pathlib import Path
from typing import Any

import millpond
import pytest

fsspec = pytest.importorskip("fsspec", reason="there is no fsspec")


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("millpond+file", skip_instance_cache=True, freshness="immutable", socket=False)


def make_tree(root: Path) -> Path:
    """A tree with links to a file and a directory outside, which it returns, and names that no object has."""
    outside, tree = root / "precious", root / "tree"
    (outside / "below").mkdir(parents=True)
    (outside / "keep").write_bytes(b"keep")
    (outside / "below" / "keep").write_bytes(b"keep")
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "x").write_bytes(b"x")
    (tree / "sub" / "part#1").write_bytes(b"part")
    (tree / "sub" / "two\nlines").write_bytes(b"lines")
    os.mkdir(os.fsencode(tree) + b"/\xff")
    for link, target in [("folder", outside), ("sub/file", outside / "keep"), ("none", "/none"), ("sub/up", "..")]:
        (tree / link).symlink_to(target)
    return outside


def files_of(root: Path) -> "list[str]":
    found = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(os.path.relpath(name, root) for name in found)


@pytest.mark.parametrize("pattern", ["tree", "tr*"])
def test_a_removed_tree_ends_at_its_links(tmp_path: Path, fs: Any, pattern: str) -> None:
    """Incident: files outside were removed through links, and names that no list has left the tree half removed."""
    outside = make_tree(tmp_path)
    assert fs.cat_file(f"{tmp_path}/tree/x") == b"x"
    fs.rm(f"{tmp_path}/{pattern}", recursive=True)
    assert files_of(outside) == ["below/keep", "keep"] and os.listdir(tmp_path) == ["precious"]
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{tmp_path}/tree/x")


def test_a_pattern_follows_no_link_below_its_stars(tmp_path: Path, fs: Any) -> None:
    outside = make_tree(tmp_path)
    fs.rm(f"{tmp_path}/**/keep", recursive=True)
    assert files_of(outside) == [] and (tmp_path / "tree" / "folder").is_symlink()
    outside = make_tree(tmp_path / "other")
    fs.rm(f"{tmp_path}/other/tree/**", recursive=True)
    assert files_of(outside) == ["below/keep", "keep"] and not (tmp_path / "other" / "tree" / "x").exists()
    # One star is a link if there is one.
    outside = make_tree(tmp_path / "third")
    fs.rm(f"{tmp_path}/third/tree/*/keep")
    assert files_of(outside) == ["below/keep"]


@pytest.mark.parametrize("recursive", [False, True])
def test_a_removed_link_leaves_its_target(tmp_path: Path, fs: Any, recursive: bool) -> None:
    outside = make_tree(tmp_path)
    links = ["folder", "none", "sub/file", "sub/up"]
    fs.rm([f"{tmp_path}/tree/{link}" for link in links], recursive=recursive)
    assert files_of(outside) == ["below/keep", "keep"]
    assert files_of(tmp_path / "tree") == ["sub/part#1", "sub/two\nlines", "x"]


def test_a_removal_to_a_depth_ends_at_links(tmp_path: Path, fs: Any) -> None:
    outside = make_tree(tmp_path)
    for depth in [0, -1]:
        with pytest.raises(ValueError):
            fs.rm(f"{tmp_path}/tree", recursive=True, maxdepth=depth)
    with pytest.raises(OSError, match="not empty"):
        fs.rm(f"{tmp_path}/tree", recursive=True, maxdepth=1)
    assert files_of(outside) == ["below/keep", "keep"]
    assert "sub" in os.listdir(tmp_path / "tree") and files_of(tmp_path / "tree") == [
        "sub/file", "sub/part#1", "sub/two\nlines"
    ]  # fmt: skip
    fs.rm(f"{tmp_path}/tree", recursive=True, maxdepth=3)
    assert files_of(outside) == ["below/keep", "keep"] and os.listdir(tmp_path) == ["precious"]


def test_nothing_is_removed_before_all_is_found(tmp_path: Path, fs: Any) -> None:
    make_tree(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        fs.rm([f"{tmp_path}/tree", f"{tmp_path}/absent"], recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{tmp_path}/absent*")
    assert (tmp_path / "tree" / "x").exists()


@pytest.mark.parametrize("recursive", [False, True])
def test_a_moved_tree_has_all_that_it_had(tmp_path: Path, fs: Any, recursive: bool) -> None:
    """Incident: a move was a copy of what lists have, and the removal after it lost the rest."""
    outside = make_tree(tmp_path)
    before = files_of(tmp_path / "tree")
    assert fs.cat_file(f"{tmp_path}/tree/x") == b"x"
    fs.mv(f"{tmp_path}/tree", f"{tmp_path}/new/tree", recursive=recursive)
    assert files_of(outside) == ["below/keep", "keep"]
    assert files_of(tmp_path / "new" / "tree") == before and not (tmp_path / "tree").exists()
    assert fs.cat_file(f"{tmp_path}/new/tree/x") == b"x" and (tmp_path / "new" / "tree" / "folder").is_symlink()
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{tmp_path}/tree/x")
    # Over a cached file, and several into a directory.
    fs.pipe({f"{tmp_path}/a": b"a", f"{tmp_path}/b": b"b"})
    assert fs.cat_file(f"{tmp_path}/b") == b"b"
    fs.mv(f"{tmp_path}/a", f"{tmp_path}/b")
    assert fs.cat_file(f"{tmp_path}/b") == b"a"
    fs.mv([f"{tmp_path}/b", f"{tmp_path}/new/**"], f"{tmp_path}/all")
    assert files_of(tmp_path / "all") == sorted(["b"] + [f"new/tree/{name}" for name in before])
    with pytest.raises(FileNotFoundError, match="absent"):
        fs.mv(f"{tmp_path}/absent", f"{tmp_path}/b")


@pytest.mark.parametrize("kind", ["pipe", "open", "parts", "put", "writer"])
@pytest.mark.parametrize("by_link", [False, True])
def test_a_write_keeps_the_permissions(tmp_path: Path, fs: Any, kind: str, by_link: bool) -> None:
    """Incident: a file that its owner alone may read was readable for all after a write."""
    path, link = tmp_path / "secret", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o600)
    link.symlink_to("secret")
    target, data = link if by_link else path, bytes(range(256)) * 50_000
    store = millpond.store(f"file://{tmp_path}", socket=False)
    if kind == "pipe":
        fs.pipe_file(str(target), data)
    elif kind == "open":
        with fs.open(str(target), "wb") as file:
            file.write(data)
    elif kind == "parts":
        (tmp_path / "local").write_bytes(data)
        fs.put_file(str(tmp_path / "local"), str(target))
        (tmp_path / "local").unlink()
    elif kind == "put":
        store.put(target.name, data)
    else:
        with store.open_writer(target.name) as writer:
            writer.write(data)
    assert path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert link.is_symlink() and sorted(os.listdir(tmp_path)) == ["link", "secret"]


def test_lists_go_on_after_what_is_no_object(tmp_path: Path, fs: Any) -> None:
    """Incident: one link to a directory above made its own one unlistable, and `find`, `du` and `get` empty without an error."""
    make_tree(tmp_path)
    tree = f"{tmp_path}/tree"
    os.symlink(".", f"{tree}/self")
    outside = ["folder/below/keep", "folder/keep"]
    files = [*outside, "sub/file", "x"]
    assert fs.ls(tree, detail=False) == [f"{tree}/{name}" for name in ["folder", "sub", "x"]]
    assert fs.find(tree) == [f"{tree}/{name}" for name in files]
    assert fs.du(tree) == 4 + 4 + 4 + 1
    folders = ["folder", "folder/below", "sub", "sub/empty"]
    assert fs.find(tree, withdirs=True) == sorted([tree, *(f"{tree}/{name}" for name in files + folders)])
    assert fs.find(tree, maxdepth=1) == [f"{tree}/x"] and fs.glob(f"{tree}/**/keep") == [f"{tree}/{name}" for name in outside]
    assert fs.find(f"{tree}/x") == [f"{tree}/x"] and fs.find(f"{tree}/absent") == []
    assert fs.find(f"{tree}/x", detail=True)[f"{tree}/x"]["size"] == 1
    with pytest.raises(ValueError):
        fs.find(tree, maxdepth=0)
    fs.get(tree, f"{tmp_path}/copy", recursive=True)
    assert files_of(tmp_path / "copy") == files
    store = millpond.store(f"file://{tmp_path}/tree", socket=False)
    assert sorted(meta["path"] for meta in store.list().collect()) == files


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path)
    tree = f"{tmp_path}/tree"
    listed = type(fs)._ls

    async def refused(self: Any, path: str, **named: Any) -> Any:
        if path.endswith("/sub"):
            raise error
        return await listed(self, path, **named)

    monkeypatch.setattr(type(fs), "_ls", refused)
    error: OSError = PermissionError(13, "Permission denied")
    for call in [lambda: fs.find(tree), lambda: fs.du(tree), lambda: fs.get(tree, f"{tmp_path}/copy", recursive=True)]:
        with pytest.raises(PermissionError):
            call()
    # Another program has removed it.
    error = FileNotFoundError(2, "No such file or directory")
    assert f"{tree}/x" in fs.find(tree)


@pytest.mark.parametrize("freshness", ["immutable", "revalidate"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_directory_is_not_opened(tmp_path: Path, scheme: str, freshness: str) -> None:
    """Incident: a directory was read as an empty file."""
    fs = fsspec.filesystem(f"millpond+{scheme}", freshness=freshness, socket=False)
    fs.pipe_file(f"{tmp_path}/folder/pond", b"water")
    path = fs._strip_protocol(f"{tmp_path}/folder")
    with pytest.raises(IsADirectoryError) as caught:
        fs.open(path, "rb")
    assert caught.value.filename == path
    with fs.open(f"{path}/pond", "rb", size=5) as file:
        assert file.read() == b"water"
