//! The settings of a store.

use std::path::PathBuf;
use std::time::Duration;

use millpond_objects::Freshness;
use millpond_serve::default_socket;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

/// The settings of a store, as `millpond.store` got them.
pub(crate) struct StoreSettings {
    pub(crate) url: String,
    pub(crate) memory: u64,
    pub(crate) disk: Option<(PathBuf, u64)>,
    /// `None`: the choice of the server; in this process `Revalidate`.
    pub(crate) freshness: Option<Freshness>,
    pub(crate) options: Vec<(String, String)>,
    pub(crate) socket: SocketChoice,
}

impl StoreSettings {
    /// The arguments of `millpond.store` beside the URL. The options may have keys.
    pub(crate) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let settings = PyDict::new(py);
        settings.set_item("memory", self.memory)?;
        settings.set_item("disk", self.disk.as_ref())?;
        match self.freshness {
            Some(Freshness::Immutable) => settings.set_item("freshness", "immutable")?,
            Some(Freshness::MaxAge(age)) => settings.set_item("freshness", age.as_secs_f64())?,
            Some(_) => settings.set_item("freshness", "revalidate")?,
            None => settings.set_item("freshness", py.None())?,
        }
        match &self.socket {
            SocketChoice::Default => settings.set_item("socket", py.None())?,
            SocketChoice::Off => settings.set_item("socket", false)?,
            SocketChoice::Path(path) => settings.set_item("socket", path)?,
        }
        let options = PyDict::new(py);
        for (name, value) in &self.options {
            options.set_item(name, value)?;
        }
        settings.set_item("options", options)?;
        Ok(settings)
    }
}

/// Where a server is looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SocketChoice {
    /// At the usual place, if there is one.
    Default,
    /// Nowhere.
    Off,
    /// At this path.
    Path(PathBuf),
}

impl SocketChoice {
    /// From the argument `socket`: `None`, `False` or a path.
    pub(crate) fn of(given: &Bound<'_, PyAny>, url: &str) -> PyResult<SocketChoice> {
        let is_memory = url.starts_with("memory://");
        if given.is_none() {
            return Ok(if is_memory { SocketChoice::Off } else { SocketChoice::Default });
        }
        if let Ok(flag) = given.cast::<PyBool>() {
            if flag.is_true() {
                let what =
                    "socket=True: must be a path, None for the usual place, or False for no server";
                return Err(PyTypeError::new_err(what));
            }
            return Ok(SocketChoice::Off);
        }
        let path: PathBuf = given.extract()?;
        if is_memory {
            let what = "is a store of this process, which no server can read: without socket=";
            return Err(PyValueError::new_err(format!("store {url:?}: {what}")));
        }
        if path.as_os_str().is_empty() {
            return Err(PyValueError::new_err("socket='': must be a path"));
        }
        Ok(SocketChoice::Path(std::path::absolute(path)?))
    }

    /// The path, and whether the program has named it.
    pub(crate) fn path(&self) -> Option<(PathBuf, bool)> {
        match self {
            SocketChoice::Default => Some((default_socket()?, false)),
            SocketChoice::Off => None,
            SocketChoice::Path(path) => Some((path.clone(), true)),
        }
    }
}

/// From the argument `freshness`: `None` is the choice of the server.
pub(crate) fn freshness(given: &Bound<'_, PyAny>) -> PyResult<Option<Freshness>> {
    if given.is_none() {
        return Ok(None);
    }
    match given.extract::<&str>() {
        Ok("immutable") => return Ok(Some(Freshness::Immutable)),
        Ok("revalidate") => return Ok(Some(Freshness::Revalidate)),
        Ok(_) => {}
        Err(_) => {
            let seconds = given.extract::<f64>().ok();
            let age = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            if let Some(age) = age {
                return Ok(Some(Freshness::MaxAge(age)));
            }
        }
    }
    Err(PyValueError::new_err(format!(
        "freshness {}: must be 'immutable', 'revalidate', or a number of seconds",
        given.repr()?
    )))
}

/// Options as text: numbers and truth values are written as `object_store` reads them.
pub(crate) fn options(given: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, String)>> {
    let mut list = Vec::new();
    for (name, value) in given.into_iter().flatten() {
        let name: String = name.extract()?;
        if value.is_none() {
            continue;
        }
        let text = if let Ok(flag) = value.extract::<bool>() {
            flag.to_string()
        } else if value.is_instance_of::<PyString>() || value.extract::<i64>().is_ok() {
            value.str()?.to_string()
        } else {
            return Err(PyTypeError::new_err(format!(
                "option {name:?}: must be a str, an int or a bool"
            )));
        };
        list.push((name, text));
    }
    Ok(list)
}
