//! What a process gives away that it shares with others already: nobody serves it again (`forked.K3`). It is said
//! before.

use std::os::fd::RawFd;

use crate::files::table::{self, Known};
use crate::files::watch::{self, Watch};
use crate::runtime::tree;

/// Whether another process may have the description at `fd`, and asks us.
pub fn is_shared(fd: RawFd) -> bool {
    // What is noted of other numbers is of a file that was closed.
    matches!(table::get(fd), Known::Watched | Known::Claimed | Known::Left)
        && watch::of(fd).is_some_and(|watch| watch.number().is_some())
}

/// The description at `fd`, if it is shared.
pub fn give(fd: RawFd) {
    let number = watch::of(fd).filter(|_| is_shared(fd)).and_then(Watch::number);
    if let (Some(number), Some(place)) = (number, tree::place()) {
        place.holders.give(number);
    }
}

/// All that this process shares.
pub fn give_all() {
    if let Some(place) = tree::place() {
        place.holders.give_all(place.slot);
    }
}
