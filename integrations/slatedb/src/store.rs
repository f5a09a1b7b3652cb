//! The objects of the database.

use std::path::Path;
use std::sync::Arc;

use millpond_serve::{SharedStore, store_name};
use object_store::ObjectStore;
use object_store::aws::AmazonS3Builder;
use slatedb::object_store_tag::ObjectStoreCallTag;

use crate::common::{Done, variable};

/// Where the database is in the store.
pub const DATABASE: &str = "database";

/// The store itself, or by the server at `socket`.
pub fn open(socket: Option<&Path>) -> Done<(Arc<dyn ObjectStore>, Option<SharedStore>)> {
    let bucket = variable("MILLPOND_STORE_BUCKET")?;
    let s3: Arc<dyn ObjectStore> =
        Arc::new(AmazonS3Builder::from_env().with_bucket_name(bucket).build()?);
    let Some(socket) = socket else { return Ok((s3, None)) };
    let name = store_name(&*s3, Some(&variable("AWS_ENDPOINT")?));
    let shared = SharedStore::new(s3, socket).named(name).cache_if(|location, options| {
        // The only objects that SlateDB overwrites.
        let is_boundary = location.extension() == Some("boundary");
        // SlateDB tags reads of its tables. One with a reason repeats a read whose bytes were damaged.
        let tag = ObjectStoreCallTag::from_extensions(&options.extensions);
        !is_boundary && tag.is_none_or(|tag| tag.retry.is_none())
    });
    Ok((Arc::new(shared.clone()), Some(shared)))
}
