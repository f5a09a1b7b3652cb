//! Goal: conditional writes keep their promises through the endpoint, also when replies are lost.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Running;
use common::client::Connector;
use millpond_objects::{CachedStore, Freshness};
use millpond_store_check::{Endpoint, Options, Proxy, Verdict, check};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, RetryConfig};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_promises_are_kept() {
    let cache = CachedStore::builder(Arc::new(InMemory::new())).memory_bytes(1 << 20);
    let cache = cache.freshness(Freshness::Revalidate).build().unwrap();
    let running = Running::start_with(Arc::new(cache), |builder| builder);
    let options =
        Options { rounds: 10, request_timeout: Duration::from_secs(30), ..Options::default() };
    // Without retries, which would hide lost replies.
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let client = |connector: Connector| -> Arc<dyn ObjectStore> {
        let builder = running.builder().with_retry(retry.clone());
        Arc::new(builder.with_http_connector(connector).build().unwrap())
    };
    let mut endpoints = Vec::new();
    for (name, connector) in [
        ("port", Connector::tcp(running.address)),
        ("socket", Connector::unix(running.socket.clone())),
    ] {
        let proxy = Proxy::start(running.address.to_string()).await.unwrap();
        let through = Connector::tcp(format!("127.0.0.1:{}", proxy.port()).parse().unwrap());
        endpoints.push(Endpoint {
            name: name.into(),
            store: client(connector),
            prefix: Path::default(),
            lossy: Ok((proxy, client(through))),
        });
    }
    let report = check(&endpoints, &options).await.unwrap();
    assert!(report.promises.iter().all(|promise| promise.verdict == Verdict::Kept), "{report}");
}
