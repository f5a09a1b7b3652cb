//! Loom models of flushes and syncs.
//!
//! The sets of DIRTY pages, the generations and the page word are the production types. The device
//! is a few numbers. The `loom_without_*` mutation tests leave one rule out and must fail.

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::cache::table::epoch::Epoch as PageEpoch;
use crate::cache::table::page::{Change, PageWord, PublishFlags, WritebackEnd};
use crate::cache::table::step::Hiding;
use crate::units::{FrameIndex, PageIndex};
use crate::writeback::state::WritebackFailure;
use crate::writeback::state::dirty::{Dirty, FlushNumber};
use crate::writeback::state::generations::{Copy, DurableOp, Generations, LockedGenerations};

const DIRTY: PublishFlags = PublishFlags { referenced: false, marker: false, dirty: true };
const PAGE: PageIndex = PageIndex::FIRST;
const EVERYWHERE: std::ops::RangeInclusive<PageIndex> = PageIndex::FIRST..=PageIndex::LAST;

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// A sync waits for a page of its range that a later flush has claimed (dirty.DS3).
    LaterFlush,
    /// A sync waits for flushes that began before it (dirty.DS3).
    EarlierFlush,
    /// A sync writes the pages that these flushes put back (dirty.DS3).
    PutBack,
    /// The epoch is read before the backend is given bytes (generations.G1).
    EpochFirst,
    /// An operation that returns an error raises the epoch (generations.G2).
    FailureEpoch,
    /// An operation without an error waits for those that were in flight (generations.G3).
    InFlight,
    /// A durable operation is registered before it begins (generations.G3).
    BeginFirst,
    /// A sync moves the written pages to the syncing ones before it calls the backend
    /// (generations.G4).
    CoverFirst,
    /// A sync fails if there are suspect pages that were not written again (generations.G6).
    Suspects,
}

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// A file of one page, as flushes and syncs see it. The device holds its content.
struct Book {
    without: Rule,
    word: PageWord,
    epoch: PageEpoch,
    content: AtomicUsize,
    device: AtomicUsize,
    dirty: Mutex<Dirty>,
    flush_ended: Condvar,
}

impl Book {
    /// The page is DIRTY with content 1; the device has 0.
    fn new(without: Rule) -> Arc<Book> {
        let book = Book {
            without,
            word: PageWord::new(),
            epoch: PageEpoch::new(),
            content: AtomicUsize::new(1),
            device: AtomicUsize::new(0),
            dirty: Mutex::default(),
            flush_ended: Condvar::new(),
        };
        book.hide();
        let _ = book.word.publish(FrameIndex(1), DIRTY);
        book.dirty.lock().unwrap().insert(std::iter::once(PAGE));
        Arc::new(book)
    }

    fn hide(&self) {
        let mut hiding = Hiding::new(&self.epoch);
        hiding.hide(&self.word);
        hiding.finish();
    }

    fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unwrap()
    }

    /// A writer that shows newer content.
    fn write(&self) {
        self.hide();
        self.content.store(2, Relaxed);
        let _ = self.word.publish(FrameIndex(2), DIRTY);
        self.dirty().insert(std::iter::once(PAGE));
    }

    /// Claims the page and writes it to the device. Returns whether the claim succeeded.
    fn write_page(&self) -> bool {
        let seen = self.word.load();
        if self.word.try_writeback(seen).is_none() {
            return false;
        }
        let content = self.content.load(Relaxed);
        thread::yield_now();
        self.device.store(content, Relaxed);
        let _ = self.word.end_writeback(WritebackEnd::Stable);
        true
    }

    fn end(&self, number: FlushNumber) -> MutexGuard<'_, Dirty> {
        let mut dirty = self.dirty();
        if dirty.end(number) {
            self.flush_ended.notify_all();
        }
        dirty
    }

    /// A flush of the flusher, which does not wait.
    fn flush(&self) {
        let (number, pages) = self.dirty().begin(EVERYWHERE);
        for page in pages {
            let seen = self.word.load();
            let is_busy = !seen.is_ready() || (seen.is_dirty() && seen.is_under_writeback());
            // A flush that loses the race for the claim has met a writer.
            if is_busy || (seen.is_dirty() && !self.write_page()) {
                self.dirty().put_back(number, &[page]);
            }
        }
        drop(self.end(number));
    }

    /// Writes the pages that were taken from the set.
    fn write_all(&self, pages: &[PageIndex]) {
        for _ in pages {
            loop {
                let seen = self.word.load();
                let is_in_flush = seen.is_under_writeback()
                    && (seen.is_dirty() || self.without != Rule::LaterFlush);
                if !seen.is_ready() || is_in_flush {
                    thread::yield_now();
                } else if !seen.is_dirty() || self.write_page() {
                    break;
                }
            }
        }
    }

    /// The first half of a sync. When it returns, the device has all bytes that were DIRTY at its
    /// begin.
    fn write_back(&self) {
        let Some((number, pages)) = self.dirty().begin_waiting(EVERYWHERE) else { return };
        self.write_all(&pages);
        let mut dirty = self.end(number);
        while self.without != Rule::EarlierFlush && dirty.is_earlier_active(number) {
            dirty = self.flush_ended.wait(dirty).unwrap();
        }
        let put_back = dirty.take_put_back(number);
        drop(dirty);
        if let Some((number, pages)) = put_back
            && self.without != Rule::PutBack
        {
            self.write_all(&pages);
            drop(self.end(number));
        }
    }
}

