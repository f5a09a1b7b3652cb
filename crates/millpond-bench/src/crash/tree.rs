//! A directory tree in memory, and its changes.
//!
//! A clone shares the contents of files with the original, until one of them is changed.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An inode number. Numbers are not reused.
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InodeKind {
    File(Arc<Vec<u8>>),
    Dir(BTreeMap<OsString, Ino>),
    Link(PathBuf),
}

impl InodeKind {
    pub fn file() -> InodeKind {
        InodeKind::File(Arc::default())
    }
}

#[derive(Clone, Debug)]
pub struct Inode {
    pub kind: InodeKind,
    /// Permission bits.
    pub mode: u32,
    /// The number of its names.
    pub links: u32,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DirEntry {
    pub dir: Ino,
    pub name: OsString,
}

/// A change of a tree by a program; each is atomic.
#[derive(Clone, Debug)]
pub enum TreeChange {
    /// A new inode, and its first name.
    Create {
        at: DirEntry,
        ino: Ino,
        kind: InodeKind,
        mode: u32,
    },
    /// Adds a name.
    Link {
        at: DirEntry,
        ino: Ino,
    },
    /// Removes a name, of a directory too.
    Remove {
        at: DirEntry,
    },
    /// `replaced`: the inode that had the name before.
    Rename {
        from: DirEntry,
        to: DirEntry,
        ino: Ino,
        replaced: Option<Ino>,
    },
    /// Exchanges two names.
    Exchange {
        one: DirEntry,
        other: DirEntry,
        inos: (Ino, Ino),
    },
    Write {
        ino: Ino,
        offset: u64,
        data: Arc<[u8]>,
    },
    /// Sets the length.
    Resize {
        ino: Ino,
        len: u64,
    },
    /// Writes zeros, up to the end of the file.
    Zero {
        ino: Ino,
        offset: u64,
        len: u64,
    },
    Mode {
        ino: Ino,
        mode: u32,
    },
}

#[derive(Clone, Debug)]
pub struct Tree {
    inodes: BTreeMap<Ino, Inode>,
    pub next: Ino,
}

impl Tree {
    pub fn empty() -> Tree {
        let root = Inode { kind: InodeKind::Dir(BTreeMap::new()), mode: 0o755, links: 1 };
        Tree { inodes: BTreeMap::from([(ROOT, root)]), next: ROOT + 1 }
    }

    /// Reads a directory and all below it. Sockets, pipes and devices are skipped.
    pub fn read(dir: &Path) -> io::Result<Tree> {
        let mut tree = Tree::empty();
        let mut known = BTreeMap::new();
        tree.read_below(dir, ROOT, &mut known)?;
        Ok(tree)
    }

