//! The history of a program: its changes, syncs and output, in order.

use std::fmt;

use super::tree::{Change, Ino, Tree};

#[derive(Clone, Debug)]
pub enum Event {
    Change(Change),
    /// The file or directory was synced.
    Sync(Ino),
    /// The program's output has this length by now.
    Said(usize),
}

/// An event, and its description.
#[derive(Clone, Debug)]
pub struct Step {
    pub event: Event,
    pub text: String,
}

#[derive(Clone, Debug)]
pub struct History {
    pub before: Tree,
    pub steps: Vec<Step>,
    /// The program's whole standard output.
    pub output: Vec<u8>,
}

/// Records the changes of a tree.
#[derive(Debug)]
pub struct Recorder {
    pub now: Tree,
    history: History,
}

impl Recorder {
    pub fn new(before: Tree) -> Recorder {
        let history = History { before: before.clone(), steps: Vec::new(), output: Vec::new() };
        Recorder { now: before, history }
    }

    pub fn change(&mut self, change: Change) {
        let text = Told { change: &change, tree: &self.now }.to_string();
        self.now.apply(&change);
        self.history.steps.push(Step { event: Event::Change(change), text });
    }

    pub fn sync(&mut self, ino: Ino) {
        let text = format!("sync {}", shown(&self.now, ino));
        self.history.steps.push(Step { event: Event::Sync(ino), text });
    }

    pub fn said(&mut self, words: &[u8]) {
        self.history.output.extend_from_slice(words);
        let text = format!("output {:?}", String::from_utf8_lossy(words).trim_end());
        let event = Event::Said(self.history.output.len());
        self.history.steps.push(Step { event, text });
    }

    pub fn end(self) -> History {
        self.history
    }
}

fn shown(tree: &Tree, ino: Ino) -> String {
    let path = tree.path(ino);
    if path.as_os_str().is_empty() { ".".into() } else { path.display().to_string() }
}

struct Told<'t> {
    change: &'t Change,
    /// The tree before the change.
    tree: &'t Tree,
}

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |ino: &Ino| shown(self.tree, *ino);
        let at = |entry: &super::tree::Entry| {
            self.tree.path(entry.dir).join(&entry.name).display().to_string()
        };
        match self.change {
            Change::Create { at: entry, .. } => write!(f, "create {}", at(entry)),
            Change::Link { at: entry, ino } => write!(f, "link {} to {}", at(entry), path(ino)),
            Change::Remove { at: entry } => write!(f, "remove {}", at(entry)),
            Change::Rename { from, to, .. } => write!(f, "rename {} to {}", at(from), at(to)),
            Change::Exchange { one, other, .. } => {
                write!(f, "exchange {} and {}", at(one), at(other))
            }
            Change::Write { ino, offset, data } => {
                write!(f, "write {}, {} bytes at {offset}", path(ino), data.len())
            }
            Change::Resize { ino, len } => write!(f, "truncate {} to {len}", path(ino)),
            Change::Zero { ino, offset, len } => {
                write!(f, "zero {}, {len} bytes at {offset}", path(ino))
            }
            Change::Mode { ino, mode } => write!(f, "chmod {} to {mode:o}", path(ino)),
        }
    }
}
