//! I/O below the cache: vectored transfers, and the backends that perform them.
//!
//! From the bottom: `segment` and `transfer` (the bytes to move), `batch`, `signal`, `reaper` and
//! `pool` (wake-ups, and the threads that make them), the trait in `backend`, the backends,
//! `retry` (transfers with retries) and `read_limit` (the limit of reads in flight).
//!
//! # Ways to submit
//!
//! | way | use |
//! |---|---|
//! | a plain call (`descriptors/calls`) | one transfer, whose caller waits |
//! | a thread's ring (`local_ring`, by `uring`) | a batch, whose caller waits |
//! | the same with registered files and buffers (`fixed_ring`) | requests of a pipeline |
//! | the driver's ring (`read_ring`, by `driver`) | background reads |
//! | a queue's ring (`read_ring`, by `shared_ring`) | background reads of a queue: its waiter reaps |
//! | Linux AIO, a batch (`aio`) | a batch without a descriptor, direct in place |
//! | Linux AIO, reaped by a thread (`aio_reads`) | direct reads that tasks wait for, without io_uring |
//! | readers (`readers`, a `pool`) | all other background reads: buffered without io_uring, `sim` |
//!
//! Each way exists because of a measurement: see "Ways to submit I/O" in docs/benchmarks.md.

pub(crate) mod segment_list;

pub(crate) mod segment;

pub(crate) mod transfer;

pub(crate) mod bounce;

pub(crate) mod retry;

pub(crate) mod read_limit;

pub(crate) mod batch;

pub(crate) mod signal;

pub(crate) mod reaper;

pub(crate) mod pool;

pub(crate) mod backend;
