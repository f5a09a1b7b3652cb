//! Arguments and results of calls for object stores, from and to Python.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use millpond_objects::Stats;
use millpond_serve::ClientStats;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, GetRange, ListResult, ObjectMeta, PutMode, PutResult,
    UpdateVersion,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::buffer::{PyMemory, new_bytes, start_of};

/// Longer copies run detached from the interpreter.
const ATTACHED_COPY_MAX: usize = 64 << 10;

/// The name of an object. A `ValueError` names it if a store can't have it.
pub(crate) fn path(name: &str) -> PyResult<Path> {
    Path::parse(name).map_err(|error| PyValueError::new_err(format!("{name:?}: {error}")))
}

/// A prefix of names, as a folder; `None` and the empty one: all objects.
pub(crate) fn prefix(name: Option<&str>) -> PyResult<Option<Path>> {
    let parsed = name.map(path).transpose()?;
    Ok(parsed.filter(|path| !path.as_ref().is_empty()))
}

/// A range from `start`, and one of `end` and `length`.
pub(crate) fn range(start: u64, end: Option<u64>, length: Option<u64>) -> PyResult<Range<u64>> {
    let end = match (end, length) {
        (Some(end), None) => end,
        (None, Some(length)) => start.checked_add(length).ok_or_else(|| {
            PyValueError::new_err(format!("start {start}: no object has {length} bytes after it"))
        })?,
        _ => return Err(PyTypeError::new_err("one of end and length is needed")),
    };
    if end < start {
        return Err(PyValueError::new_err(format!(
            "the range ends at {end}, before its start {start}"
        )));
    }
    Ok(start..end)
}

/// Ranges from lists of the same length.
pub(crate) fn ranges(
    starts: &[u64],
    ends: Option<&[u64]>,
    lengths: Option<&[u64]>,
) -> PyResult<Vec<Range<u64>>> {
    let others = match (ends, lengths) {
        (Some(others), None) | (None, Some(others)) => others,
        _ => return Err(PyTypeError::new_err("one of ends and lengths is needed")),
    };
    if others.len() != starts.len() {
        let (starts, others) = (starts.len(), others.len());
        return Err(PyValueError::new_err(format!(
            "{starts} starts, and {others} ends or lengths"
        )));
    }
    let each = starts.iter().zip(others);
    each.map(|(&start, &other)| range(start, ends.map(|_| other), lengths.map(|_| other))).collect()
}

/// A copy of an object with the buffer protocol. A copy, as the program may change the buffer during the request.
pub(crate) fn payload(data: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    let memory = PyMemory::readable(data)?;
    let (start, len) = (memory.start() as usize, memory.len());
    if len == 0 {
        return Ok(Bytes::new());
    }
    let mut copy: Vec<u8> = Vec::new();
    copy.try_reserve_exact(len).map_err(|_| no_memory(len))?;
    data.py().detach(|| {
        // SAFETY: an exported buffer is valid for reads until it is dropped, which is after this, and the list has room
        // for its bytes. A program that writes to it at the same time gets any mixture of bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(start as *const u8, copy.as_mut_ptr(), len);
            copy.set_len(len);
        }
    });
    Ok(copy.into())
}

fn no_memory(len: usize) -> PyErr {
    pyo3::exceptions::PyMemoryError::new_err(format!("no memory for {len} bytes"))
}

/// Bytes of Python from consecutive pieces.
pub(crate) fn to_bytes<'py>(py: Python<'py>, pieces: &[Bytes]) -> PyResult<Bound<'py, PyBytes>> {
    let len = pieces.iter().map(Bytes::len).sum();
    let bytes = new_bytes(py, len)?;
    let start = start_of(&bytes) as usize;
    let copy = || {
        let mut at = start as *mut u8;
        for piece in pieces {
            // SAFETY: a new object of `len` bytes, the sum of all pieces, which nothing else refers to yet.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), at, piece.len());
                at = at.add(piece.len());
            }
        }
    };
    if len > ATTACHED_COPY_MAX {
        py.detach(copy)
    } else {
        copy()
    }
    Ok(bytes)
}

