//! The crash model: which changes a power cut may lose, and which ones only together.
//!
//! A history is split into atoms. The disk has an atom or not: a change of the tree, or the part of a write
//! in one page, or in one untorn block that the write covers. A state is a set of lost atoms, such that
//!
//! - **C1** no atom is lost that a sync has covered which ended before the cut, nor an atom that such an
//!   atom needs;
//! - **C2** all atoms that need a lost atom are lost.
//!
//! | | [`Model::Strict`], what POSIX promises | [`Model::Ordered`], a journal of metadata | [`Model::Ext4`] |
//! |---|---|---|---|
//! | a page | the content after one of its writes | the same | the same |
//! | a write after a truncate of its file | needs the truncate | the same | the same |
//! | a name | each name's changes in order | all changes of names, lengths and modes in their order | the same |
//! | a rename over another file | moves a name | the same | needs the earlier writes to the renamed file |
//! | fsync of a file | covers its data and length, not its name | and all changes of metadata up to the file's last | the same |
//! | fsync of a directory | covers its names | and all earlier changes of metadata | the same |

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use clap::ValueEnum;

use super::history::{Event, History};
use super::tree::{DirEntry, Ino, InodeKind, Tree, TreeChange};

/// The promises of the file system that the program may rely on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// The promises of POSIX only: a name is durable when its directory was synced
    Strict,
    /// Names, lengths and modes change in their order, as on XFS and on ext4 without auto_da_alloc
    Ordered,
    /// The same, and a rename over a file waits for the new file's data: ext4 with its default options
    Ext4,
}

/// A change that the disk has or has not.
#[derive(Debug)]
pub struct Atom {
    /// The number of the step that it belongs to.
    pub step: usize,
    pub change: TreeChange,
    /// The atoms that it needs.
    pub needs: Vec<usize>,
    /// After that step it can't be lost.
    pub durable_from: Option<usize>,
}

/// The bytes that a disk writes as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Grain {
    /// A page, or a sector. Smaller than an untorn block.
    pub page_bytes: u64,
    /// Aligned blocks of this size, of the writes that cover them. 0: none.
    pub untorn_bytes: u64,
}

#[derive(Debug)]
pub struct Atoms {
    pub all: Vec<Atom>,
    before: Tree,
}

/// A set of lost atoms, by their numbers.
pub type Lost = BTreeSet<usize>;

/// The history so far, indexed by the dependencies of later changes.
#[derive(Default)]
struct LastChanges {
    of_page: BTreeMap<(Ino, u64), usize>,
    of_length: BTreeMap<Ino, usize>,
    of_name: BTreeMap<DirEntry, usize>,
    of_mode: BTreeMap<Ino, usize>,
    /// The last change of metadata, of the tree and of each inode.
    metadata: Option<usize>,
    metadata_of: BTreeMap<Ino, usize>,
}

impl Atoms {
    pub fn from_history(history: &History, model: Model, grain: Grain) -> Atoms {
        let mut making = AtomBuilder { model, grain, all: Vec::new(), so: LastChanges::default() };
        for (number, step) in history.steps.iter().enumerate() {
            match &step.event {
                Event::Change(change) => making.change(number, change),
                Event::Sync(ino) => making.sync(number, *ino),
                Event::Output(_) => {}
            }
        }
        let mut all = making.all;
        // C1: the atoms that a durable atom needs are durable, too. They are earlier ones.
        for number in (0..all.len()).rev() {
            let Some(from) = all[number].durable_from else { continue };
            for need in all[number].needs.clone() {
                let known = all[need].durable_from.get_or_insert(from);
                *known = from.min(*known);
            }
        }
        Atoms { all, before: history.before.clone() }
    }

    /// The atoms of the first `cut` steps that may be lost.
    pub fn losable(&self, cut: usize) -> Vec<usize> {
        let is_in_doubt = |atom: &Atom| atom.durable_from.is_none_or(|from| from >= cut);
        let done = self.all.iter().enumerate().take_while(|(_, atom)| atom.step < cut);
        done.filter(|(_, atom)| is_in_doubt(atom)).map(|(number, _)| number).collect()
    }

    /// C2: adds the atoms of the first `cut` steps that need a lost one.
    pub fn with_dependents(&self, mut lost: Lost, cut: usize) -> Lost {
        let Some(&first) = lost.first() else { return lost };
        for (number, atom) in self.all.iter().enumerate().skip(first) {
            if atom.step >= cut {
                break;
            }
            if atom.needs.iter().any(|need| lost.contains(need)) {
                lost.insert(number);
            }
        }
        lost
    }

    /// An atom, and all atoms that it needs.
    pub fn with_dependencies(&self, number: usize) -> BTreeSet<usize> {
        let mut all = BTreeSet::new();
        let mut open = vec![number];
        while let Some(number) = open.pop() {
            if all.insert(number) {
                open.extend(&self.all[number].needs);
            }
        }
        all
    }

    /// The tree of a state.
    pub fn tree(&self, cut: usize, lost: &Lost) -> Tree {
        let mut tree = self.before.clone();
        for (number, atom) in self.all.iter().enumerate().take_while(|(_, atom)| atom.step < cut) {
            if let TreeChange::Create { ino, kind, mode, .. } = &atom.change {
                tree.add_unnamed(*ino, kind, *mode);
            }
            if !lost.contains(&number) {
                tree.apply(&atom.change);
            }
        }
        tree
    }
}

struct AtomBuilder {
    model: Model,
    grain: Grain,
    all: Vec<Atom>,
    so: LastChanges,
}

impl AtomBuilder {
    fn add(&mut self, step: usize, change: TreeChange, needs: Vec<usize>) -> usize {
        self.all.push(Atom { step, change, needs, durable_from: None });
        self.all.len() - 1
    }

