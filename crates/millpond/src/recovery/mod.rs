//! Crash persistence: dirty pages survive the death of the process that wrote them.
//!
//! The frames of an engine with a keeper, and tables that describe them, are in one mapping (a memfd) that
//! a second process, the keeper (a recovery daemon), holds too. When the engine's process dies, the keeper
//! reads the tables and writes the dirty pages to their files.
//!
//! ```text
//!   engine: client  --- message: memfd, files --->  keeper     (wire: the messages)
//!              |    <-- memory: a robust futex ---    |        (life)
//!           tables  ====== the mapping =======>    replay      (layout: what lies where)
//!              |                                      |
//!          changes  --- to the file, recorded        +--> the file, or a rescue file (target, rescue)
//!
//!   open, by any process: waits at the file's mark until its keeper is done      (mark)
//! ```
//!
//! # Shared tables
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
//! For the keeper, a page is dirty if one of its records is DIRTY, or PENDING of an op slot that is
//! COMMITTED with the same generation. Of several records the highest sequence counts. The size of a file
//! is that of a COMMITTED op slot of the file that has one, else that of its entry.
//!
//! # States after a kill
//!
//! A killed thread has executed a prefix of its instructions, and all stores of that prefix are visible in
//! the mapping when the keeper reads it: the keeper learns of the death after the last thread has left the
//! processor. The threads stop at different moments, but a store that one of them has seen has been
//! executed. So only the order of stores within each thread matters; they are atomics with Release, so that
//! the compiler keeps the order, too. (No loom test fails when one is weakened: a model of a kill is two
//! threads that stop and are joined, which shows all of their stores.)
//!
//! *One page.* File, page and sequence are stored, then DIRTY. Killed before that store: the record is
//! FREE, and the older contents are valid. After it: the new ones.
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
//! - **K1** A record is PENDING only between the claim and the finish of its op slot, by the one thread
//!   that claimed it; the generation distinguishes a slot's uses.
//! - **K2** A frame's record is FREE before the frame is allocated again (`Frames::try_alloc`), and so
//!   before the first byte of its next contents.
//! - **K3** Sequences of one page grow: writes of one page are serialised by their guards.
//! - **K4** An older frame of a page is clean before a newer one can be. Otherwise the keeper would find
//!   only the older one, and take it for the latest: `Recovery::clean` has the consequences.
//! - **K5** One intent at a time per file. A size changes, by `set_size` or a commit, only under an
//!   exclusive guard to the end of the file, and during a truncation only to the intended size.
//! - **K6** An entry is USED before the keeper receives the file, and UNUSED before the keeper is asked to
//!   forget it; the keeper acts on a file only if both agree.
//! - **K7** A frame is cleaned only by its holder, which keeps it from being allocated during that time:
//!   its page's owner, or a write-back that has it pinned, before it unpins. Otherwise a late `clean` could
//!   clean the frame's next page.
//! - **K8** A change of the file below the cache is IN FLIGHT from before the call of the backend until
//!   after its return; the stored time is read while no change is in flight (`changes`, under a lock).
//! - **K9** Every write that stays in the cache checks whether the keeper lives. A write that finds it dead
//!   is written through, and so are all later ones of the file.
//!
//! *Changes* (`Tables::try_begin_change`, `try_end_change`): the engine records its changes to the file
//! below its cache, so that the keeper can distinguish them from changes by other processes.
//!
//! | killed after                          | the keeper finds                       | it may                   |
//! |---------------------------------------|----------------------------------------|--------------------------|
//! | the reach                             | none in flight, an earlier time        | as before                |
//! | IN FLIGHT, and any part of the change | in flight; its own note of the time    | truncate up to the reach |
//! | the time                              | in flight, the same                    | the same                 |
//! | NONE                                  | none in flight, the time of the change | the same                 |
//!
//! *Size, intent.* The size is one store. An intent's bounds are stored before its kind, which is stored
//! last, and NONE is stored first when it changes. A kill between intent and result redoes an operation
//! that may or may not have been done: its caller has no result either.
//!
//! # The keeper's work
//!
//! For each file, `replay`: checks whether another process has changed the file since the dead process did;
//! waits for direct I/O that the dead process left in flight; redoes the intent; writes the dirty pages,
//! except the ranges that the intent removed and those past the size; extends the file to its size, and
//! truncates only bytes that the process's own changes can have made; syncs it. If a write fails, or would
//! overwrite another process's change, the bytes go into a rescue file. The replay may be repeated from the
//! start at any time (it is idempotent), and reports the bytes that it could not write. Each dead process
//! has a thread, and files on different devices are written concurrently.
//!
//! *Successors.* An open of a file through Millpond waits at its mark until the file is written, or
//! forgotten. Other programs are kept out by a lease for as long as the kernel makes them wait (45 s), if
//! the program had one (`millpond run`) or the keeper gets one; and their writes are not overwritten.
//!
//! *Trust.* The keeper does not trust the contents of the mapping: it reads them with `pread` (a hole stays
//! a hole, and a shrunken file is an error, not a signal), and checks each index. A process can harm only
//! the files that it has handed over: they are written through its own descriptors. Both ends check their
//! peer's identity (wire.WR1), and neither waits indefinitely (wire.WR2): operations that another party can
//! delay (on a file system of another machine, or closing a foreign descriptor) run on threads, of which
//! untrusted processes can start a bounded number (`closer`).
//!
//! *Not survived*: events that kill the keeper, too (a crash of the machine, a kill of the whole
//! container).

pub(crate) mod client;

pub(crate) mod changes;

mod tables;

mod layout;

mod wire;

mod liveness_word;

mod closer;

pub(crate) mod mark;

mod mark_owner;

pub mod keeper;

#[cfg(all(test, not(loom)))]
mod sigkill_tests;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use client::Recovery;
pub(crate) use layout::{EntryUse, Intent};
pub(crate) use wire::Address;
