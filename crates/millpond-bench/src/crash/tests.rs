//! Goal: the states of short histories equal lists that were written by hand.

use std::collections::BTreeSet;
use std::ffi::OsString;

use super::history::{History, Recorder};
use super::model::{Atoms, Grain, Model};
use super::search::states;
use super::tree::{DirEntry, Ino, InodeKind, ROOT, Tree, TreeChange};
use super::{PAGE_BYTES, output_lengths};

const PAGE: u64 = PAGE_BYTES;

/// Builds a history step by step.
struct Steps(Recorder);

impl Steps {
    fn new() -> Steps {
        Steps(Recorder::new(Tree::empty()))
    }

    fn at(name: &str) -> DirEntry {
        DirEntry { dir: ROOT, name: OsString::from(name) }
    }

    fn ino(&self, name: &str) -> Ino {
        self.0.now.find(ROOT, name.as_ref()).unwrap()
    }

    fn create(mut self, name: &str) -> Steps {
        let ino = self.0.now.next;
        self.0.record_change(TreeChange::Create {
            at: Steps::at(name),
            ino,
            kind: InodeKind::file(),
            mode: 0o644,
        });
        self
    }

    fn write(mut self, name: &str, offset: u64, words: &str) -> Steps {
        let ino = self.ino(name);
        self.0.record_change(TreeChange::Write { ino, offset, data: words.as_bytes().into() });
        self
    }

    fn resize(mut self, name: &str, len: u64) -> Steps {
        let ino = self.ino(name);
        self.0.record_change(TreeChange::Resize { ino, len });
        self
    }

    fn rename(mut self, from: &str, to: &str) -> Steps {
        let (ino, replaced) = (self.ino(from), self.0.now.find(ROOT, to.as_ref()));
        let (from, to) = (Steps::at(from), Steps::at(to));
        self.0.record_change(TreeChange::Rename { from, to, ino, replaced });
        self
    }

    fn remove(mut self, name: &str) -> Steps {
        self.0.record_change(TreeChange::Remove { at: Steps::at(name) });
        self
    }

    fn sync(mut self, name: &str) -> Steps {
        let ino = if name == "." { ROOT } else { self.ino(name) };
        self.0.record_sync(ino);
        self
    }

    fn say(mut self, words: &str) -> Steps {
        self.0.record_output(words.as_bytes());
        self
    }
}

/// Pages of that size, without untorn blocks.
fn pages(page_bytes: u64) -> Grain {
    Grain { page_bytes, untorn_bytes: 0 }
}

/// The possible states after all steps, as text.
fn at_the_end(steps: Steps, model: Model) -> BTreeSet<String> {
    let history = steps.say("done").0.finish();
    let atoms = Atoms::from_history(&history, model, pages(PAGE));
    let cut = history.steps.len();
    let found = states(&atoms, cut, &output_lengths(&history), 10_000, 1);
    assert!(found.is_all);
    // A state of an earlier cut never equals one of the last cut, as the program's output is longer.
    let last = found.states.iter().filter(|state| state.cut == cut);
    last.map(|state| atoms.tree(cut, &state.lost).to_string()).collect()
}

fn set(states: &[&str]) -> BTreeSet<String> {
    states.iter().map(|state| state.to_string()).collect()
}

#[test]
fn a_rename_without_a_sync() {
    let steps = || Steps::new().create("f").write("f", 0, "old").sync("f").sync(".");
    let renamed = || steps().create("t").write("t", 0, "new").rename("t", "f");
    // Names change one by one, and data at any time.
    let strict = ["f=old", "f=old t=", "f=old t=new", "f=", "f=new"];
    assert_eq!(at_the_end(renamed(), Model::Strict), set(&strict));
    assert_eq!(at_the_end(renamed(), Model::Ordered), set(&strict));
    // The rename waits for the data.
    let ext4 = ["f=old", "f=old t=", "f=old t=new", "f=new"];
    assert_eq!(at_the_end(renamed(), Model::Ext4), set(&ext4));
}

#[test]
fn a_sync_of_a_file_is_none_of_its_name() {
    let steps = || Steps::new().create("a").create("b").write("b", 0, "x").sync("b");
    assert_eq!(at_the_end(steps(), Model::Strict), set(&["", "a=", "b=x", "a= b=x"]));
    // The journal has the names before it, too.
    assert_eq!(at_the_end(steps(), Model::Ordered), set(&["a= b=x"]));
}

#[test]
fn a_sync_of_the_directory_is_none_of_bytes() {
    let steps = || Steps::new().create("a").write("a", 0, "x").sync(".");
    for model in [Model::Strict, Model::Ordered, Model::Ext4] {
        assert_eq!(at_the_end(steps(), model), set(&["a=", "a=x"]), "{model:?}");
    }
}

