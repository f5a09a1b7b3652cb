//! Tests that the resident set grows by no more than the limit plus 4 MiB.
//!
//! A test program with a single test, as the memory of other tests would be counted. `MILLPOND_OBJECTS`: number of
//! objects, default 8000. The test prints its measurements.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

const LIMIT_BYTES: u64 = 32 << 20;
const SLACK_BYTES: u64 = 4 << 20;
const OBJECT_BYTES: usize = 6000;

/// A store that has every object, computes its bytes from its name, and stores nothing.
#[derive(Debug)]
struct Endless;

fn content(path: &Path) -> Vec<u8> {
    let seed = path.as_ref().bytes().fold(7u32, |sum, byte| sum.wrapping_mul(31) + u32::from(byte));
    (0..OBJECT_BYTES as u32).map(|at| (at.wrapping_mul(seed | 1) >> 13) as u8).collect()
}

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("endless")
    }
}

fn unsupported<T>() -> Result<T> {
    Err(Error::NotImplemented { operation: "all but reads".into(), implementer: "endless".into() })
}

#[async_trait]
impl ObjectStore for Endless {
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let (all, size) = (Bytes::from(content(at)), OBJECT_BYTES as u64);
        let range = options.range.map_or(0..size, |range| range.as_range(size).unwrap());
        let part = all.slice(range.start as usize..range.end as usize);
        let part = futures_util::stream::once(std::future::ready(Ok(part)));
        let meta = ObjectMeta {
            location: at.clone(),
            last_modified: Default::default(),
            size,
            e_tag: Some(format!("\"{:032x}\"", part_of(at))),
            version: None,
        };
        let payload = GetResultPayload::Stream(part.boxed());
        let (attributes, extensions) = Default::default();
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        unsupported()
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unsupported()
    }

    fn delete_stream(
        &self,
        at: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        at.then(|_| async { unsupported() }).boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        futures_util::stream::empty().boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        unsupported()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unsupported()
    }
}

fn part_of(path: &Path) -> usize {
    path.as_ref().len() * 7919
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

async fn read(store: &CachedStore, number: u64) {
    let path = Path::from(format!("warehouse/table/date=2026-11-23/part-{number:08}.parquet"));
    let range = number % 1000..number % 1000 + 4000;
    let got = store.get_range(&path, range.clone()).await.unwrap();
    assert_eq!(got, content(&path)[range.start as usize..range.end as usize]);
}

fn store(memory_bytes: u64, dir: &std::path::Path) -> CachedStore {
    let builder = CachedStore::builder(Arc::new(Endless)).page_bytes(4096);
    let builder = builder.memory_bytes(memory_bytes).freshness(Freshness::Immutable);
    builder.disk(dir.join(memory_bytes.to_string()), memory_bytes * 2).build().unwrap()
}

#[tokio::test]
async fn many_objects_keep_to_the_limit() {
    let objects = std::env::var("MILLPOND_OBJECTS").map_or(8000, |count| count.parse().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let small = store(2 << 20, dir.path());
    for number in 0..2000 {
        read(&small, number).await;
    }
    drop(small);
    let (base, mut peak) = (resident_bytes(), 0);
    let store = store(LIMIT_BYTES, dir.path());
    for number in 0..objects {
        read(&store, number).await;
        if number % 1000 == 0 || number + 1 == objects {
            // An object read long ago, and a recent one.
            read(&store, number / 2).await;
            peak = peak.max(resident_bytes());
        }
    }
    let grown = peak.saturating_sub(base);
    println!(
        "{objects} objects: {grown} bytes, {:+} of the limit",
        grown as i64 - LIMIT_BYTES as i64
    );
    println!("{}", store.stats());
    assert!(store.stats().memory_bytes <= LIMIT_BYTES);
    assert!(grown <= LIMIT_BYTES + SLACK_BYTES, "{grown} bytes resident");
    assert!(grown > LIMIT_BYTES / 2, "{grown} bytes: the cache is not full");
}
