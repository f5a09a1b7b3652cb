//! The S3 endpoint of this process, for `millpond.s3_endpoint`: feature `endpoint`.
//!
//! Its tasks run on the runtime of the process, and end with it. A child of fork is a client of its parent's endpoint, as
//! any other process.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::store::calls::Store;

/// Starts an endpoint on a free port of the loopback address: for `millpond._endpoint`. Returns its URL and the path of
/// its key file.
#[cfg(feature = "endpoint")]
#[pyfunction]
pub(crate) fn _start_endpoint(
    py: Python<'_>,
    buckets: Vec<(String, Py<Store>)>,
    key_file: Option<PathBuf>,
) -> PyResult<(String, PathBuf)> {
    use std::net::{Ipv4Addr, SocketAddr};

    use millpond_endpoint::{Endpoint, Error};
    use pyo3::exceptions::PyValueError;

    use crate::error::os_error;
    use crate::store::runtime;

    let mut builder = Endpoint::builder().listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    for (name, store) in buckets {
        let served = store.get().served();
        builder = builder.store(name, served.store);
        if let Some(lists) = served.lists {
            builder = builder.lists(lists);
        }
        if !served.keeps_metadata {
            builder = builder.drop_metadata();
        }
    }
    if let Some(path) = key_file {
        builder = builder.key_file(path);
    }
    let runtime = runtime::handle()?;
    let endpoint = py.detach(|| builder.build()).map_err(|error| match &error {
        Error::BucketName { .. } => PyValueError::new_err(error.to_string()),
        Error::KeyFile { .. } => os_error(libc::EACCES, &error, None),
        Error::Listen { source, .. } | Error::Spool { source, .. } => {
            os_error(source.raw_os_error().unwrap_or(libc::EIO), &error, None)
        }
        _ => os_error(libc::EIO, &error, None),
    })?;
    let address = endpoint.address().expect("it listens on an address");
    let key_path = endpoint.key_path().to_owned();
    runtime.spawn(endpoint.serve(std::future::pending()));
    Ok((format!("http://{address}"), key_path))
}

/// See above.
#[cfg(not(feature = "endpoint"))]
#[pyfunction]
pub(crate) fn _start_endpoint(
    buckets: Vec<(String, Py<Store>)>,
    key_file: Option<PathBuf>,
) -> PyResult<(String, PathBuf)> {
    drop((buckets, key_file));
    let what = "this millpond was built without the S3 endpoint: build the wheel with `--features endpoint`, as \
                released ones are, or start `millpond serve --endpoint`";
    Err(crate::store::failure::StoreError::new_err((libc::ENOTSUP, what)))
}