#[test]
fn a_page_has_its_writes_in_turn() {
    let page = "-".repeat(PAGE as usize);
    let begun = Steps::new().create("a").write("a", 0, &page).write("a", PAGE, "-");
    let steps =
        begun.sync("a").sync(".").write("a", 0, "1").write("a", 0, "2").write("a", PAGE, "3");
    let lost = |first: &str, last: &str| format!("a={first}{}{last}", &page[1..]);
    let pairs = [("-", "-"), ("1", "-"), ("2", "-"), ("-", "3"), ("1", "3"), ("2", "3")];
    let expected = pairs.iter().map(|(first, last)| lost(first, last)).collect();
    assert_eq!(at_the_end(steps, Model::Strict), expected);
}

#[test]
fn what_follows_a_truncate_needs_it() {
    let begun = || Steps::new().create("a").write("a", 0, "old").sync("a").sync(".");
    let steps = begun().resize("a", 0).write("a", 0, "n");
    assert_eq!(at_the_end(steps, Model::Strict), set(&["a=old", "a=", "a=n"]));
}

#[test]
fn names_change_in_order_where_there_is_a_journal() {
    let begun = || Steps::new().create("a").sync(".");
    let steps = || begun().create("b").remove("a");
    assert_eq!(at_the_end(steps(), Model::Strict), set(&["a=", "a= b=", "", "b="]));
    assert_eq!(at_the_end(steps(), Model::Ordered), set(&["a=", "a= b=", "b="]));
}

#[test]
fn a_write_is_torn_between_sectors_if_it_may_be() {
    let torn = |grain: u64| {
        let history: History =
            Steps::new().create("a").sync(".").write("a", 0, &"x".repeat(1024)).0.finish();
        let atoms = Atoms::from_history(&history, Model::Strict, pages(grain));
        states(&atoms, history.steps.len(), &output_lengths(&history), 1000, 1).states.len()
    };
    // None, no data, all; and with `--torn` only the first or the last sector.
    assert_eq!((torn(PAGE), torn(512)), (3, 5));
}

/// Method: of a history with more states than may be checked, a sample is taken, the same for a seed.
#[test]
fn a_choice_is_of_its_seed() {
    let mut steps = Steps::new().create("a").sync(".");
    for page in 0..20 {
        steps = steps.write("a", page * PAGE, "x");
    }
    let history = steps.0.finish();
    let atoms = Atoms::from_history(&history, Model::Strict, pages(PAGE));
    let choice = |seed| {
        let found = states(&atoms, history.steps.len(), &output_lengths(&history), 200, seed);
        assert!(!found.is_all && found.states.len() == 200);
        let lost = |state: &super::State| (state.cut, state.lost.clone());
        found.states.iter().map(lost).collect::<Vec<_>>()
    };
    assert_eq!(choice(1), choice(1));
    assert_ne!(choice(1), choice(2));
    // No state lacks a change that a sync has covered.
    let is_there = |cut: usize, lost: &super::model::Lost| {
        atoms.tree(cut, lost).find(ROOT, "a".as_ref()).is_some()
    };
    assert!(choice(1).iter().all(|(cut, lost)| *cut < 2 || is_there(*cut, lost)));
}

/// Goal: an untorn block is lost as a whole, other parts of a write page by page, and a page after one of its writes.
#[test]
fn untorn_blocks_are_lost_as_a_whole() {
    const BLOCK: u64 = 4 * PAGE;
    let page = |byte: char| byte.to_string().repeat(PAGE as usize);
    let block = |byte: char| page(byte).repeat(4);
    let steps = Steps::new().create("f").write("f", 0, &block('a')).sync("f").sync(".");
    // One page, then a block and a page; the second block begins within the second write.
    let steps = steps.write("f", PAGE, &page('b')).write("f", 0, &(block('c') + &page('d')));
    let history = steps.0.finish();
    let lost_alone = |untorn_bytes: u64| -> usize {
        let grain = Grain { page_bytes: PAGE, untorn_bytes };
        Atoms::from_history(&history, Model::Strict, grain).losable(history.steps.len()).len()
    };
    assert_eq!((lost_alone(0), lost_alone(BLOCK)), (1 + 5, 1 + 2));
    let grain = Grain { page_bytes: PAGE, untorn_bytes: BLOCK };
    let atoms = Atoms::from_history(&history, Model::Strict, grain);
    let found = states(&atoms, history.steps.len(), &output_lengths(&history), 1000, 1);
    assert!(found.is_all);
    for state in found.states.iter().filter(|state| state.cut == history.steps.len()) {
        let text = atoms.tree(state.cut, &state.lost).to_string();
        let count = |byte: char| text.matches(byte).count() as u64;
        // The block after all of its writes, or before the last one, with or without the first.
        assert!([0, BLOCK].contains(&count('c')), "{}", count('c'));
        assert!(count('c') == 0 || count('b') == 0);
        assert!([0, PAGE].contains(&count('d')));
    }
}
