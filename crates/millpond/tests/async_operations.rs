//! The asynchronous API has a form of every blocking method, and it has the same effect.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millpond::{Advice, AsyncFile, BackendChoice, Buffer, Error, OpenOptions};

use common::{Random, back_ends, block_on, cache_for, engine, read_write, temp_dir, within};

const PAGE: usize = 4096;

/// Methods of `File` without a form in `AsyncFile`, and the reason.
const WITHOUT_ASYNC_FORM: &[(&str, &str)] = &[
    ("aside", "hidden: the workers themselves"),
    ("at_end", "hidden: no operation"),
    ("begin_through", "hidden: for the owner of the description"),
    ("begin_unguarded", "never blocks"),
    ("close", "by value; the file may have other clones"),
    ("close_shared", "the same"),
    ("end_through", "never blocks"),
    ("end_unguarded", "never blocks"),
    ("is_direct", "never blocks"),
    ("is_empty", "never blocks"),
    ("len", "never blocks"),
    ("raw", "the memory must be valid until a future ends that may be forgotten"),
    ("settle", "for the owner of the description"),
    ("shared_file", "hidden: no operation"),
    ("start_now", "hidden: no operation"),
    ("start_read_raw", "hidden: it is asynchronous"),
    ("start_together", "hidden: no operation"),
    ("suspend_direct", "for the owner of the description, and waits for no more than transfers"),
    ("suspend_writeback", "for the owner of the description"),
    ("try_read_at", "never blocks"),
    ("try_read_hit_counted", "never blocks"),
    ("untorn_bytes_max", "never blocks"),
];

/// Methods of `AsyncFile` that `File` has not.
const ASYNC_ONLY: [&str; 3] = ["file", "read_buffers_at", "write_buffers_at"];

/// The names of the public methods of a type, in all sources below `dir`, which are as rustfmt leaves
/// them: an `impl` block begins and ends at the start of a line.
fn methods(dir: &Path, of: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names.extend(methods(&path, of));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(path).unwrap();
            let mut is_inside = false;
            for line in source.lines() {
                match line.trim_start().strip_prefix("pub ") {
                    _ if line == format!("impl {of} {{") => is_inside = true,
                    _ if line == "}" => is_inside = false,
                    Some(item) if is_inside => names.extend(function_name(item)),
                    _ => {}
                }
            }
        }
    }
    names
}

/// Of `unsafe fn name<T>(..`, after `pub`.
fn function_name(item: &str) -> Option<String> {
    let (before, name) = item.split_once("fn ")?;
    let is_function =
        before.split_whitespace().all(|word| ["const", "async", "unsafe"].contains(&word));
    let end = name.find(['(', '<'])?;
    is_function.then(|| name[..end].to_string())
}

/// Goal: `AsyncFile` has each operation of `File`, or a reason is given, and a test below calls
/// each.
#[test]
fn every_method_has_an_asynchronous_form_or_a_reason() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (blocking, asynchronous) = (methods(&sources, "File"), methods(&sources, "AsyncFile"));
    for known in ["read_at", "write_at", "truncate", "sync_all", "persist", "start_read_raw"] {
        assert!(blocking.contains(known), "{known} was not found: {blocking:?}");
    }
    let set = |names: &[&str]| names.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    let blocking_only = set(&WITHOUT_ASYNC_FORM.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    let missing: Vec<_> =
        blocking.iter().filter(|name| !asynchronous.contains(*name)).cloned().collect();
    assert_eq!(
        missing,
        blocking_only.into_iter().collect::<Vec<_>>(),
        "without an asynchronous form"
    );
    let own: Vec<_> = asynchronous.difference(&blocking).cloned().collect();
    assert_eq!(own, ASYNC_ONLY, "without a blocking form");
    let calls = include_str!("async_operations.rs");
    for name in &asynchronous {
        assert!(calls.contains(&format!("file.{name}(")), "{name} is not tried below");
    }
}

fn buffers(engine: &millpond::Engine, bytes: &[u8]) -> Vec<Buffer> {
    let mut buffers = engine.alloc_buffers(1, bytes.len()).unwrap();
    buffers[0].copy_from_slice(bytes);
    buffers
}