    fn read_below(
        &mut self,
        dir: &Path,
        ino: Ino,
        known: &mut BTreeMap<(u64, u64), Ino>,
    ) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let (path, metadata) = (entry.path(), entry.metadata()?);
            let at = DirEntry { dir: ino, name: entry.file_name() };
            let identity = (metadata.dev(), metadata.ino());
            if let Some(&ino) = known.get(&identity) {
                self.apply(&TreeChange::Link { at, ino });
                continue;
            }
            let kind = if metadata.is_dir() {
                InodeKind::Dir(BTreeMap::new())
            } else if metadata.is_symlink() {
                InodeKind::Link(fs::read_link(&path)?)
            } else if metadata.is_file() {
                InodeKind::File(Arc::new(fs::read(&path)?))
            } else {
                continue;
            };
            let (mode, new) = (metadata.mode() & 0o7777, self.next);
            if !metadata.is_dir() {
                known.insert(identity, new);
            }
            self.apply(&TreeChange::Create { at, ino: new, kind, mode });
            if metadata.is_dir() {
                self.read_below(&path, new, known)?;
            }
        }
        Ok(())
    }

    pub fn inode(&self, ino: Ino) -> Option<&Inode> {
        self.inodes.get(&ino)
    }

    pub fn entries(&self, dir: Ino) -> Option<&BTreeMap<OsString, Ino>> {
        match &self.inodes.get(&dir)?.kind {
            InodeKind::Dir(entries) => Some(entries),
            _ => None,
        }
    }

    pub fn find(&self, dir: Ino, name: &OsStr) -> Option<Ino> {
        self.entries(dir)?.get(name).copied()
    }

    pub fn data(&self, ino: Ino) -> Option<&Arc<Vec<u8>>> {
        match &self.inodes.get(&ino)?.kind {
            InodeKind::File(data) => Some(data),
            _ => None,
        }
    }

    /// The path of an inode from the root; for messages.
    pub fn path(&self, ino: Ino) -> PathBuf {
        if ino == ROOT {
            return PathBuf::new();
        }
        for (&dir, inode) in &self.inodes {
            let InodeKind::Dir(entries) = &inode.kind else { continue };
            if let Some((name, _)) = entries.iter().find(|(_, found)| **found == ino) {
                return self.path(dir).join(name);
            }
        }
        PathBuf::from(format!("(a file without a name, {ino})"))
    }

    /// Adds an inode without a name: its creation was lost.
    pub fn add_unnamed(&mut self, ino: Ino, kind: &InodeKind, mode: u32) {
        self.next = self.next.max(ino + 1);
        self.inodes.entry(ino).or_insert_with(|| Inode { kind: kind.clone(), mode, links: 0 });
    }

    /// Applies a change, if the inodes that it concerns exist.
    pub fn apply(&mut self, change: &TreeChange) {
        match change {
            TreeChange::Create { at, ino, kind, mode } => {
                self.add_unnamed(*ino, kind, *mode);
                self.add_name(at, *ino);
            }
            TreeChange::Link { at, ino } => self.add_name(at, *ino),
            TreeChange::Remove { at } => self.remove_name(at),
            TreeChange::Rename { from, to, ino, .. } => {
                if self.find(from.dir, &from.name) == Some(*ino) {
                    self.remove_name(from);
                }
                self.add_name(to, *ino);
            }
            TreeChange::Exchange { one, other, inos } => {
                self.add_name(one, inos.1);
                self.add_name(other, inos.0);
            }
            TreeChange::Write { ino, offset, data } => {
                let Some(bytes) = self.bytes_mut(*ino) else { return };
                let (start, end) = (*offset as usize, *offset as usize + data.len());
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[start..end].copy_from_slice(data);
            }
            TreeChange::Resize { ino, len } => {
                let Some(bytes) = self.bytes_mut(*ino) else { return };
                bytes.resize(*len as usize, 0);
            }
            TreeChange::Zero { ino, offset, len } => {
                let Some(bytes) = self.bytes_mut(*ino) else { return };
                let end = bytes.len().min(offset.saturating_add(*len) as usize);
                let start = end.min(*offset as usize);
                bytes[start..end].fill(0);
            }
            TreeChange::Mode { ino, mode } => {
                if let Some(inode) = self.inodes.get_mut(ino) {
                    inode.mode = *mode;
                }
            }
        }
    }

    fn bytes_mut(&mut self, ino: Ino) -> Option<&mut Vec<u8>> {
        match &mut self.inodes.get_mut(&ino)?.kind {
            InodeKind::File(data) => Some(Arc::make_mut(data)),
            _ => None,
        }
    }

    fn names_mut(&mut self, dir: Ino) -> Option<&mut BTreeMap<OsString, Ino>> {
        match &mut self.inodes.get_mut(&dir)?.kind {
            InodeKind::Dir(entries) => Some(entries),
            _ => None,
        }
    }

    fn add_name(&mut self, at: &DirEntry, ino: Ino) {
        let Some(names) = self.names_mut(at.dir) else { return };
        let before = names.insert(at.name.clone(), ino);
        self.adjust_links(ino, 1);
        before.into_iter().for_each(|before| self.adjust_links(before, -1));
    }

    fn remove_name(&mut self, at: &DirEntry) {
        let gone = self.names_mut(at.dir).and_then(|names| names.remove(&at.name));
        gone.into_iter().for_each(|gone| self.adjust_links(gone, -1));
    }

    fn adjust_links(&mut self, ino: Ino, by: i32) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.links = inode.links.saturating_add_signed(by);
        }
    }

    /// All inodes with a path, in order.
    fn walk<'t>(&'t self, dir: Ino, path: &Path, found: &mut Vec<(PathBuf, Ino, &'t Inode)>) {
        for (name, ino) in self.entries(dir).into_iter().flatten() {
            let Some(inode) = self.inodes.get(ino) else { continue };
            // Lost changes may make a directory its own ancestor; no kernel would show it.
            if found.iter().any(|(_, known, _)| known == ino && self.entries(*ino).is_some()) {
                continue;
            }
            let path = path.join(name);
            found.push((path.clone(), *ino, inode));
            self.walk(*ino, &path, found);
        }
    }

    /// Two trees with the same fingerprint look the same from outside.
    pub fn fingerprint(&self) -> u64 {
        let mut found = Vec::new();
        self.walk(ROOT, Path::new(""), &mut found);
        let mut hasher = std::hash::DefaultHasher::new();
        for (path, _, inode) in found {
            (path, inode.mode, inode.links).hash(&mut hasher);
            match &inode.kind {
                InodeKind::File(data) => (0, data).hash(&mut hasher),
                InodeKind::Dir(_) => 1.hash(&mut hasher),
                InodeKind::Link(target) => (2, target).hash(&mut hasher),
            }
        }
        hasher.finish()
    }

    /// Writes the tree to an empty directory.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        let mut found = Vec::new();
        self.walk(ROOT, Path::new(""), &mut found);
        let mut first = BTreeMap::new();
        for (path, ino, inode) in &found {
            let to = dir.join(path);
            match &inode.kind {
                InodeKind::Dir(_) => fs::create_dir(&to)?,
                InodeKind::Link(target) => symlink(target, &to)?,
                InodeKind::File(_) if first.contains_key(ino) => fs::hard_link(&first[ino], &to)?,
                InodeKind::File(data) => {
                    let mut options = fs::OpenOptions::new();
                    let mut file = options.write(true).create_new(true).mode(0o600).open(&to)?;
                    io::Write::write_all(&mut file, data)?;
                    file.set_permissions(fs::Permissions::from_mode(inode.mode))?;
                    first.insert(*ino, to);
                }
            }
        }
        // Modes come last, as one may forbid writing.
        for (path, _, inode) in found.iter().rev() {
            if let InodeKind::Dir(_) = inode.kind {
                fs::set_permissions(dir.join(path), fs::Permissions::from_mode(inode.mode))?;
            }
        }
        Ok(())
    }
}

/// The tree as text, for tests.
impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut found = Vec::new();
        self.walk(ROOT, Path::new(""), &mut found);
        for (number, (path, _, inode)) in found.iter().enumerate() {
            let path = path.display();
            f.write_str(if number == 0 { "" } else { " " })?;
            match &inode.kind {
                InodeKind::Dir(_) => write!(f, "{path}/")?,
                InodeKind::Link(target) => write!(f, "{path}->{}", target.display())?,
                InodeKind::File(data) => write!(f, "{path}={}", String::from_utf8_lossy(data))?,
            }
        }
        Ok(())
    }
}