/// Size, time and version of an object, in the form of obstore.
pub(crate) fn meta<'py>(py: Python<'py>, meta: &ObjectMeta) -> PyResult<Bound<'py, PyDict>> {
    static EPOCH: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();
    let (epoch, timedelta) = EPOCH.get_or_try_init(py, || {
        let datetime = py.import("datetime")?;
        let utc = datetime.getattr("timezone")?.getattr("utc")?;
        let arguments = (1970, 1, 1, 0, 0, 0, 0, utc);
        let epoch = datetime.getattr("datetime")?.call1(arguments)?;
        Ok::<_, PyErr>((epoch.unbind(), datetime.getattr("timedelta")?.unbind()))
    })?;
    let modified = meta.last_modified;
    let since = (0, modified.timestamp(), modified.timestamp_subsec_micros());
    let dict = PyDict::new(py);
    dict.set_item("path", meta.location.as_ref())?;
    dict.set_item("last_modified", epoch.bind(py).add(timedelta.bind(py).call1(since)?)?)?;
    dict.set_item("size", meta.size)?;
    dict.set_item("e_tag", meta.e_tag.as_deref())?;
    dict.set_item("version", meta.version.as_deref())?;
    Ok(dict)
}

pub(crate) fn metas<'py>(py: Python<'py>, list: &[ObjectMeta]) -> PyResult<Bound<'py, PyList>> {
    let dicts = list.iter().map(|one| meta(py, one)).collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, dicts)
}

pub(crate) fn list_result<'py>(py: Python<'py>, list: &ListResult) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let prefixes = list.common_prefixes.iter().map(Path::as_ref);
    dict.set_item("common_prefixes", PyList::new(py, prefixes.collect::<Vec<&str>>())?)?;
    dict.set_item("objects", metas(py, &list.objects)?)?;
    Ok(dict)
}

pub(crate) fn put_result<'py>(py: Python<'py>, put: &PutResult) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("e_tag", put.e_tag.as_deref())?;
    dict.set_item("version", put.version.as_deref())?;
    Ok(dict)
}

/// The counts of the cache in this process, and of reads by a server.
pub(crate) fn stats<'py>(
    py: Python<'py>,
    own: &Stats,
    client: &ClientStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in [
        ("hits", own.hits),
        ("misses", own.misses),
        ("bytes_from_memory", own.bytes_from_memory),
        ("bytes_from_store", own.bytes_from_store),
        ("requests", own.requests),
        ("not_modified", own.not_modified),
        ("requests_saved", own.requests_saved),
        ("objects", own.objects),
        ("memory_bytes", own.memory_bytes),
        ("disk_hits", own.disk_hits),
        ("bytes_from_disk", own.bytes_from_disk),
        ("disk_pages", own.disk_pages),
        ("disk_bytes_written", own.disk_bytes_written),
        ("disk_pages_dropped", own.disk_pages_dropped),
        ("disk_pages_damaged", own.disk_pages_damaged),
        ("disk_errors", own.disk_errors),
    ] {
        dict.set_item(name, count)?;
    }
    dict.set_item("disk_is_off", own.disk_is_off)?;
    dict.set_item("is_attached", client.is_attached)?;
    for (name, count) in [
        ("server_hits", client.hits),
        ("server_hit_bytes", client.hit_bytes),
        ("server_misses", client.misses),
        ("fallbacks", client.fallbacks),
        ("attaches", client.attaches),
    ] {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}

const ATTRIBUTES: [(&str, Attribute); 6] = [
    ("Content-Disposition", Attribute::ContentDisposition),
    ("Content-Encoding", Attribute::ContentEncoding),
    ("Content-Language", Attribute::ContentLanguage),
    ("Content-Type", Attribute::ContentType),
    ("Cache-Control", Attribute::CacheControl),
    ("Storage-Class", Attribute::StorageClass),
];

