//! Errors of an endpoint's configuration and of its listeners.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why an endpoint can't be built, or ended.
///
/// # Examples
///
/// ```
/// use millpond_endpoint::{Endpoint, Error};
///
/// let open = Endpoint::builder().listen("0.0.0.0:9000".parse().unwrap()).build();
/// assert!(matches!(open, Err(Error::NotLoopback { .. })));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address is not a loopback address, so other machines could connect.
    NotLoopback {
        /// The refused address.
        address: SocketAddr,
    },
    /// Neither an address nor a socket path was given.
    NoListener,
    /// The name breaks the rules of S3 for bucket names, or is given twice.
    BucketName {
        /// The refused name.
        name: String,
        /// The broken rule.
        reason: &'static str,
    },
    /// The file of the access key can't be used.
    KeyFile {
        /// Path of the file or of its directory.
        path: PathBuf,
        /// The fault and its correction.
        reason: String,
    },
    /// A listener failed.
    Listen {
        /// The address or the path of the listener.
        on: String,
        /// The system's error.
        source: io::Error,
    },
    /// The directory for the parts of multipart uploads can't be used.
    Spool {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLoopback { address } => write!(
                f,
                "{address} is no loopback address: the endpoint serves this machine only, for example on 127.0.0.1:9000"
            ),
            Self::NoListener => {
                write!(f, "the endpoint has neither an address nor a socket path to listen on")
            }
            Self::BucketName { name, reason } => write!(f, "bucket {name:?}: {reason}"),
            Self::KeyFile { path, reason } => {
                write!(f, "access key in {}: {reason}", path.display())
            }
            Self::Listen { on, source } => write!(f, "can't listen on {on}: {source}"),
            Self::Spool { path, source } => {
                write!(f, "can't store parts of uploads in {}: {source}", path.display())
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Listen { source, .. } | Self::Spool { source, .. } => Some(source),
            _ => None,
        }
    }
}
