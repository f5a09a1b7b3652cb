//! Loom models of write-back on the real page word and pins: a flusher, writers, a truncation, and
//! eviction.
//!
//! The device is two numbers, the content of the page and the length of the file. A write to it
//! takes two steps, with the frame read in between, as the device reads memory while it works. The
//! `loom_without_*` mutation tests leave one rule out and must fail.

use loom::sync::atomic::Ordering::Relaxed;
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::pin::{Pins, Retiring};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::page::{PageState, PageWord, PublishFlags, WritebackEnd};
use crate::cache::table::step::{self, FileSize, Hiding};
use crate::units::FrameIndex;

const DIRTY: PublishFlags = PublishFlags { referenced: false, marker: false, dirty: true };

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// The frame is pinned before the claim.
    Pin,
    /// A thread that truncates the file waits for write-backs after hiding.
    AwaitEnds,
    /// The size is read after the claim (state.WB5).
    SizeAfterClaim,
    /// A thread that reads a page back from the device records this before the page is published
    /// (generations.G5).
    ReadBack,
    /// The page is made DIRTY again under the lock under which it is found suspect
    /// (generations.G5).
    RedirtyUnderLock,
}

struct Pond {
    without: Rule,
    word: PageWord,
    epoch: Epoch,
    pins: [Pins; 4],
    frames: [AtomicUsize; 4],
    size: FileSize,
    device: AtomicUsize,
    device_len: AtomicU64,
}

impl Pond {
    /// The page is DIRTY with frame 1, whose content is 1; the device has 0.
    fn new(without: Rule) -> Arc<Pond> {
        let pond = Pond {
            without,
            word: PageWord::new(),
            epoch: Epoch::new(),
            pins: Default::default(),
            frames: std::array::from_fn(|frame| AtomicUsize::new(frame)),
            size: FileSize::new(2),
            device: AtomicUsize::new(0),
            device_len: AtomicU64::new(0),
        };
        pond.hide();
        let _ = pond.word.publish(FrameIndex(1), DIRTY);
        Arc::new(pond)
    }

    fn hide(&self) {
        let mut hiding = Hiding::new(&self.epoch);
        hiding.hide(&self.word);
        hiding.finish();
    }

    /// One flush of the page, as in `flush`. Returns whether there was anything to write.
    fn flush(&self) -> bool {
        let early_size = self.size.get();
        let seen = self.word.load();
        if !seen.is_ready() || !seen.is_dirty() || seen.is_under_writeback() {
            return false;
        }
        let frame = seen.frame();
        let pins = &self.pins[frame.0 as usize];
        if self.without != Rule::Pin {
            pins.pin();
        }
        if self.word.try_writeback(seen).is_none() {
            if self.without != Rule::Pin && pins.unpin() {
                self.reuse(frame);
            }
            return false;
        }
        let late_size = self.size.get();
        let size = if self.without == Rule::SizeAfterClaim { early_size } else { late_size };
        let content = self.frames[frame.0 as usize].load(Relaxed);
        thread::yield_now();
        assert!(content < 90, "another page's bytes reach the device");
        self.device.store(content, Relaxed);
        self.device_len.fetch_max(size, Relaxed);
        let _ = self.word.end_writeback(WritebackEnd::Stable);
        if self.without != Rule::Pin && pins.unpin() {
            self.reuse(frame);
        }
        true
    }

    fn write(&self, fresh: u32) {
        step::begin_reuse();
        self.frames[fresh as usize].store(fresh as usize, Relaxed);
        if let Ok(change) = self.word.try_replace(FrameIndex(fresh), DIRTY, &self.epoch) {
            self.release(change.was.frame());
        } else {
            self.hide();
            let _ = self.word.publish(FrameIndex(fresh), DIRTY);
        }
    }

    fn release(&self, frame: FrameIndex) {
        if Retiring::begin().try_retire(&self.pins[frame.0 as usize]) {
            self.reuse(frame);
        }
    }

    /// The frame is free, and another thread takes it for another page.
    fn reuse(&self, frame: FrameIndex) {
        step::begin_reuse();
        self.frames[frame.0 as usize].store(99, Relaxed);
    }
}

fn spawn(pond: &Arc<Pond>, body: impl FnOnce(&Pond) + 'static) -> thread::JoinHandle<()> {
    let pond = Arc::clone(pond);
    thread::spawn(move || body(&pond))
}

/// Goal: the device gets whole contents, and finally the last one unless the page is still DIRTY.
/// Method: a flush, and a concurrent write that replaces the frame.
fn flush_races_a_write(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        let flusher = spawn(&pond, |pond| {
            pond.flush();
        });
        pond.write(2);
        flusher.join().unwrap();
        let clean = !pond.word.load().is_dirty();
        assert!(!clean || pond.device.load(Relaxed) == 2, "a write was forgotten");
        assert!(clean || pond.flush(), "the page cannot be written back any more");
        assert_eq!(pond.device.load(Relaxed), 2);
    });
}

#[test]
fn loom_flush_races_a_write() {
    flush_races_a_write(Rule::None);
}

#[test]
#[should_panic(expected = "another page's bytes reach the device")]
fn loom_without_the_pin_a_flush_writes_another_page() {
    flush_races_a_write(Rule::Pin);
}

/// Goal: of two contents of a page, the older one is never written last. Method: two flushers, and
/// a write between.
#[test]
fn loom_two_flushes_race_a_write() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let pond = Pond::new(Rule::None);
        let other = spawn(&pond, |pond| {
            pond.flush();
        });
        let writer = spawn(&pond, |pond| {
            pond.write(2);
            pond.flush();
        });
        other.join().unwrap();
        writer.join().unwrap();
        let clean = !pond.word.load().is_dirty();
        assert!(!clean || pond.device.load(Relaxed) == 2, "the older content landed last");
    });
}

