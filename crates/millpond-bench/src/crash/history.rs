//! The history of a program: its changes, syncs and output, in order.

use std::fmt;

use super::tree::{Ino, Tree, TreeChange};

#[derive(Clone, Debug)]
pub enum Event {
    Change(TreeChange),
    /// The file or directory was synced.
    Sync(Ino),
    /// The program's output has this length by now.
    Output(usize),
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

    pub fn record_change(&mut self, change: TreeChange) {
        let text = Described { change: &change, tree: &self.now }.to_string();
        self.now.apply(&change);
        self.history.steps.push(Step { event: Event::Change(change), text });
    }

    pub fn record_sync(&mut self, ino: Ino) {
        let text = format!("sync {}", shown(&self.now, ino));
        self.history.steps.push(Step { event: Event::Sync(ino), text });
    }

    pub fn record_output(&mut self, words: &[u8]) {
        self.history.output.extend_from_slice(words);
        let text = format!("output {:?}", String::from_utf8_lossy(words).trim_end());
        let event = Event::Output(self.history.output.len());
        self.history.steps.push(Step { event, text });
    }

    pub fn finish(self) -> History {
        self.history
    }
}

fn shown(tree: &Tree, ino: Ino) -> String {
    let path = tree.path(ino);
    if path.as_os_str().is_empty() { ".".into() } else { path.display().to_string() }
}

struct Described<'t> {
    change: &'t TreeChange,
    /// The tree before the change.
    tree: &'t Tree,
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |ino: &Ino| shown(self.tree, *ino);
        let at = |entry: &super::tree::DirEntry| {
            self.tree.path(entry.dir).join(&entry.name).display().to_string()
        };
        match self.change {
            TreeChange::Create { at: entry, .. } => write!(f, "create {}", at(entry)),
            TreeChange::Link { at: entry, ino } => write!(f, "link {} to {}", at(entry), path(ino)),
            TreeChange::Remove { at: entry } => write!(f, "remove {}", at(entry)),
            TreeChange::Rename { from, to, .. } => write!(f, "rename {} to {}", at(from), at(to)),
            TreeChange::Exchange { one, other, .. } => {
                write!(f, "exchange {} and {}", at(one), at(other))
            }
            TreeChange::Write { ino, offset, data } => {
                write!(f, "write {}, {} bytes at {offset}", path(ino), data.len())
            }
            TreeChange::Resize { ino, len } => write!(f, "truncate {} to {len}", path(ino)),
            TreeChange::Zero { ino, offset, len } => {
                write!(f, "zero {}, {len} bytes at {offset}", path(ino))
            }
            TreeChange::Mode { ino, mode } => write!(f, "chmod {} to {mode:o}", path(ino)),
        }
    }
}
