//! A cache that other processes read: they map its memory read-only, and hit without a system call.
//!
//! The process with the engine is the *server*, and a process that maps its memory is a *client*. File cores, table
//! nodes, page words and frames lie in one file of shared memory and refer to each other by index, so the lock-free
//! read (`read::hit`) works on any mapping of it. A client has no other way to the cache: for a miss it asks the server.
//!
//! ```text
//!   server                                                  client
//!   shared_memory: file, chunk by chunk, writable  =======> client_range: the whole file, read-only
//!   client_list  <======= client_block: attempts, touched frames ======= one slot for each thread
//!     | before memory is given back: have the attempts ended?     attempts
//!     | before victims are chosen: which frames were read?        touched
//! ```
//!
//! The state of a client's thread is its attempt count: IDLE (even) -- begin --> READING (odd) -- end --> IDLE.
//!
//! - **SH1** A client stores nothing in the server's memory, and has no right to: its descriptor is open for reading, and
//!   the file's mode allows no process to open it for writing (root may). So the death of a client at any moment leaves
//!   the cache as it is.
//! - **SH2** The rules of a lock-free read hold for a client as they are (page.W1, page.W2, frames.W8, epoch.V2, epoch.V4).
//!   It reads in the address range only, as the file is as long as the range from the start, and 2 MiB longer.
//! - **SH3** *REFERENCED.* A client pushes the frame of a page that has the bit clear onto its thread's ring (`touched`):
//!   one store. The server sets the bit when it next looks for victims or queues new pages. The ring is a hint: entries are lost when it is
//!   full, and an entry may name a frame that has another page since. The server checks each number.
//! - **SH4** *Memory given back.* A hole in shared memory is filled by any access, a read as well, and that memory would not
//!   be charged. A client reads a frame only in an attempt that found it in the table. So the server takes frames off
//!   the free list, orders that before its look at the counts, and gives the memory back when each attempt that was
//!   under way has ended (or SH7). Attempts that begin later do not find the frames. The order is that of two threads which store,
//!   fence (SeqCst) and load: either the server sees the attempt, or the client sees that the frame has left its page.
//!   The client's fence is executed for it by the server, by `membarrier`, where both have that call and
//!   the client has registered (`attempts::ClientOrder`).
//! - **SH5** *Files.* A client knows a file by core and generation. The generation rises when the file is closed, and the
//!   epoch rises before the core is used again, so before the size or the root changes; neither ever repeats. An
//!   attempt loads the epoch, then compares the generation, and at its end compares the epoch. A page size
//!   belongs to a core for good, as it is read without an atomic (`slab`).
//! - **SH6** *Growth.* A chunk that gets a class later is in each client's mapping already. Its nodes are zeroed before
//!   they are linked (table), and its frames are written before a word names them (page.W1).
//! - **SH7** The server waits 100 µs at most. A thread that does not end its attempt (it is stopped, or has lost its
//!   processor) may fill the holes of pages which that attempt found, 64 at most, when it goes on. So a client can't keep
//!   the server from giving memory back, and the limit is exceeded by no more than that. Holes that were filled are
//!   made again later, if more memory is resident than is charged.
//!
//! The server's own threads do not count attempts. A thread of the server that is still copying from a frame whose
//! memory was given back may fill that hole, as with a keeper. It is a page at most for each page that the thread reads, until
//! the frame is used again.
//!
//! *Fork.* A child of the server finds zeros (`forked_ranges`). A child of a client has no slot of its own, and reads nothing.
//!
//! Locks: the list of clients, a leaf lock.

pub(crate) mod attempts;

pub(crate) mod touched;

pub(crate) mod client_block;

pub(crate) mod client_list;

pub(crate) mod shared_memory;

pub(in crate::cache) mod forked_ranges;

pub(crate) mod client_range;
