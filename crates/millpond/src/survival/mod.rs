//! Survival: dirty pages outlive the process that wrote them.
//!
//! The frames of an engine with a keeper, and a map of them, are in one mapping (a memfd) that a
//! second process, the keeper, holds too. When the engine's process dies, the keeper reads the map
//! and writes to each file what was left dirty.
//!
//! ```text
//!   engine: client  --- message: memfd, files --->  keeper     (wire: the messages)
//!              |    <-- memory: a robust futex ---    |        (life)
//!           tables  ====== the mapping =======>    replay      (layout: what lies where)
//!              |                                      |
//!          changes  --- to the file, told of          +--> the file, or a rescue file (target, rescue)
//!
//!   open, of anybody: waits at the file's mark until its keeper is done       (mark)
//! ```
//!
//! # What is shared
//!
//! - A *file entry* per adopted file: in use (with a generation), size, intent, changes below the
//!   cache.
//! - An *op slot* per commit in progress of several pages, or of pages and a size.
//! - A *record* per unit of frames: file, page, write sequence, state. The record of a frame is
//!   that of its first unit.
//!
//! ```text
//!   record:   FREE -- commit, one page ---------------------> DIRTY -- clean --> FREE
//!             FREE -- commit --> PENDING(op, generation) ---> DIRTY
//!   op slot:  IDLE(g) -- claim --> BUSY(g+1) -- commit --> COMMITTED(g+1) -- finish --> IDLE(g+1)
//!   intent:   NONE -- set_intent --> TRUNCATE | PUNCH | ZERO -- clear_intent --> NONE
//!   entry:    UNUSED(g) -- adopt --> USED(g+1) -- forget --> UNUSED(g+1)
//!   changes:  IN FLIGHT -- end, none left --> NONE, time -- begin --> IN FLIGHT, reach
//! ```
//!
//! A page is dirty, for the keeper, if one of its records is DIRTY, or PENDING of an op slot that
//! is COMMITTED with the same generation. Of several the highest sequence counts. The size of a
//! file is that of a COMMITTED op slot of the file that has one, else that of its entry.
//!
//! # What a kill leaves
//!
//! A killed thread has executed a prefix of its instructions, and all stores of that prefix are in
//! the mapping when the keeper looks: it learns of the death after the last thread has left the
//! processor. The threads stop at different moments, but what one of them has seen of another has
//! been executed. So it is the order of stores within each thread that counts; they are atomics
//! with Release, so that the compiler keeps it, too. (No loom test fails where one is weakened: a
//! model of a kill is two threads that stop and are joined, which shows all of their stores.)
//!
//! *One page.* File, page and sequence are stored, then DIRTY. Killed before that store: the record
//! is FREE, and the older contents stand. After it: the new ones.
//!
//! *More* (`Tables::try_commit`):
//!
//! | killed after                       | the keeper finds                        | result |
//! |------------------------------------|-----------------------------------------|--------|
//! | claiming the op slot               | BUSY, no record                         | old    |
//! | some or all records                | PENDING of a slot that is not COMMITTED | old    |
//! | COMMITTED                          | PENDING of a COMMITTED slot, its size   | new    |
//! | the file entry's size              | the same size twice                     | new    |
//! | some or all records turned DIRTY   | DIRTY, or PENDING of a COMMITTED slot   | new    |
//! | IDLE                               | DIRTY, the size in the entry            | new    |
//!
//! - **K1** A record is PENDING only between the claim and the finish of its op slot, by the one
//!   thread that claimed it; the generation tells a slot's uses apart.
//! - **K2** A frame's record is FREE before the frame is handed out again (`Frames::try_alloc`),
//!   and so before the first byte of its next contents.
//! - **K3** Sequences of one page grow: writes of one page are serialised by their guards.
//! - **K4** An older frame of a page is clean before a newer one can be. Else the keeper would find
//!   the older one only, and take it for the latest: `Survival::clean` says what that asks for.
//! - **K5** One intent at a time per file. A size changes, by `set_size` or a commit, only under an
//!   exclusive guard to the end of the file, and during a truncation only to what it intends.
//! - **K6** An entry is USED before the keeper is told of the file, and UNUSED before it is told to
//!   forget it; the keeper acts on a file only if both say the same.
//! - **K7** A frame is cleaned only by its holder, which keeps it from being handed out meanwhile:
//!   its page's owner, or a write-back that has it pinned, before it unpins. Else a late `clean`
//!   could fall on the frame's next page.
//! - **K8** A change of the file below the cache is IN FLIGHT from before the back end is told of
//!   it to after it has answered; the time that is stored is asked for while none is (`changes`,
//!   under a lock).
//! - **K9** The keeper is asked whether it lives by every write that is to wait in the cache. One
//!   that finds it dead goes through, and so do all later ones of the file.
//!
//! *Changes* (`Tables::try_begin_change`, `try_end_change`): what the engine does to the file below
//! its cache, so that the keeper can tell it from what others do.
//!
//! | killed after                        | the keeper finds                       | it may               |
//! |-------------------------------------|----------------------------------------|----------------------|
//! | the reach                           | none in flight, an earlier time        | as before            |
//! | IN FLIGHT, and whatever was done    | in flight; its own note of the time    | cut up to the reach  |
//! | the time                            | in flight, the same                    | the same             |
//! | NONE                                | none in flight, the time of the change | the same             |
//!
//! *Size, intent.* The size is one store. An intent's bounds are stored before its kind, which is
//! stored last, and NONE stored first when it changes. A kill between intent and result redoes an
//! operation that may or may not have been done: its caller was not told either.
//!
//! # What the keeper does
//!
//! For each file, in `replay`: looks whether somebody else has changed it since the dead process
//! did; waits for direct I/O that the dead process left in flight; redoes the intent; writes the
//! dirty pages, without what the intent removed and what lies past the size; makes the file as long
//! as its size, and cuts from it only what the process's own changes can have made; syncs it. What
//! fails, or would overwrite somebody else, it keeps in a rescue file. It does this again from the
//! start if it is told to (nothing in it depends on how often), and reports what it could not
//! write. Processes are buried each by a thread, and files of different devices side by side.
//!
//! *Successors.* An open of a file through Millpond waits at its mark until the file is written, or
//! forgotten. Others are kept out by a lease for as long as the kernel lets them wait (45 s), where
//! the program had one (`millpond run`) or the keeper gets one; and what they write is not
//! overwritten.
//!
//! *Trust.* The keeper takes the mapping for bytes that anybody may have written: it reads them
//! with `pread` (a hole stays a hole, and a shrunken file is an error, not a signal), and checks
//! each index. A process can harm the files that it has handed over, and nothing else: they are
//! written through its own descriptors. Both ends know whom they talk to (wire.WR1), and neither
//! waits for ever (wire.WR2): what may take as long as somebody else likes (a file system of another
//! machine, closing a stranger's descriptor) is done by threads, of which strangers can start a bounded number
//! (`closer`).
//!
//! *Not survived*: what kills the keeper, too (the machine, a container as a whole).

pub(crate) mod client;

pub(crate) mod changes;

mod tables;

mod layout;

mod wire;

mod life;

mod closer;

pub(crate) mod mark;

pub mod keeper;

#[cfg(all(test, not(loom)))]
mod sigkill_tests;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use client::Survival;
pub(crate) use layout::{EntryUse, Intent};
pub(crate) use wire::Address;