fn run(book: &Arc<Book>, body: fn(&Book)) -> thread::JoinHandle<()> {
    let book = Arc::clone(book);
    thread::spawn(move || body(&book))
}

/// Goal: a sync returns only after the device has the bytes that were DIRTY when it began, or newer
/// ones, from any flush (dirty.DS3). Method: a writer that hides the page and shows newer content,
/// a flush after it, and a sync. `apart`: the flush does not wait for the writer.
fn sync_races_a_flush(without: Rule, apart: bool) {
    model(move || {
        let book = Book::new(without);
        let others = if apart {
            vec![run(&book, Book::write), run(&book, Book::flush)]
        } else {
            vec![run(&book, |book| {
                book.write();
                book.flush();
            })]
        };
        book.write_back();
        assert_ne!(book.device.load(Relaxed), 0, "not at the device");
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn loom_sync_races_a_flush() {
    sync_races_a_flush(Rule::None, false);
}

#[test]
fn loom_sync_races_a_writer_and_a_flush() {
    sync_races_a_flush(Rule::None, true);
}

#[test]
#[should_panic(expected = "not at the device")]
fn loom_without_waiting_for_a_later_flush_a_sync_returns_early() {
    sync_races_a_flush(Rule::LaterFlush, false);
}

#[test]
#[should_panic(expected = "not at the device")]
fn loom_without_waiting_for_an_earlier_flush_a_sync_returns_early() {
    sync_races_a_flush(Rule::EarlierFlush, true);
}

#[test]
#[should_panic(expected = "not at the device")]
fn loom_without_put_back_pages_a_sync_misses_some() {
    sync_races_a_flush(Rule::PutBack, true);
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Bytes {
    None,
    Volatile,
    Durable,
    Lost,
}

/// A device that fails once, and reports the error to one caller only.
struct Device {
    fails: bool,
    pages: [Bytes; 3],
}

impl Device {
    fn sync(&mut self) -> Result<(), ()> {
        let fails = std::mem::take(&mut self.fails);
        let becomes = if fails { Bytes::Lost } else { Bytes::Durable };
        for page in self.pages.iter_mut().filter(|page| **page == Bytes::Volatile) {
            *page = becomes;
        }
        if fails { Err(()) } else { Ok(()) }
    }
}

struct UnsyncedFile {
    without: Rule,
    generations: Generations,
    device: Mutex<Device>,
}

impl UnsyncedFile {
    fn new(without: Rule) -> Arc<UnsyncedFile> {
        let device = Device { fails: true, pages: [Bytes::None; 3] };
        Arc::new(UnsyncedFile {
            without,
            generations: Generations::default(),
            device: Mutex::new(device),
        })
    }

    fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap()
    }

    fn give(&self, page: usize) {
        self.device().pages[page] = Bytes::Volatile;
    }

    fn conclude(&self, durable_op: DurableOp, outcome: Result<(), ()>) -> Result<(), ()> {
        if outcome.is_err() && self.without != Rule::FailureEpoch {
            self.generations.fail(durable_op, WritebackFailure::UNKNOWN);
            return Err(());
        }
        let ended = self.generations.end_durable(durable_op);
        let verdict = match self.without {
            Rule::InFlight => self.generations.verdict(ended).unwrap_or(Ok(())),
            _ => self.generations.wait(ended),
        };
        outcome.and(verdict.map_err(drop))
    }

    /// A write that is durable if it succeeds.
    fn write_durably(&self, page: usize) {
        let mut durable_op = Some(self.generations.begin_durable());
        if self.without == Rule::BeginFirst {
            let _ = self.generations.end_durable(durable_op.take().unwrap());
        }
        self.give(page);
        let outcome = self.device().sync();
        let durable_op = durable_op.unwrap_or_else(|| self.generations.begin_durable());
        if self.conclude(durable_op, outcome).is_ok() {
            assert_eq!(self.device().pages[page], Bytes::Durable, "lost without an error");
        }
    }

    /// A write that is not durable.
    fn write(&self, page: usize) {
        let early = self.generations.epoch();
        self.give(page);
        let late = self.generations.epoch();
        let epoch = if self.without == Rule::EpochFirst { late } else { early };
        self.generations.lock().record_written([PageIndex(page as u64)], Copy::Cached, epoch);
    }

    /// A sync, which writes suspect pages again.
    fn sync(&self) -> Result<(), ()> {
        if let Some((pages, _)) = self.generations.suspects(PageIndex::FIRST, PageIndex::LAST) {
            for page in pages {
                if self.generations.lock().take_suspect(page) {
                    self.write(page.0 as usize);
                }
            }
        }
        let (durable_op, outcome) = if self.without == Rule::CoverFirst {
            let durable_op = self.generations.begin_durable();
            let outcome = self.device().sync();
            match self.generations.begin_sync() {
                Ok(late) => {
                    let _ = self.generations.end_durable(late);
                }
                Err(_) => {
                    let _ = self.generations.end_durable(durable_op);
                    return Err(());
                }
            }
            (durable_op, outcome)
        } else {
            let durable_op = match self.generations.begin_sync() {
                Ok(durable_op) => durable_op,
                Err(_) if self.without == Rule::Suspects => self.generations.begin_durable(),
                Err(_) => return Err(()),
            };
            (durable_op, self.device().sync())
        };
        self.conclude(durable_op, outcome)?;
        let (covered, outcome) = self.generations.end_sync();
        let generations = self.generations.lock();
        let device = self.device();
        covered.for_each(&mut |page| {
            if generations.is_synced(page) {
                assert_eq!(
                    device.pages[page.0 as usize],
                    Bytes::Durable,
                    "covered, and not durable"
                );
            }
        });
        outcome.map_err(drop)
    }
}

/// Goal: a page that a write-back makes UNSTABLE is clean after the next sync, also beside a sync that ends between the
/// two steps of the write-back's end (generations.G9).
fn a_page_is_clean_after_the_next_sync(
    clear: fn(&mut LockedGenerations<'_>, &PageWord) -> Option<Change>,
) {
    fn sync(
        generations: &Generations,
        word: &PageWord,
        clear: fn(&mut LockedGenerations<'_>, &PageWord) -> Option<Change>,
    ) {
        let op = generations.begin_sync().unwrap();
        let _ = generations.wait(generations.end_durable(op));
        let (covered, _) = generations.end_sync();
        covered.for_each(&mut |page| {
            assert_eq!(page, PAGE);
            let _ = clear(&mut generations.lock(), word);
        });
    }
    model(move || {
        let shared = Arc::new((Generations::default(), PageWord::new()));
        let (generations, word) = &*shared;
        let epoch = PageEpoch::new();
        let mut hiding = Hiding::new(&epoch);
        hiding.hide(word);
        hiding.finish();
        let _ = word.publish(FrameIndex(1), DIRTY);
        let seen = word.load();
        assert!(word.try_writeback(seen).is_some());
        let flush = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (generations, word) = &*shared;
                let epoch = generations.epoch();
                generations.lock().record_written([PAGE], Copy::Kept, epoch);
                let _ = word.end_writeback(WritebackEnd::Unstable);
            }
        });
        sync(generations, word, clear);
        flush.join().unwrap();
        sync(generations, word, clear);
        assert!(!word.load().is_unstable(), "unstable for ever");
    });
}

#[test]
fn loom_a_page_is_clean_after_the_next_sync() {
    a_page_is_clean_after_the_next_sync(|generations, word| generations.clear_unstable(PAGE, word));
}

#[test]
#[should_panic(expected = "unstable for ever")]
fn loom_without_a_second_record_a_page_stays_unstable() {
    a_page_is_clean_after_the_next_sync(|generations, word| {
        let is_unstable = generations.is_synced(PAGE) && word.load().is_unstable();
        is_unstable.then(|| word.clear_unstable())
    });
}

fn spawn(file: &Arc<UnsyncedFile>, body: fn(&UnsyncedFile)) -> thread::JoinHandle<()> {
    let file = Arc::clone(file);
    thread::spawn(move || body(&file))
}

/// Goal: two durable writes counts an error that only one of them receives. A write whose bytes were
/// lost does not succeed.
fn durable_writes_share_an_error(without: Rule) {
    model(move || {
        let file = UnsyncedFile::new(without);
        let other = spawn(&file, |file| file.write_durably(0));
        file.write_durably(1);
        other.join().unwrap();
    });
}

#[test]
fn loom_durable_writes_share_an_error() {
    durable_writes_share_an_error(Rule::None);
}

#[test]
#[should_panic(expected = "lost without an error")]
fn loom_without_waiting_for_ops_in_flight_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::InFlight);
}

