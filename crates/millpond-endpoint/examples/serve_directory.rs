//! Serves a local directory, or an empty store in memory, over the S3 protocol, with a cache.
//!
//! ```sh
//! cargo run -p millpond-endpoint --example serve_directory -- /srv/data [ADDRESS [KEY_FILE [SOCKET]]]
//! ```
//!
//! `memory` instead of the directory serves a store in memory. The bucket is `data`. Ends on Ctrl-C.

use std::error::Error;
use std::sync::Arc;

use millpond_endpoint::Endpoint;
use millpond_objects::{CachedStore, Freshness};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let source = arguments
        .next()
        .ok_or("usage: serve_directory DIR|memory [ADDRESS [KEY_FILE [SOCKET]]]")?;
    let in_memory = source == "memory";
    let store: Arc<dyn ObjectStore> = if in_memory {
        Arc::new(InMemory::new())
    } else {
        // Without its objects a folder ends, as in S3.
        Arc::new(LocalFileSystem::new_with_prefix(&source)?.with_automatic_cleanup(true))
    };
    let cache =
        CachedStore::builder(store).memory_bytes(256 << 20).freshness(Freshness::Revalidate);
    let mut builder = Endpoint::builder().store("data", Arc::new(cache.build()?));
    if !in_memory {
        // Local files have no content type and no other metadata.
        builder = builder.drop_metadata();
    }
    builder = builder.listen(arguments.next().as_deref().unwrap_or("127.0.0.1:9000").parse()?);
    if let Some(path) = arguments.next() {
        builder = builder.key_file(path);
    }
    if let Some(path) = arguments.next() {
        builder = builder.unix(path);
    }
    let endpoint = builder.build()?;
    if let Some(address) = endpoint.address() {
        println!("http://{address}/data, with the key in {}", endpoint.key_path().display());
    }
    endpoint.serve(async { drop(tokio::signal::ctrl_c().await) }).await?;
    Ok(())
}
