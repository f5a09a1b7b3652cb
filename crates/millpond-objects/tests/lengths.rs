//! Tests of objects that are replaced while a part of them is cached: lengths of reads, and their conditions.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use common::{Far, content};
use millpond_objects::{Builder, CachedStore, Freshness};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};

const PAGE: u64 = 4096;

fn over(far: &Far, freshness: Freshness) -> Builder {
    let builder = CachedStore::builder(Arc::new(far.clone())).page_bytes(PAGE as u32);
    builder.memory_bytes(32 << 20).freshness(freshness).readahead_bytes_max(0)
}

/// Bytes, range, size and ETag that a store returns, or its error.
async fn answer(
    store: &dyn ObjectStore,
    path: &Path,
    options: GetOptions,
) -> Result<(Bytes, std::ops::Range<u64>, u64, Option<String>), String> {
    let kind = |error: object_store::Error| {
        let text = format!("{error:?}");
        text.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
    };
    let answer = store.get_opts(path, options).await.map_err(kind)?;
    let (range, meta) = (answer.range.clone(), answer.meta.clone());
    let bytes = answer.bytes().await.map_err(kind)?;
    Ok((bytes, range, meta.size, meta.e_tag))
}

/// Ranges whose bounds depend on the object's length.
fn open_ranges() -> Vec<Option<GetRange>> {
    let suffixes = [1, 4, 5000, 100_000].map(|len| Some(GetRange::Suffix(len)));
    let offsets = [0, 1, 5, 5000, 150_000].map(|at| Some(GetRange::Offset(at)));
    [None].into_iter().chain(suffixes).chain(offsets).collect()
}

/// Incident: a get of the whole object, of a suffix or from an offset was resolved by the length of the cached version,
/// and the same range of the next version was returned. Example: after "9" became "10", the read returned "1".
#[tokio::test]
async fn open_ranges_follow_the_length_of_the_version_that_is_served() {
    // Expired at once.
    let aged = Freshness::MaxAge(Duration::ZERO);
    let lens = [1, 2, 10, 20, 4096, 30, 200_000, 100_000, 5 << 20, 7, 0, 9000];
    let versions: Vec<Bytes> = (0..).zip(lens).map(|(at, len)| content(at, len).into()).collect();
    for freshness in [Freshness::Revalidate, aged] {
        for ignores_conditions in [false, true] {
            let far = Far::default();
            far.faults.ignores_conditions.store(ignores_conditions, Relaxed);
            for range in open_ranges() {
                let store = over(&far, freshness).build().unwrap();
                let path = Path::from("log");
                for version in &versions {
                    far.store.put(&path, version.clone().into()).await.unwrap();
                    // First with missing pages, then fully cached.
                    for _ in 0..2 {
                        let options = GetOptions::new().with_range(range.clone());
                        let expected = answer(&*far.store, &path, options.clone()).await;
                        let got = answer(&store, &path, options).await;
                        assert!(got == expected, "{range:?} of {}: {freshness:?}", version.len());
                    }
                }
            }
        }
    }
}

/// Incident: with a fresh entry and missing pages, a get of all 200,000 bytes returned 100,000.
#[tokio::test]
async fn a_fresh_entry_with_missing_pages_follows_the_new_length() {
    for (old, new) in [(100_000, 200_000), (200_000, 100_000), (100_000, 5 << 20), (100_000, 9)] {
        let [before, after]: [Bytes; 2] = [content(1, old).into(), content(2, new).into()];
        for ignores_conditions in [false, true] {
            for range in open_ranges() {
                let far = Far::default();
                far.faults.ignores_conditions.store(ignores_conditions, Relaxed);
                let age = Freshness::MaxAge(Duration::from_secs(1000));
                let store = over(&far, age).build().unwrap();
                let path = Path::from("grown");
                far.store.put(&path, before.clone().into()).await.unwrap();
                store.get_range(&path, 50_000..50_010).await.unwrap();
                far.store.put(&path, after.clone().into()).await.unwrap();
                let options = GetOptions::new().with_range(range.clone());
                let expected = answer(&*far.store, &path, options.clone()).await;
                let got = answer(&store, &path, options).await;
                assert!(got == expected, "{range:?} after {old} bytes became {new}");
            }
        }
    }
}

/// Incident: a get with If-Match was checked on a fresh entry whose pages were missing. The object had been replaced, so
/// the bytes of the next version were returned. The other conditions failed in the same way.
#[tokio::test]
async fn conditions_hold_for_the_version_that_is_returned() {
    let short = Some(GetRange::Bounded(500_000..500_012));
    let long = Some(GetRange::Bounded(100_000..4_400_000));
    let [before, after]: [Bytes; 2] = [content(1, 4_500_000).into(), content(2, 4_500_000).into()];
    for range in [short, long, Some(GetRange::Suffix(10)), Some(GetRange::Offset(70_000)), None] {
        for ignores_conditions in [false, true] {
            for condition in 0..5 {
                let far = Far::default();
                let age = Freshness::MaxAge(Duration::from_secs(1000));
                let store = over(&far, age).build().unwrap();
                let path = Path::from("table.parquet");
                far.store.put(&path, before.clone().into()).await.unwrap();
                store.get_range(&path, 0..10).await.unwrap();
                let old = far.store.head(&path).await.unwrap();
                tokio::time::sleep(Duration::from_millis(2)).await;
                far.store.put(&path, after.clone().into()).await.unwrap();
                let new = far.store.head(&path).await.unwrap();
                far.faults.ignores_conditions.store(ignores_conditions, Relaxed);
                let mut options = GetOptions::new().with_range(range.clone());
                match condition {
                    0 => options.if_match = old.e_tag,
                    1 => options.if_match = Some("\"other\", *".into()),
                    2 => options.if_none_match = new.e_tag,
                    3 => options.if_unmodified_since = Some(old.last_modified),
                    _ => options.if_match = Some("*".into()),
                }
                // The first bytes are cached, so a read of the whole object may fail with `Precondition`.
                let is_torn = range.is_none() && condition != 1;
                match answer(&store, &path, options.clone()).await {
                    Err(error) if is_torn => assert_eq!(error, "Precondition"),
                    got => {
                        let expected = answer(&*far.store, &path, options.clone()).await;
                        assert!(got == expected, "{range:?} {options:?}: {got:.200?}");
                    }
                }
            }
        }
    }
}
