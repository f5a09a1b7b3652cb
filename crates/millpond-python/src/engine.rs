//! `millpond.Engine`: one cache with its limits, and the default engine of the process.

use std::sync::{Arc, Mutex};

use millpond::{Admission, BackendChoice};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;
use crate::process::{self, lock};

/// The limit of an engine without `cache_bytes`. Less than that of the Rust crate, a quarter of the memory, as Python
/// programs have many processes. Chosen, not measured.
const CACHE_BYTES: u64 = 256 << 20;

struct Settings {
    cache_bytes: u64,
    readahead_bytes: Option<u64>,
    admission: String,
    backend: String,
}

impl Settings {
    fn build(&self) -> PyResult<millpond::Engine> {
        let mut builder = millpond::Engine::builder().cache_bytes(self.cache_bytes);
        if let Some(bytes) = self.readahead_bytes {
            builder = builder.readahead_bytes_max(bytes);
        }
        builder = builder.admission(match self.admission.as_str() {
            "adaptive" => Admission::Adaptive,
            "always" => Admission::Always,
            "never" => Admission::Never,
            other => {
                return Err(PyValueError::new_err(format!(
                    "admission {other:?}: must be 'adaptive', 'always' or 'never'"
                )));
            }
        });
        builder = builder.backend(match self.backend.as_str() {
            "auto" => BackendChoice::Auto,
            "uring" => BackendChoice::Uring,
            "threads" => BackendChoice::Threads,
            other => {
                return Err(PyValueError::new_err(format!(
                    "backend {other:?}: must be 'auto', 'uring' or 'threads'"
                )));
            }
        });
        process::watch_forks();
        builder.build().map_err(|error| error::of_engine(&error, None))
    }
}

struct Built {
    engine: Arc<millpond::Engine>,
    generation: u64,
}

/// A cache with a hard memory limit, and the files that are opened in it.
///
/// Most programs need none: `millpond.open` uses the default engine of the process. An engine of its own keeps the
/// files of one purpose from evicting those of another one.
///
/// `cache_bytes` is the memory limit (256 MiB by default), `readahead_bytes` the largest read-ahead (0: none),
/// `admission` which missed pages are cached (`"adaptive"`, `"always"`, `"never"`), `backend` the way to the kernel
/// (`"auto"`, `"uring"`, `"threads"`). A wrong value is a `ValueError`.
///
/// A child of fork, and a process that unpickles an engine, has an empty engine of the same settings.
///
/// >>> import millpond
/// >>> engine = millpond.Engine(cache_bytes=8 << 20)
/// >>> with engine.open("pond.bin", "wb") as file:
/// ...     file.write(b"a pond")
/// 6
/// >>> engine.cache_bytes
/// 8388608
#[pyclass(frozen, weakref, module = "millpond")]
pub(crate) struct Engine {
    settings: Settings,
    built: Mutex<Built>,
}

impl Engine {
    fn make(settings: Settings) -> PyResult<Engine> {
        let engine = Arc::new(settings.build()?);
        let built = Mutex::new(Built { engine, generation: process::generation() });
        Ok(Engine { settings, built })
    }

