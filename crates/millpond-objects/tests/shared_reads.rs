//! Reads for clients in other processes, and the end of their places at writes.
#![cfg(feature = "shared")]

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use millpond::internals::shared::{ClientMemory, MemoryChoice, SharedClient};
use millpond_objects::serving::{
    ObjectPlace, PIECE_BYTES_MAX, SharedRead, SharedRequest, Validity,
};
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, ObjectStoreExt};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use common::{Far, bounded, content};

fn shared(far: &Far, freshness: Freshness) -> CachedStore {
    let builder = CachedStore::builder(Arc::new(far.clone())).memory_bytes(64 << 20);
    builder.freshness(freshness).shared(MemoryChoice::Small).build().unwrap()
}

fn asked(ranges: &[Option<GetRange>]) -> SharedRequest {
    SharedRequest { ranges: ranges.to_vec(), ..SharedRequest::default() }
}

/// Start and bytes of each part.
type Parts = Vec<(u64, Vec<u8>)>;

fn parts(read: SharedRead) -> (Option<ObjectPlace>, u64, Parts) {
    let SharedRead::Object { meta, place, parts, .. } = read else { panic!("bypassed") };
    (place, meta.size, parts.into_iter().map(|part| (part.start, part.bytes.to_vec())).collect())
}

/// Goal: a client reads the bytes that the server has cached, in its own mapping, until the object is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_reads_by_the_place_until_a_write() {
    let far = Far::default();
    let store = shared(&far, Freshness::Immutable);
    let (path, bytes) = (Path::from("pond"), content(1, 100_000));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    let memory = ClientMemory::create().unwrap();
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let attached = store.shared_cache().unwrap().attach(memory.descriptor(), own).unwrap();
    let cache = attached.descriptor().try_clone_to_owned().unwrap();
    let client = SharedClient::map(memory, &cache).unwrap();
    let validity = Validity::map(store.validity_for_client().unwrap().as_fd()).unwrap();

    let read = store.read_shared(&path, &asked(&[bounded(500..5000)])).await.unwrap();
    let (place, size, read) = parts(read);
    assert_eq!((size, read), (100_000, vec![(500, bytes[500..5000].to_vec())]));
    let place = place.unwrap();
    let mut copy = vec![0; 4500];
    let hit = |copy: &mut [u8], at: u64| {
        client.reader().unwrap().try_read(place.file, copy, place.base + at)
    };
    assert_eq!(hit(&mut copy, 500), Some(4500));
    assert_eq!(copy, bytes[500..5000]);
    let validated_ms = validity.validated_ms(place.slot, place.number);
    assert!(validated_ms.is_some_and(|at| at <= store.now_ms()));
    assert!(validity.validated_ms(place.slot, place.number + 1).is_none());

    let write = store.begin_write(&path);
    far.store.put(&path, content(2, 70_000).into()).await.unwrap();
    drop(write);
    assert_eq!(validity.validated_ms(place.slot, place.number), None);
    assert_eq!(hit(&mut copy, 500), None, "the pages are gone as well");
    let (newer, size, read) = parts(store.read_shared(&path, &asked(&[None])).await.unwrap());
    assert_ne!(newer.unwrap(), place);
    assert_eq!((size, read), (70_000, vec![(0, content(2, 70_000))]));
}

/// Goal: concurrent first reads and heads of an object send one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_readers_share_a_request() {
    for request in [asked(&[bounded(0..4096)]), asked(&[])] {
        let far = Far::default();
        let store = shared(&far, Freshness::Immutable);
        let path = Path::from("pond");
        far.store.put(&path, content(1, 10_000).into()).await.unwrap();
        far.faults.delay_ms.store(20, std::sync::atomic::Ordering::Relaxed);
        let reads = (0..40).map(|_| {
            let (store, path, request) = (store.clone(), path.clone(), request.clone());
            tokio::spawn(async move { store.read_shared(&path, &request).await })
        });
        for read in reads.collect::<Vec<_>>() {
            let (place, size, _) = parts(read.await.unwrap().unwrap());
            assert!(place.is_some() && size == 10_000);
        }
        assert_eq!(far.gets().len(), 1);
    }
}

