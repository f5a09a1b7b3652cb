//! The native part of the Python package `millpond`: docs/python.md.
//!
//! A call goes from `file` (positions, modes, the buffer protocol) by `handle` (the open file of this process) to the
//! engine. `queue` does the same for asyncio. `store` has object stores. Python's own part is in `python/millpond`.

mod buffer;
mod engine;
mod error;
mod file;
mod handle;
mod process;
mod queue;
mod range_lock;
mod store;
mod wait;

use std::sync::OnceLock;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// The native part of `millpond`. Its locking relies on the interpreter's lock (`process::lock`), so that an interpreter
/// without one takes it into use with this module.
#[pymodule(gil_used = true)]
fn _millpond(module: &Bound<'_, PyModule>) -> PyResult<()> {
    refuse_other_interpreters()?;
    module.add_class::<file::opened::File>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<range_lock::LockedRange>()?;
    module.add_class::<queue::LoopQueue>()?;
    module.add_function(wrap_pyfunction!(file::file_methods::open, module)?)?;
    module.add_function(wrap_pyfunction!(file::file_methods::_load_file, module)?)?;
    module.add_function(wrap_pyfunction!(engine::configure, module)?)?;
    module.add_function(wrap_pyfunction!(engine::default_engine, module)?)?;
    module.add_class::<store::calls::Store>()?;
    module.add_class::<store::body::StoredObject>()?;
    module.add_class::<store::body::ObjectPieces>()?;
    module.add_class::<store::listing::ListStream>()?;
    module.add_class::<store::writer::ObjectWriter>()?;
    module.add_class::<store::operation::Pending>()?;
    module.add_class::<store::operation::Completed>()?;
    module.add_class::<store::operation::Completions>()?;
    module.add_function(wrap_pyfunction!(store::writer::_part_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(process::_wait_for_last_tasks, module)?)?;
    module.add_function(wrap_pyfunction!(store::endpoint::_start_endpoint, module)?)?;
    let py = module.py();
    module.add("StoreError", py.get_type::<store::failure::StoreError>())?;
    module.add("PreconditionError", py.get_type::<store::failure::PreconditionError>())?;
    module.add("NotModifiedError", py.get_type::<store::failure::NotModifiedError>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// The classes and the default engine are those of one interpreter: objects of another one must not meet them.
fn refuse_other_interpreters() -> PyResult<()> {
    static FIRST: OnceLock<i64> = OnceLock::new();
    // SAFETY: the calling thread is attached to an interpreter.
    let own = unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) };
    if *FIRST.get_or_init(|| own) == own {
        return Ok(());
    }
    let what = "millpond is in use by another interpreter of this process, and does not support subinterpreters";
    Err(PyImportError::new_err(what))
}
