//! Below the cache: vectored transfers and the back ends that carry them out.
//!
//! From the bottom: `segment` and `transfer` (what is moved), `batch`, `signal`, `reaping` and
//! `pool` (wakes, and the threads they come from), the trait in `backend`, the back ends, `request`
//! (transfers to their end) and `flight` (how many there are).
//!
//! # Ways to submit
//!
//! | way | what it is for |
//! |---|---|
//! | a plain call (`descriptors/calls`) | one transfer, whose caller waits |
//! | a thread's ring (`local_ring`, by `uring`) | a batch, whose caller waits |
//! | the same with registered files and buffers (`fixed_ring`) | a pipeline's requests |
//! | the driver's ring (`read_ring`, by `driver`) | reads that nobody waits for |
//! | a queue's ring (`read_ring`, by `shared_ring`) | the same of a queue: its waiter reaps |
//! | Linux AIO, a batch (`aio`) | a batch without a descriptor, direct in place |
//! | Linux AIO, reaped by a thread (`aio_reads`) | direct reads that tasks wait for, without io_uring |
//! | readers (`readers`, a `pool`) | what is left: buffered reads without io_uring, `sim` |
//!
//! Each is there for a figure: see "Ways to submit I/O" in ARCHITECTURE.md.

pub(crate) mod segment_list;

pub(crate) mod segment;

pub(crate) mod transfer;

pub(crate) mod request;

pub(crate) mod flight;

pub(crate) mod batch;

pub(crate) mod signal;

pub(crate) mod reaping;

pub(crate) mod pool;

pub(crate) mod backend;