    fn is_ordered(&self) -> bool {
        self.model != Model::Strict
    }

    fn change(&mut self, step: usize, change: &TreeChange) {
        match change {
            TreeChange::Write { ino, offset, data } => self.write(step, *ino, *offset, data),
            TreeChange::Resize { ino, .. } | TreeChange::Zero { ino, .. } => {
                self.extent(step, *ino, change)
            }
            TreeChange::Mode { ino, .. } => {
                let needs = self.so.of_mode.get(ino).copied().into_iter().collect();
                let number = self.metadata(step, change, needs, &[*ino]);
                self.so.of_mode.insert(*ino, number);
            }
            TreeChange::Create { at, ino, .. } | TreeChange::Link { at, ino } => {
                self.names(step, change, &[at], &[*ino], Vec::new());
            }
            TreeChange::Remove { at } => {
                // A directory is empty when it is removed.
                let inside = self.inside(at);
                self.names(step, change, &[at], &[], inside);
            }
            TreeChange::Rename { from, to, ino, replaced } => {
                let written = if self.model == Model::Ext4 && replaced.is_some() {
                    self.written(*ino)
                } else {
                    Vec::new()
                };
                self.names(step, change, &[from, to], &[*ino], written);
            }
            TreeChange::Exchange { one, other, inos } => {
                self.names(step, change, &[one, other], &[inos.0, inos.1], Vec::new());
            }
        }
    }

    /// The disk has a write page by page, and untorn blocks as a whole.
    fn write(&mut self, step: usize, ino: Ino, offset: u64, data: &[u8]) {
        let Grain { page_bytes, untorn_bytes } = self.grain;
        let mut at = 0;
        while at < data.len() {
            let place = offset + at as u64;
            let left = (data.len() - at) as u64;
            let is_block =
                untorn_bytes > 0 && place.is_multiple_of(untorn_bytes) && left >= untorn_bytes;
            let to_next = if is_block { untorn_bytes } else { page_bytes - place % page_bytes };
            let end = at + left.min(to_next) as usize;
            let pages = place / page_bytes..(offset + end as u64).div_ceil(page_bytes);
            let before = pages.clone().filter_map(|page| self.so.of_page.get(&(ino, page)));
            let before: BTreeSet<usize> =
                before.chain(self.so.of_length.get(&ino)).copied().collect();
            let piece = TreeChange::Write { ino, offset: place, data: data[at..end].into() };
            let number = self.add(step, piece, before.into_iter().collect());
            self.so.of_page.extend(pages.map(|page| ((ino, page), number)));
            at = end;
        }
    }

    fn extent(&mut self, step: usize, ino: Ino, change: &TreeChange) {
        let needs = self.so.of_length.get(&ino).copied().into_iter().collect();
        let number = self.metadata(step, change, needs, &[ino]);
        self.so.of_length.insert(ino, number);
        if let TreeChange::Resize { len, .. } = change {
            // Pages that it cuts off start again as zeros.
            let first = len.div_ceil(self.grain.page_bytes);
            self.so.of_page.retain(|(of, page), _| *of != ino || *page < first);
        }
    }

    fn names(
        &mut self,
        step: usize,
        change: &TreeChange,
        entries: &[&DirEntry],
        inos: &[Ino],
        mut needs: Vec<usize>,
    ) {
        needs.extend(entries.iter().filter_map(|entry| self.so.of_name.get(entry)));
        let touched: Vec<Ino> =
            entries.iter().map(|entry| entry.dir).chain(inos.iter().copied()).collect();
        let number = self.metadata(step, change, needs, &touched);
        for entry in entries {
            self.so.of_name.insert((*entry).clone(), number);
        }
    }

    fn metadata(
        &mut self,
        step: usize,
        change: &TreeChange,
        needs: Vec<usize>,
        of: &[Ino],
    ) -> usize {
        let mut needs = needs;
        if self.is_ordered() {
            needs.extend(self.so.metadata);
        }
        let number = self.add(step, change.clone(), needs);
        self.so.metadata = Some(number);
        for ino in of {
            self.so.metadata_of.insert(*ino, number);
        }
        number
    }

    /// The changes of names in the directory of that name.
    fn inside(&self, at: &DirEntry) -> Vec<usize> {
        let made = self.all.iter().find_map(|atom| match &atom.change {
            TreeChange::Create { at: made, ino, kind: InodeKind::Dir(_), .. } if made == at => {
                Some(*ino)
            }
            _ => None,
        });
        let Some(dir) = made else { return Vec::new() };
        let first = DirEntry { dir, name: OsString::new() };
        let inside = self.so.of_name.range(first..).take_while(|(entry, _)| entry.dir == dir);
        inside.map(|(_, number)| *number).collect()
    }

    /// The last write of each page.
    fn written(&self, ino: Ino) -> Vec<usize> {
        let pages = self.so.of_page.range((ino, 0)..=(ino, u64::MAX)).map(|(_, number)| *number);
        pages.chain(self.so.of_length.get(&ino).copied()).collect()
    }

    fn sync(&mut self, step: usize, ino: Ino) {
        let mut covered = self.written(ino);
        covered.extend(self.so.of_mode.get(&ino));
        let first = DirEntry { dir: ino, name: OsString::new() };
        let names = self.so.of_name.range(first..).take_while(|(entry, _)| entry.dir == ino);
        covered.extend(names.map(|(_, number)| *number));
        if self.is_ordered() {
            covered.extend(self.so.metadata_of.get(&ino));
        }
        for number in covered {
            self.all[number].durable_from.get_or_insert(step);
        }
    }
}