/// Goal: each asynchronous operation has the effect of its blocking form.
#[test]
fn every_operation_does_what_its_blocking_form_does() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(1 << 20, BackendChoice::Threads);
    let file = AsyncFile::from(engine.open(&path, &read_write()).unwrap());
    block_on(async {
        assert_eq!(file.write_at(b"pond", 0).await?, 4);
        file.write_all_at(&[7; 9000], 4).await?;
        assert_eq!(file.write_at_dsync(b"dry", 9004).await?, 3);
        assert_eq!(file.append(b"end").await?, 9007);
        file.sync_data().await?;
        file.sync_range(0, 10).await?;
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 9004).await?;
        assert_eq!(&bytes, b"dryend");
        let short = file.read_exact_at(&mut bytes, 9005).await.unwrap_err();
        assert!(matches!(short, Error::Io { source, .. }
            if source.kind() == std::io::ErrorKind::UnexpectedEof));
        assert_eq!(file.read_at(&mut bytes, 9008).await?, 2);
        assert_eq!(&bytes[..2], b"nd");

        let slices = [IoSlice::new(b"mill"), IoSlice::new(b""), IoSlice::new(b"pond")];
        assert_eq!(file.write_vectored_at(&slices, 4094).await?, 8);
        assert_eq!(file.append_vectored(&slices).await?, 9010);
        let (mut one, mut two) = ([0; 3], [0; 5]);
        let mut slices = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        assert_eq!(file.read_vectored_at(&mut slices, 9010).await?, 8);
        assert_eq!((&one, &two), (b"mil", b"lpond"));
        assert_eq!(&*file.view(4094, 100).await?, b"mi", "to the end of the page");

        let (written, buffer) = file.write_buffers_at(buffers(&engine, b"buffer"), 100).await;
        assert_eq!((written?, &*buffer[0]), (6, &b"buffer"[..]));
        let (read, buffer) = file.read_buffers_at(buffers(&engine, b"......"), 101).await;
        assert_eq!((read?, &buffer[0][..5]), (6, &b"uffer"[..]));

        for outcome in [file.punch_hole(0, 4096).await, file.zero_range(4096, 100).await] {
            if let Err(error) = outcome {
                assert_eq!(error.errno(), libc::EOPNOTSUPP);
            }
        }
        file.allocate(0, 20_000).await?;
        assert_eq!(file.file().len()?, 20_000);
        assert_eq!(file.seek_hole(20_000).await?, None);
        file.seek_data(0).await?;
        file.truncate(5).await?;
        file.write_back().await?;
        file.invalidate(0, 5).await?;
        file.advise(0, 0, Advice::DontNeed)?;
        file.sync_all().await?;
        assert_eq!(file.file().len()?, 5);
        let other = dir.path().join("other");
        file.persist(&path, &other).await?;
        assert_eq!(std::fs::read(&other).unwrap().len(), 5);
        let refused = file.persist_noclobber(&other, &other).await;
        assert!(refused.is_ok() || refused.unwrap_err().errno() == libc::EEXIST);
        file.persist_noclobber(&other, &path).await?;
        assert_eq!(std::fs::read(&path).unwrap().len(), 5);
        Ok::<(), Error>(())
    })
    .unwrap();
}

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Goal: a view of a cached page, or beyond the end, is ready at the first poll, without an
/// allocation. Advice allocates nothing.
#[test]
fn a_view_that_hits_is_ready_at_once_and_allocates_nothing() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![5; 3 * PAGE + 9]).unwrap();
    let engine = engine(1 << 20, BackendChoice::Threads);
    let file = AsyncFile::from(engine.open(&path, &read_write()).unwrap());
    file.file().read_exact_at(&mut vec![0; 3 * PAGE + 9], 0).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let before = ALLOCATIONS.get();
    for (offset, len) in [(0, PAGE), (100, PAGE - 100), (3 * PAGE, 9), (4 * PAGE, 0)] {
        let view = pin!(file.view(offset as u64, 2 * PAGE)).poll(&mut cx);
        let Poll::Ready(Ok(view)) = view else { panic!("{offset}: {view:?}") };
        assert_eq!(view.len(), len);
        assert!(view.iter().all(|&byte| byte == 5));
    }
    file.advise(0, 0, Advice::Random).unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
    assert_eq!(ALLOCATIONS.get(), before);
    let dropped = file.file().try_read_at(&mut [0], 0);
    assert!(matches!(dropped, Err(Error::WouldBlock { .. })), "{dropped:?}");
}

/// Goal: an operation that the handle does not permit fails before it has any effect.
#[test]
fn views_need_the_permissions_of_reads() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(1 << 20, BackendChoice::Threads);
    let options = OpenOptions::new().write(true).create(true);
    let writer = AsyncFile::from(engine.open(&path, &options).unwrap());
    assert_eq!(block_on(writer.view(0, 1)).unwrap_err().errno(), libc::EBADF);
    assert_eq!(block_on(writer.view(u64::MAX, 1)).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(writer.advise(u64::MAX, 1, Advice::Random).unwrap_err().errno(), libc::EINVAL);
    let slices = [IoSlice::new(b"pond")];
    let refused = block_on(writer.write_vectored_at(&slices, u64::MAX)).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
}

/// Goal: views that miss show the file's bytes and release their pins, also when some of them are
/// dropped while a worker makes them.
/// Method: a cache of few pages, half of which views may pin. Leaked pins would soon make the test
/// fail.
#[test]
fn views_that_miss_release_their_pins() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let mut random = random.fork();
        within(Duration::from_secs(60), name, move || {
            let dir = temp_dir();
            let path = dir.path().join("file");
            let pages = 64;
            let content: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let engine = engine(cache_for(8, PAGE as u64), backend);
            let file = AsyncFile::from(engine.open(&path, &read_write()).unwrap());
            file.advise(0, 0, Advice::Random).unwrap();
            let mut cx = Context::from_waker(Waker::noop());
            let (mut dropped, mut taken) = (0, 0);
            for _ in 0..400 {
                let page = random.below(pages as u64);
                let offset = page * PAGE as u64 + random.below(PAGE as u64);
                let mut view = Box::pin(file.view(offset, PAGE));
                if random.chance(300) {
                    dropped += u32::from(view.as_mut().poll(&mut cx).is_pending());
                    // The worker is about to take it, has taken it, or is done.
                    for _ in 0..random.below(2000) {
                        std::hint::spin_loop();
                    }
                    continue;
                }
                match block_on(view) {
                    Ok(view) => {
                        assert_eq!(view.len(), PAGE - offset as usize % PAGE);
                        assert!(view.iter().all(|&byte| byte == page as u8), "{name}: {page}");
                        taken += 1;
                    }
                    // Workers still hold pins of dropped views.
                    Err(Error::NoBuffers { .. }) => {}
                    Err(error) => panic!("{name}: {error}"),
                }
            }
            assert!(taken > 100 && (dropped > 0 || name == "memory"), "{taken}, {dropped}");
            // At the end views can pin half of the cache again.
            let is_free = || {
                let two: Vec<_> = (0..2).map(|page| file.file().view(page * 4096, 1)).collect();
                two.iter().all(Result::is_ok)
            };
            while !is_free() {
                std::thread::yield_now();
            }
        });
    }
}