/// Goal: ranges that depend on the length are right, and long ones begin with a piece.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_and_long_ranges_are_pieces() {
    let far = Far::default();
    let (path, empty) = (Path::from("pond"), Path::from("empty"));
    let bytes = content(3, 3 * PIECE_BYTES_MAX as usize + 77);
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    far.store.put(&empty, Vec::new().into()).await.unwrap();
    let size = bytes.len() as u64;
    let cases = [
        (None, 0..PIECE_BYTES_MAX),
        (Some(GetRange::Offset(size - 10)), size - 10..size),
        (Some(GetRange::Offset(5)), 5..5 + PIECE_BYTES_MAX),
        (Some(GetRange::Suffix(1000)), size - 1000..size),
        (bounded(7..size + 9), 7..7 + PIECE_BYTES_MAX),
    ];
    for (range, expected) in cases {
        for is_known in [false, true] {
            let store = shared(&far, Freshness::Immutable);
            if is_known {
                store.read_shared(&path, &asked(&[])).await.unwrap();
            }
            let read = store.read_shared(&path, &asked(std::slice::from_ref(&range))).await;
            let (_, _, read) = parts(read.unwrap());
            let [(start, got)] = &read[..] else { panic!("one part") };
            assert_eq!((*start, got.len() as u64), (expected.start, expected.end - expected.start));
            assert!(*got == bytes[expected.start as usize..expected.end as usize], "{range:?}");
        }
    }
    let store = shared(&far, Freshness::Immutable);
    for bypassed in [None, Some(GetRange::Suffix(5)), bounded(0..4)] {
        let read = store.read_shared(&empty, &asked(std::slice::from_ref(&bypassed))).await;
        let is_refused = matches!(read, Ok(SharedRead::Bypass) | Err(Error::Generic { .. }));
        assert!(is_refused, "{bypassed:?}: {read:?}");
    }
    let missing = store.read_shared(&Path::from("none"), &asked(&[None])).await;
    assert!(matches!(missing, Err(Error::NotFound { .. })));
}

/// Goal: a version that a call has validated is read again without another request, and only while it is current.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_version_needs_no_second_validation() {
    let far = Far::default();
    let store = shared(&far, Freshness::Revalidate);
    let path = Path::from("pond");
    far.store.put(&path, content(1, 40_000).into()).await.unwrap();
    let (place, ..) = parts(store.read_shared(&path, &asked(&[bounded(0..100)])).await.unwrap());
    let place = place.unwrap();
    let held = SharedRequest { held: Some((place.slot, place.number)), ..asked(&[bounded(5..50)]) };
    assert_eq!(far.gets().len(), 1);
    parts(store.read_shared(&path, &held).await.unwrap());
    assert_eq!(far.gets().len(), 0, "held");
    parts(store.read_shared(&path, &asked(&[bounded(5..50)])).await.unwrap());
    assert_eq!(far.gets().len(), 1, "not held");
    let conditions = GetOptions::new().with_if_match(Some("\"no such tag\""));
    let conditional = SharedRequest { conditions, ..held.clone() };
    let read = store.read_shared(&path, &conditional).await;
    assert!(matches!(read, Err(Error::Precondition { .. })), "{read:?}");
    store.forget(&path);
    let read = store.read_shared(&path, &conditional).await;
    assert!(matches!(read, Ok(SharedRead::Bypass)), "{read:?}");
    parts(store.read_shared(&path, &held).await.unwrap());
    assert_eq!(far.gets().len(), 1);
}

/// Goal: objects without a version are not cached unless they are immutable, and are read whole or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_without_version_have_no_place() {
    let far = Far::default();
    far.faults.without_tags.store(true, std::sync::atomic::Ordering::Relaxed);
    let store = shared(&far, Freshness::MaxAge(Duration::from_secs(9)));
    let path = Path::from("pond");
    far.store.put(&path, content(1, PIECE_BYTES_MAX as usize + 1).into()).await.unwrap();
    let (place, _, read) = parts(store.read_shared(&path, &asked(&[bounded(0..9)])).await.unwrap());
    assert!(place.is_none() && read[0].1.len() == 9);
    let read = store.read_shared(&path, &asked(&[None])).await.unwrap();
    assert!(matches!(read, SharedRead::Bypass));
}

#[tokio::test]
async fn the_limit_changes() {
    let far = Far::default();
    let store = shared(&far, Freshness::Immutable);
    assert_eq!(store.set_memory_bytes(32 << 20).unwrap(), 32 << 20);
    assert_eq!(store.set_memory_bytes(64 << 20).unwrap(), 64 << 20);
    assert!(store.set_memory_bytes(65 << 20).is_err() && store.set_memory_bytes(1 << 20).is_err());
    let private = CachedStore::builder(Arc::new(far)).build().unwrap();
    assert!(private.shared_cache().is_none() && private.validity_for_client().is_err());
}
