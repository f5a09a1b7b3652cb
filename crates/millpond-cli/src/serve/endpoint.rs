//! The settings of the S3 endpoint.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, REFUSED, Result};

/// Where the endpoint listens, and its key.
#[derive(Debug)]
pub struct EndpointSettings {
    pub address: Option<SocketAddr>,
    pub socket: Option<PathBuf>,
    pub key_file: PathBuf,
}

/// An address, or a port of 127.0.0.1. The endpoint itself refuses addresses that are not loopback.
pub fn parse_address(text: &str) -> std::result::Result<SocketAddr, String> {
    let port = || Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?));
    let address: Option<SocketAddr> = text.parse().ok().or_else(port);
    let address =
        address.ok_or("neither IP:PORT, such as 127.0.0.1:9000, nor the port of 127.0.0.1")?;
    if address.ip().to_canonical().is_loopback() {
        Ok(address)
    } else {
        Err(format!(
            "{} is no loopback address: the endpoint serves this machine only",
            address.ip()
        ))
    }
}

impl EndpointSettings {
    /// None: the server has no endpoint. `directory`: that of the server's socket.
    pub fn new(
        (address, socket): (Option<SocketAddr>, Option<&Path>),
        key_file: Option<&Path>,
        directory: &Path,
    ) -> Result<Option<EndpointSettings>> {
        if address.is_none() && socket.is_none() {
            if key_file.is_some() {
                let what = "--key-file is of an endpoint: give --endpoint or --endpoint-socket";
                return Err(Failure::new(REFUSED, what));
            }
            return Ok(None);
        }
        if cfg!(not(feature = "endpoint")) {
            let what =
                "this program was built without the endpoint: build it with `--features endpoint`";
            return Err(Failure::new(REFUSED, what));
        }
        let key_file = key_file.map_or_else(|| directory.join("credentials"), Path::to_owned);
        let socket = socket.map(Path::to_owned);
        Ok(Some(EndpointSettings { address, socket, key_file }))
    }
}