/// Attributes of an object, by the names of HTTP; other names are the program's own.
pub(crate) fn attributes(given: Option<&Bound<'_, PyDict>>) -> PyResult<Attributes> {
    let mut attributes = Attributes::new();
    for (name, value) in given.into_iter().flatten() {
        let (name, value): (String, String) = (name.extract()?, value.extract()?);
        let known = ATTRIBUTES.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name));
        let key = known.map_or_else(
            || Attribute::Metadata(Cow::Owned(name)),
            |(_, attribute)| attribute.clone(),
        );
        attributes.insert(key, value.into());
    }
    Ok(attributes)
}

pub(crate) fn attributes_dict<'py>(
    py: Python<'py>,
    attributes: &Attributes,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (attribute, value) in attributes {
        let known = ATTRIBUTES.iter().find(|(_, known)| known == attribute);
        match (known, attribute) {
            (Some((name, _)), _) => dict.set_item(name, value.as_ref())?,
            (None, Attribute::Metadata(name)) => dict.set_item(name.as_ref(), value.as_ref())?,
            (None, _) => {}
        }
    }
    Ok(dict)
}

/// The condition of a put: `None`, `"overwrite"`, `"create"`, or a dict with `e_tag` and `version`.
pub(crate) fn put_mode(mode: Option<&Bound<'_, PyAny>>) -> PyResult<PutMode> {
    let Some(mode) = mode else { return Ok(PutMode::Overwrite) };
    if let Ok(version) = mode.cast::<PyDict>() {
        let field = |name: &str| -> PyResult<Option<String>> {
            version.get_item(name)?.map_or(Ok(None), |value| value.extract())
        };
        let update = UpdateVersion { e_tag: field("e_tag")?, version: field("version")? };
        return Ok(PutMode::Update(update));
    }
    match mode.extract::<&str>().unwrap_or_default() {
        "overwrite" => Ok(PutMode::Overwrite),
        "create" => Ok(PutMode::Create),
        _ => Err(PyValueError::new_err(format!(
            "mode {}: must be 'overwrite', 'create', or a dict with e_tag and version",
            mode.repr()?
        ))),
    }
}

/// The options of a get, by name.
pub(crate) fn get_options(given: Option<&Bound<'_, PyDict>>) -> PyResult<GetOptions> {
    let mut options = GetOptions::new();
    for (name, value) in given.into_iter().flatten() {
        match name.extract::<String>()?.as_str() {
            "if_match" => options.if_match = value.extract()?,
            "if_none_match" => options.if_none_match = value.extract()?,
            "version" => options.version = value.extract()?,
            "head" => options.head = value.extract()?,
            "range" => options.range = get_range(&value)?,
            other => {
                return Err(PyValueError::new_err(format!(
                    "option {other:?}: must be if_match, if_none_match, version, head or range"
                )));
            }
        }
    }
    Ok(options)
}

/// A range of a get: `(start, end)`, `{"offset": start}` or `{"suffix": length}`.
fn get_range(value: &Bound<'_, PyAny>) -> PyResult<Option<GetRange>> {
    if value.is_none() {
        return Ok(None);
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        if let Some(offset) = dict.get_item("offset")? {
            return Ok(Some(GetRange::Offset(offset.extract()?)));
        }
        if let Some(suffix) = dict.get_item("suffix")? {
            return Ok(Some(GetRange::Suffix(suffix.extract()?)));
        }
    } else if let Ok((start, end)) = value.extract::<(u64, u64)>() {
        return Ok(Some(GetRange::Bounded(range(start, Some(end), None)?)));
    }
    Err(PyValueError::new_err(format!(
        "range {}: must be (start, end), {{'offset': start}} or {{'suffix': length}}",
        value.repr()?
    )))
}