#[test]
#[should_panic(expected = "lost without an error")]
fn loom_without_registering_first_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::BeginFirst);
}

#[test]
#[should_panic(expected = "lost without an error")]
fn loom_without_an_epoch_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::FailureEpoch);
}

/// Goal: bytes written before a successful sync are durable afterwards, whichever call received an
/// error. Method: a write, concurrent with a durable write that receives the error; syncs after
/// them, or concurrent with them.
fn a_sync_covers_earlier_writes(without: Rule, apart: bool) {
    model(move || {
        let file = UnsyncedFile::new(without);
        let durable = spawn(&file, |file| file.write_durably(1));
        if apart {
            let syncing = spawn(&file, |file| {
                let _ = file.sync();
            });
            file.write(0);
            syncing.join().unwrap();
        } else {
            file.write(0);
        }
        for _ in 0..2 {
            if file.sync().is_ok() {
                assert_eq!(file.device().pages[0], Bytes::Durable, "claimed, and not durable");
                break;
            }
        }
        durable.join().unwrap();
    });
}

#[test]
fn loom_a_sync_covers_earlier_writes() {
    a_sync_covers_earlier_writes(Rule::None, false);
}

#[test]
fn loom_a_concurrent_sync_covers_its_writes() {
    a_sync_covers_earlier_writes(Rule::None, true);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_the_epoch_of_before_a_write_is_not_suspect() {
    a_sync_covers_earlier_writes(Rule::EpochFirst, false);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_waiting_a_sync_hides_a_loss() {
    a_sync_covers_earlier_writes(Rule::InFlight, false);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_a_check_for_suspects_a_sync_hides_a_loss() {
    a_sync_covers_earlier_writes(Rule::Suspects, false);
}

#[test]
#[should_panic(expected = "not durable")]
fn loom_without_covering_first_a_sync_covers_too_much() {
    a_sync_covers_earlier_writes(Rule::CoverFirst, true);
}

/// A cached page that the device has lost. It is suspect, and its word does not say so.
struct Suspect {
    generations: Generations,
    word: PageWord,
    device: AtomicUsize,
}

impl Suspect {
    fn new() -> Arc<Suspect> {
        let generations = Generations::default();
        generations.lock().record_written([PAGE], Copy::Kept, generations.epoch());
        generations.fail(generations.begin_durable(), WritebackFailure::UNKNOWN);
        let word = PageWord::new();
        word.try_fill(FrameIndex(1)).unwrap();
        let _ = word.finish_fill(FrameIndex(1), PublishFlags::default());
        Arc::new(Suspect { generations, word, device: AtomicUsize::new(0) })
    }

    /// A sync, whose first half makes the page DIRTY again and writes it.
    fn sync(&self) {
        let mut generations = self.generations.lock();
        assert!(generations.take_suspect(PAGE));
        let _ = self.word.redirty();
        drop(generations);
        assert!(self.word.try_writeback(self.word.load()).is_some());
        let epoch = self.generations.epoch();
        self.device.store(1, Relaxed);
        self.generations.lock().record_written([PAGE], Copy::Kept, epoch);
        let _ = self.word.end_writeback(WritebackEnd::Unstable);
        let durable_op = self.generations.begin_sync().unwrap();
        let ended = self.generations.end_durable(durable_op);
        self.generations.wait(ended).unwrap();
        self.generations.end_sync().1.unwrap();
    }
}

/// Goal: a reader that bypasses the cache and finds a page neither suspect nor dirty finds it
/// written again (generations.G6).
#[test]
fn loom_a_page_no_longer_suspect_is_at_the_device() {
    model(|| {
        let page = Suspect::new();
        let syncing = thread::spawn({
            let page = Arc::clone(&page);
            move || page.sync()
        });
        // As in `writeback::needs_writeback`.
        if !page.generations.has_suspects(PAGE, PAGE) {
            let seen = page.word.load();
            if !seen.is_dirty() && !seen.is_under_writeback() {
                assert_eq!(page.device.load(Relaxed), 1, "read as it was lost");
            }
        }
        syncing.join().unwrap();
    });
}