    /// The engine of this process: a child of fork makes its own at its first use.
    pub(crate) fn get(&self) -> PyResult<Arc<millpond::Engine>> {
        let mut built = lock(&self.built);
        if built.generation != process::generation() {
            let engine = Arc::new(self.settings.build()?);
            *built = Built { engine, generation: process::generation() };
        }
        Ok(Arc::clone(&built.engine))
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (*, cache_bytes=None, readahead_bytes=None, admission="adaptive", backend="auto"))]
    fn new(
        cache_bytes: Option<u64>,
        readahead_bytes: Option<u64>,
        admission: &str,
        backend: &str,
    ) -> PyResult<Engine> {
        let cache_bytes = cache_bytes.unwrap_or(CACHE_BYTES);
        let (admission, backend) = (admission.to_owned(), backend.to_owned());
        Engine::make(Settings { cache_bytes, readahead_bytes, admission, backend })
    }

    /// Opens a file in this engine: `millpond.open` with `cache=` this one.
    ///
    /// >>> import millpond
    /// >>> millpond.Engine(cache_bytes=1 << 20).open("lake.bin", "xb").close()
    #[pyo3(signature = (path, mode="rb", *, atomic=true, untorn=None))]
    fn open<'py>(
        slf: &Bound<'py, Self>,
        path: Bound<'py, PyAny>,
        mode: &str,
        atomic: bool,
        untorn: Option<u32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("millpond._millpond")?;
        module.call_method1("open", (path, mode, slf, atomic, untorn))
    }

    /// Counts since the engine was made, as a dict: pages that were hits, misses and evictions, bytes served, memory
    /// in use, and the back end with the reason for it.
    ///
    /// >>> import millpond
    /// >>> millpond.Engine(cache_bytes=1 << 20).stats()["hits"]
    /// 0
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.get()?;
        let stats = py.detach(|| engine.stats());
        let dict = PyDict::new(py);
        for (name, count) in [
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("fills", stats.fills),
            ("uncached_reads", stats.uncached_reads),
            ("readahead_used", stats.readahead_used),
            ("readahead_wasted", stats.readahead_wasted),
            ("evictions", stats.evictions),
            ("bytes_served", stats.bytes_served),
            ("bytes_passed", stats.bytes_passed),
            ("memory_bytes", stats.memory_bytes),
        ] {
            dict.set_item(name, count)?;
        }
        dict.set_item("back_end", stats.back_end)?;
        dict.set_item("back_end_reason", stats.back_end_reason)?;
        Ok(dict)
    }

    /// The memory limit, in bytes.
    #[getter]
    fn cache_bytes(&self) -> u64 {
        self.settings.cache_bytes
    }

    fn __repr__(&self) -> String {
        format!("millpond.Engine(cache_bytes={})", self.settings.cache_bytes)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let py = slf.py();
        let own = &slf.get().settings;
        let settings = PyDict::new(py);
        settings.set_item("cache_bytes", own.cache_bytes)?;
        settings.set_item("readahead_bytes", own.readahead_bytes)?;
        settings.set_item("admission", &own.admission)?;
        settings.set_item("backend", &own.backend)?;
        let helpers = py.import("millpond._pickle")?;
        let token = if is_default(slf) {
            py.None()
        } else {
            helpers.call_method1("token_of", (slf,))?.unbind()
        };
        Ok((helpers.getattr("load_engine")?, (token, settings).into_pyobject(py)?.into_any()))
    }
}

/// The default engine and the generation that made or configured it.
static DEFAULT: Mutex<Option<(Py<Engine>, u64)>> = Mutex::new(None);

/// The default engine of the process, made at its first use. The settings are for that.
#[pyfunction]
#[pyo3(signature = (*, cache_bytes=None, readahead_bytes=None, admission="adaptive", backend="auto"))]
pub(crate) fn default_engine(
    py: Python<'_>,
    cache_bytes: Option<u64>,
    readahead_bytes: Option<u64>,
    admission: &str,
    backend: &str,
) -> PyResult<Py<Engine>> {
    if let Some((engine, _)) = &*lock(&DEFAULT) {
        return Ok(engine.clone_ref(py));
    }
    let fresh = Py::new(py, Engine::new(cache_bytes, readahead_bytes, admission, backend)?)?;
    *lock(&DEFAULT) = Some((fresh.clone_ref(py), process::generation()));
    Ok(fresh)
}

/// [`default_engine`] without settings of its own.
pub(crate) fn usual_engine(py: Python<'_>) -> PyResult<Py<Engine>> {
    default_engine(py, None, None, "adaptive", "auto")
}

fn is_default(engine: &Bound<'_, Engine>) -> bool {
    lock(&DEFAULT).as_ref().is_some_and(|(default, _)| default.is(engine))
}

/// Makes the default engine of the process, with the settings of `Engine`. Raises `RuntimeError` if there is one: call it
/// before the first `open` of the process. A child of fork may call it, too, before it uses a file.
///
/// >>> import millpond
/// >>> millpond.configure(cache_bytes=64 << 20)  # doctest: +SKIP
#[pyfunction]
#[pyo3(signature = (*, cache_bytes=None, readahead_bytes=None, admission="adaptive", backend="auto"))]
pub(crate) fn configure(
    py: Python<'_>,
    cache_bytes: Option<u64>,
    readahead_bytes: Option<u64>,
    admission: &str,
    backend: &str,
) -> PyResult<()> {
    if let Some((engine, generation)) = &*lock(&DEFAULT) {
        let is_used = lock(&engine.get().built).generation == process::generation();
        if is_used || *generation == process::generation() {
            let what = "the default engine is in use: call configure before the first open";
            return Err(PyRuntimeError::new_err(what));
        }
    }
    let fresh = Py::new(py, Engine::new(cache_bytes, readahead_bytes, admission, backend)?)?;
    // Dropped after the mutex is released, as it may run Python code.
    let _old = lock(&DEFAULT).replace((fresh, process::generation()));
    Ok(())
}
