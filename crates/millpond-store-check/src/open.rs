//! Opens an object store by its URL, once for each server that it is reached through (an endpoint).

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;

use crate::Options;
use crate::proxy::Proxy;

/// An endpoint of a store.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
///
/// use millpond_store_check::Endpoint;
///
/// let store = std::sync::Arc::new(object_store::memory::InMemory::new());
/// let endpoint = Endpoint::new("in memory", store);
/// assert!(endpoint.lossy.is_err(), "no connection, so no lost replies");
/// # });
/// ```
#[derive(Debug)]
pub struct Endpoint {
    pub name: String,
    pub store: Arc<dyn ObjectStore>,
    /// The prefix below which to write.
    pub prefix: Path,
    /// The same store through a proxy that can lose replies, or the reason why there is no proxy.
    pub lossy: Result<(Proxy, Arc<dyn ObjectStore>), String>,
}

impl Endpoint {
    /// An endpoint without a proxy that loses replies.
    pub fn new(name: impl Into<String>, store: Arc<dyn ObjectStore>) -> Self {
        let lossy = Err("no connection, so no lost replies".into());
        Self { name: name.into(), store, prefix: Path::default(), lossy }
    }
}

/// Opens the store at a URL through each of `endpoints` (`http://host:port`, only for S3). Without endpoints, it uses
/// `AWS_ENDPOINT`, or else Amazon's. The keys come from the environment (`AWS_ACCESS_KEY_ID` and so on).
///
/// # Errors
///
/// A message that describes the error in the URL or in an endpoint.
pub async fn open(
    url: &str,
    endpoints: &[String],
    options: &Options,
) -> Result<Vec<Endpoint>, String> {
    let (scheme, rest) =
        url.split_once("://").ok_or_else(|| format!("{url:?} is not a URL: SCHEME://..."))?;
    if scheme != "s3" && !endpoints.is_empty() {
        return Err(format!("endpoints are for s3:// only, not for {url:?}"));
    }
    match scheme {
        "memory" if rest.trim_matches('/').is_empty() => {
            Ok(vec![Endpoint::new(url, Arc::new(InMemory::new()))])
        }
        "memory" => Err(format!("{url:?}: a store in memory has no path: memory:///")),
        "file" if rest.starts_with('/') => {
            let store = LocalFileSystem::new_with_prefix(rest)
                .map_err(|error| format!("{url:?}: {error}"))?;
            Ok(vec![Endpoint::new(url, Arc::new(store))])
        }
        "file" => Err(format!("{url:?} has no absolute path: file:///DIR")),
        "s3" => s3::open(rest, endpoints, options).await,
        _ => Err(format!("unknown scheme {scheme:?}: use s3, file or memory")),
    }
}

#[cfg(not(feature = "s3"))]
mod s3 {
    use super::{Endpoint, Options};

    pub async fn open(_: &str, _: &[String], _: &Options) -> Result<Vec<Endpoint>, String> {
        Err("this program was built without S3: build it with `--features s3`".into())
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use object_store::ClientOptions;
    use object_store::RetryConfig;
    use object_store::aws::AmazonS3Builder;

    use super::{Arc, Endpoint, ObjectStore, Options, Path, Proxy};

    pub async fn open(
        rest: &str,
        endpoints: &[String],
        options: &Options,
    ) -> Result<Vec<Endpoint>, String> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err("the URL has no bucket: s3://BUCKET/PREFIX".into());
        }
        let prefix = Path::parse(prefix.trim_matches('/')).map_err(|error| error.to_string())?;
        let named: Vec<Option<String>> = if endpoints.is_empty() {
            vec![
                ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
                    .iter()
                    .find_map(|name| std::env::var(name).ok()),
            ]
        } else {
            endpoints.iter().cloned().map(Some).collect()
        };
        let mut all = Vec::new();
        for endpoint in named {
            let store = build(bucket, endpoint.as_deref(), options)?;
            let lossy = match endpoint.as_deref().and_then(|e| e.strip_prefix("http://")) {
                None => Err("replies can be lost on plain HTTP only, and this is TLS".into()),
                Some(server) => {
                    let server = server.trim_end_matches('/');
                    let server =
                        if server.contains(':') { server.into() } else { format!("{server}:80") };
                    let proxy = Proxy::start(server).await.map_err(|e| format!("proxy: {e}"))?;
                    let through = format!("http://127.0.0.1:{}", proxy.port());
                    let store = build(bucket, Some(&through), options)?;
                    Ok((proxy, store))
                }
            };
            let name = endpoint.unwrap_or_else(|| "Amazon S3".into());
            all.push(Endpoint { name, store, prefix: prefix.clone(), lossy });
        }
        Ok(all)
    }

    /// Builds a client without retries, which would hide replies, and with one request at a time per connection.
    fn build(
        bucket: &str,
        endpoint: Option<&str>,
        options: &Options,
    ) -> Result<Arc<dyn ObjectStore>, String> {
        let client = ClientOptions::new()
            .with_http1_only()
            .with_allow_http(true)
            .with_timeout(options.request_timeout);
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_client_options(client);
        if let Some(endpoint) = endpoint {
            if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
                return Err(format!("endpoint {endpoint:?} is not an http:// or https:// URL"));
            }
            builder = builder.with_endpoint(endpoint);
        }
        Ok(Arc::new(builder.build().map_err(|error| error.to_string())?))
    }
}
