//! HTTP and HMAC for `object_store`'s client: hyper over TCP or a Unix socket, one connection for each request.

use std::net::SocketAddr;
use std::path::PathBuf;

use async_trait::async_trait;
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use object_store::client::{
    ClientOptions, CryptoProvider, DigestAlgorithm, DigestContext, HmacContext, HttpClient,
    HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, Signer, SigningAlgorithm,
};
use object_store::{Error, Result};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

#[derive(Debug, Clone)]
pub enum Connector {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Connector {
    pub fn tcp(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }

    pub fn unix(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let refused = |error| HttpError::new(HttpErrorKind::Connect, error);
        match self {
            Self::Tcp(address) => {
                send(TcpStream::connect(address).await.map_err(refused)?, request).await
            }
            Self::Unix(path) => {
                send(UnixStream::connect(path).await.map_err(refused)?, request).await
            }
        }
    }
}

async fn send<S>(
    stream: S,
    mut request: HttpRequest,
) -> std::result::Result<HttpResponse, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let failed = |error| HttpError::new(HttpErrorKind::Interrupted, error);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    tokio::spawn(connection);
    let uri = request.uri().clone();
    if let Some(host) = uri.authority() {
        request.headers_mut().insert("host", host.as_str().parse().unwrap());
        *request.uri_mut() = uri.path_and_query().unwrap().as_str().parse().unwrap();
    }
    let response = sender.send_request(request).await.map_err(failed)?;
    Ok(response.map(|body| {
        HttpResponseBody::new(
            body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error)),
        )
    }))
}

#[derive(Debug)]
pub struct PlainCrypto;

struct Sha(Sha256, Vec<u8>);

struct Keyed(Hmac<Sha256>, Vec<u8>);

impl CryptoProvider for PlainCrypto {
    fn digest(&self, _: DigestAlgorithm) -> Result<Box<dyn DigestContext>> {
        Ok(Box::new(Sha(Sha256::new(), Vec::new())))
    }

    fn hmac(&self, _: DigestAlgorithm, secret: &[u8]) -> Result<Box<dyn HmacContext>> {
        Ok(Box::new(Keyed(Hmac::new_from_slice(secret).unwrap(), Vec::new())))
    }

    fn sign(&self, _: SigningAlgorithm, _: &[u8]) -> Result<Box<dyn Signer>> {
        Err(Error::NotSupported { source: "RSA".into() })
    }
}

impl DigestContext for Sha {
    fn update(&mut self, data: &[u8]) {
        Digest::update(&mut self.0, data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.1 = std::mem::take(&mut self.0).finalize().to_vec();
        Ok(&self.1)
    }
}

impl HmacContext for Keyed {
    fn update(&mut self, data: &[u8]) {
        Mac::update(&mut self.0, data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.1 = self.0.clone().finalize().into_bytes().to_vec();
        Ok(&self.1)
    }
}
