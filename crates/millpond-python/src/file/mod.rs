//! `millpond.File`: a file with the methods of `io.BufferedIOBase`, and reads and writes by offset.
//!
//! `file_methods` has the calls of the class. They go by `reads` and `writes` to `opened`, the open file with its position.
//!
//! - Cached bytes are copied while the thread is attached to the interpreter, up to `reads::ATTACHED_BYTES_MAX`. All else
//!   runs detached.
//! - The memory of buffers is passed to the engine as raw memory, as Python threads may change it at any time.

pub(crate) mod file_methods;
pub(crate) mod opened;
mod reads;
mod writes;