/// Goal: after a truncation has returned, the device's file is not longer than the size. Method: a
/// flush, and a truncation that hides the page, waits, and then truncates the device's file.
/// `again`: the word returns to its old value, as versions have one bit.
fn flush_races_a_cut(without: Rule, again: bool) {
    loom::model(move || {
        let pond = Pond::new(without);
        let flusher = spawn(&pond, |pond| {
            pond.flush();
        });
        pond.hide();
        while pond.without != Rule::AwaitEnds && pond.word.load().is_under_writeback() {
            thread::yield_now();
        }
        pond.device_len.store(1, Relaxed);
        pond.size.set(1);
        let _ = pond.word.publish(FrameIndex(1), DIRTY);
        if again {
            pond.hide();
            let _ = pond.word.publish(FrameIndex(1), DIRTY);
        }
        pond.flush();
        flusher.join().unwrap();
        assert_eq!(pond.device_len.load(Relaxed), 1, "longer than its size");
    });
}

#[test]
fn loom_flush_races_a_cut() {
    flush_races_a_cut(Rule::None, false);
}

#[test]
fn loom_flush_races_a_cut_and_a_word_that_comes_back() {
    flush_races_a_cut(Rule::None, true);
}

#[test]
#[should_panic(expected = "longer than its size")]
fn loom_without_waiting_for_write_backs_the_file_is_too_long() {
    flush_races_a_cut(Rule::AwaitEnds, false);
}

#[test]
#[should_panic(expected = "longer than its size")]
fn loom_with_the_size_read_too_early_the_file_is_too_long() {
    flush_races_a_cut(Rule::SizeAfterClaim, false);
}

/// Goal: an evicted page can be read from the device. Method: a flush, a write, and an evictor that
/// takes any evictable page.
#[test]
fn loom_eviction_races_a_flush() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let pond = Pond::new(Rule::None);
        let flusher = spawn(&pond, |pond| {
            pond.flush();
        });
        let evictor = spawn(&pond, |pond| {
            let seen = pond.word.load();
            if seen.is_ready() && pond.word.try_evict(seen, &pond.epoch) {
                let content = pond.frames[seen.frame().0 as usize].load(Relaxed);
                assert_eq!(pond.device.load(Relaxed), content, "evicted before it was written");
                pond.release(seen.frame());
            }
        });
        pond.write(2);
        flusher.join().unwrap();
        evictor.join().unwrap();
        if pond.word.load().state() == PageState::Empty {
            assert_eq!(pond.device.load(Relaxed), 2);
        }
    });
}

/// Goal: a fill of an evicted page reads the bytes that were written back. Method: a flush, an
/// eviction, and a fill, by one thread each.
#[test]
fn loom_a_fill_reads_evicted_bytes() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        let evictor = spawn(&pond, |pond| {
            let seen = pond.word.load();
            if seen.is_ready() && pond.word.try_evict(seen, &pond.epoch) {
                pond.release(seen.frame());
            }
        });
        let filler = spawn(&pond, |pond| {
            if pond.word.try_fill(FrameIndex(2)).is_ok() {
                assert_eq!(pond.device.load(Relaxed), 1, "read before it was written");
                let _ = pond.word.abort_fill();
            }
        });
        // Without the yield of `flush`, so that the other threads find its end.
        assert!(pond.word.try_writeback(pond.word.load()).is_some());
        pond.device.store(1, Relaxed);
        let _ = pond.word.end_writeback(WritebackEnd::Stable);
        evictor.join().unwrap();
        filler.join().unwrap();
    });
}

/// Goal: after a failed sync, a page that is made DIRTY again has the bytes that the device
/// accepted, and not bytes that were read from the device since, when it may have lost them
/// (generations.G5). Method: a suspect page is made DIRTY, while another thread evicts it and reads
/// it back.
fn a_failed_sync_races_a_read(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        let _ = pond.word.try_writeback(pond.word.load());
        let _ = pond.word.end_writeback(WritebackEnd::Stable);
        let is_in_doubt = Arc::new(Mutex::new(true));
        let doubt = Arc::clone(&is_in_doubt);
        let reader = spawn(&pond, move |pond| {
            let seen = pond.word.load();
            if !seen.is_ready() || !pond.word.try_evict(seen, &pond.epoch) {
                return;
            }
            pond.word.try_fill(FrameIndex(2)).unwrap();
            if pond.without != Rule::ReadBack {
                *doubt.lock().unwrap() = false;
            }
            let _ = pond.word.finish_fill(FrameIndex(2), PublishFlags::default());
        });
        let mut doubt = Some(is_in_doubt.lock().unwrap());
        if std::mem::take(doubt.as_deref_mut().expect("just locked")) {
            if without == Rule::RedirtyUnderLock {
                doubt = None;
                thread::yield_now();
            }
            let change = pond.word.redirty();
            let frame = change.now.frame();
            assert!(!change.now.is_dirty() || frame == FrameIndex(1), "read after it was lost");
        }
        drop(doubt);
        reader.join().unwrap();
    });
}

#[test]
fn loom_a_failed_sync_races_a_read() {
    a_failed_sync_races_a_read(Rule::None);
}

#[test]
#[should_panic(expected = "read after it was lost")]
fn loom_without_recording_a_read_back_a_failed_sync_trusts_it() {
    a_failed_sync_races_a_read(Rule::ReadBack);
}

#[test]
#[should_panic(expected = "read after it was lost")]
fn loom_without_the_lock_a_failed_sync_trusts_a_read_back() {
    a_failed_sync_races_a_read(Rule::RedirtyUnderLock);
}
