//! The last close of a file whose background reads are in flight (inode.CF1).

use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use millpond_rangelock::{ByteRange, Mode};

use crate::inode::CachedFile;
use crate::read::ahead::fill_ahead;
use crate::read::background::{FrameBypass, ReadsInFlight};
use crate::read::plan::ReadExtent;
use crate::tests::slow::{Kind, Slow};
use crate::units::PageIndex;
use crate::writeback::state::writer_token::STALL_TIMEOUT;
use crate::{BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const PAGES: u64 = 8;

fn opened(options: &OpenOptions) -> (Engine, Arc<Slow>, Arc<CachedFile>) {
    let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
    let engine = engine.readahead_bytes_max(0).build().unwrap();
    let slow = Slow::new(vec![1; (PAGES * PAGE) as usize], Duration::ZERO);
    slow.reserve();
    let file = CachedFile::on(engine.shared(), slow.clone(), options).unwrap();
    (engine, slow, file)
}

/// Goal: the last close returns when no reference to the file and its backing file is left, also if
/// a background read was in flight.
/// Incident: the file was still open after its last close, until the thread of a read that had
/// ended dropped its reference.
#[test]
fn the_last_close_waits_for_background_reads() {
    for mode in [None, Some(WriteMode::Through), Some(WriteMode::Back)] {
        let options = OpenOptions::new().read(true).write(mode.is_some());
        let options = options.write_mode(mode.unwrap_or(WriteMode::Through));
        let (_engine, slow, cached) = opened(&options);
        let left = Arc::downgrade(&cached);
        let file = File::new(cached, None, &options);
        if mode.is_some() {
            file.write_all_at(&[2; PAGE as usize], 0).unwrap();
        }
        slow.hold(Kind::Read, true);
        fill_ahead(&file.cached, PageIndex(1), PAGES - 1, false);
        slow.wait_for(Kind::Read, 1);
        thread::scope(|threads| {
            let close = threads.spawn(|| {
                drop(file);
                (left.strong_count(), Arc::strong_count(&slow))
            });
            thread::sleep(STALL_TIMEOUT / 10);
            slow.hold(Kind::Read, false);
            assert_eq!(close.join().unwrap(), (0, 1), "{mode:?}: it is open");
        });
    }
}

/// Goal: the last close does not wait longer than [`STALL_TIMEOUT`] for a read of a device that hangs.
#[test]
fn the_last_close_leaves_a_read_that_hangs() {
    let options = OpenOptions::new().read(true);
    let (_engine, slow, cached) = opened(&options);
    let left = Arc::downgrade(&cached);
    let file = File::new(cached, None, &options);
    slow.hold(Kind::Read, true);
    fill_ahead(&file.cached, PageIndex(0), PAGES, false);
    drop(file);
    assert_eq!(left.strong_count(), 1, "the read has it");
    slow.hold(Kind::Read, false);
    while left.strong_count() > 0 || Arc::strong_count(&slow) > 1 {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Records the references to a file at the moment at which a guard of it is released.
struct Seen {
    file: Weak<CachedFile>,
    references: AtomicUsize,
}

const NOT_YET: usize = usize::MAX;

impl Wake for Seen {
    fn wake(self: Arc<Self>) {
        self.references.store(self.file.strong_count(), SeqCst);
    }
}

/// Goal: a background read drops its reference to the file before it releases its guard. Method: the
/// release grants a request of a task. It wakes the task in the thread of the read.
#[test]
fn a_background_read_drops_its_file_before_its_guard() {
    for bypasses in [false, true] {
        let (_engine, slow, file) = opened(&OpenOptions::new().read(true));
        slow.hold(Kind::Read, true);
        if bypasses {
            let guard = file.ranges.try_lock_owned(file.pages(0, PAGE), Mode::Shared).unwrap();
            let extent = ReadExtent { offset: 0, end: PAGE, size: PAGES * PAGE };
            let read =
                FrameBypass::start(&file, guard, extent, &Arc::new(ReadsInFlight::new()), None);
            assert!(read.is_ok());
        } else {
            fill_ahead(&file, PageIndex(0), PAGES, false);
        }
        slow.wait_for(Kind::Read, 1);
        let seen = Seen { file: Arc::downgrade(&file), references: AtomicUsize::new(NOT_YET) };
        let (seen, ranges) = (Arc::new(seen), Arc::clone(&file.ranges));
        let mut request = pin!(ranges.lock_async(ByteRange::ALL, Mode::Exclusive));
        let waker = Waker::from(Arc::clone(&seen));
        assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(file);
        assert_eq!(seen.file.strong_count(), 1, "the read has it");
        slow.hold(Kind::Read, false);
        while seen.references.load(SeqCst) == NOT_YET {
            thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(seen.references.load(SeqCst), 0, "bypasses: {bypasses}");
    }
}
