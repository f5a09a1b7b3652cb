//! Loom models of flushes and syncs: the sets of DIRTY pages, the generations and the page word are the
//! real ones; the device is a few numbers.
//!
//! The `loom_without_*` twins leave one rule out and must fail.

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::cache::epoch::Epoch as PageEpoch;
use crate::cache::page::{PageWord, Shown, WritebackEnd};
use crate::cache::step::Hiding;
use crate::units::{FrameIndex, PageIndex};
use crate::writeback::Failure;
use crate::writeback::dirty::{Dirty, FlushNumber};
use crate::writeback::generations::{Copy, DurableOp, Generations};

const DIRTY: Shown = Shown { referenced: false, marker: false, dirty: true };
const PAGE: PageIndex = PageIndex::FIRST;
const EVERYWHERE: std::ops::RangeInclusive<PageIndex> = PageIndex::FIRST..=PageIndex::LAST;

/// A rule that a twin leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// A sync waits for a page of its own that a later flush has in hand (dirty.DS3).
    LaterFlush,
    /// It waits for flushes that began before it (dirty.DS3).
    EarlierFlush,
    /// It writes what these put back (dirty.DS3).
    Owed,
    /// The epoch is asked for before the back end is given bytes (generations.G1).
    EpochFirst,
    /// An operation that is told of an error raises the epoch (generations.G2).
    Epoch,
    /// An operation that has ended well waits for those that were in the gate (generations.G3).
    Gate,
    /// A durable operation enters before it begins (generations.G3).
    EnterFirst,
    /// A sync has what is young be covering before it asks the back end (generations.G4).
    CoverFirst,
    /// It fails where there are suspects that were not written again (generations.G6).
    Suspects,
}

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// A file of one page, as flushes and syncs see it; the device has its content.
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
        let _ = book.word.show(FrameIndex(1), DIRTY);
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

    /// A writer that shows a newer content.
    fn write(&self) {
        self.hide();
        self.content.store(2, Relaxed);
        let _ = self.word.show(FrameIndex(2), DIRTY);
        self.dirty().insert(std::iter::once(PAGE));
    }

    /// Claims the page, and has the device take it; whether the claim was won.
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

    /// A flush of the flusher's, which waits for nothing.
    fn flush(&self) {
        let (number, pages) = self.dirty().begin(EVERYWHERE);
        for page in pages {
            let seen = self.word.load();
            let is_busy = !seen.is_ready() || (seen.is_dirty() && seen.is_under_writeback());
            // A flush that is beaten to the claim has met a writer.
            if is_busy || (seen.is_dirty() && !self.write_page()) {
                self.dirty().put_back(number, &[page]);
            }
        }
        drop(self.end(number));
    }

    /// Writes what was taken.
    fn write_all(&self, pages: &[PageIndex]) {
        for _ in pages {
            loop {
                let seen = self.word.load();
                let is_in_hand = seen.is_under_writeback()
                    && (seen.is_dirty() || self.without != Rule::LaterFlush);
                if !seen.is_ready() || is_in_hand {
                    thread::yield_now();
                } else if !seen.is_dirty() || self.write_page() {
                    break;
                }
            }
        }
    }

    /// The first half of a sync: when it returns, what was DIRTY when it began is at the device.
    fn write_back(&self) {
        let Some((number, pages)) = self.dirty().begin_waiting(EVERYWHERE) else { return };
        self.write_all(&pages);
        let mut dirty = self.end(number);
        while self.without != Rule::EarlierFlush && dirty.is_earlier_active(number) {
            dirty = self.flush_ended.wait(dirty).unwrap();
        }
        let owed = dirty.take_put_back(number);
        drop(dirty);
        if let Some((number, pages)) = owed
            && self.without != Rule::Owed
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

/// Goal: a sync does not return before the device has what was DIRTY when it began, or newer bytes,
/// from any flush (dirty.DS3).
/// Method: a writer that hides the page and shows a newer content, a flush after it, and a sync.
/// `apart`: the flush does not wait for the writer.
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
fn loom_without_what_it_is_owed_a_sync_misses_what_a_flush_put_back() {
    sync_races_a_flush(Rule::Owed, true);
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Bytes {
    None,
    Volatile,
    Durable,
    Lost,
}

/// A device that fails once, tells one of it, and then has nothing more to say.
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

struct Owing {
    without: Rule,
    generations: Generations,
    device: Mutex<Device>,
}

impl Owing {
    fn new(without: Rule) -> Arc<Owing> {
        let device = Device { fails: true, pages: [Bytes::None; 3] };
        Arc::new(Owing { without, generations: Generations::default(), device: Mutex::new(device) })
    }

    fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap()
    }

    fn give(&self, page: usize) {
        self.device().pages[page] = Bytes::Volatile;
    }

    fn conclude(&self, pass: DurableOp, outcome: Result<(), ()>) -> Result<(), ()> {
        if outcome.is_err() && self.without != Rule::Epoch {
            self.generations.fail(pass, Failure::UNKNOWN);
            return Err(());
        }
        let ended = self.generations.end_durable(pass);
        let verdict = match self.without {
            Rule::Gate => self.generations.verdict(ended).unwrap_or(Ok(())),
            _ => self.generations.wait(ended),
        };
        outcome.and(verdict.map_err(drop))
    }

    /// A write that is durable if it succeeds.
    fn write_durably(&self, page: usize) {
        let mut pass = Some(self.generations.begin_durable());
        if self.without == Rule::EnterFirst {
            let _ = self.generations.end_durable(pass.take().unwrap());
        }
        self.give(page);
        let outcome = self.device().sync();
        let pass = pass.unwrap_or_else(|| self.generations.begin_durable());
        if self.conclude(pass, outcome).is_ok() {
            assert_eq!(self.device().pages[page], Bytes::Durable, "lost, and nobody says so");
        }
    }

    /// One that is not.
    fn write(&self, page: usize) {
        let early = self.generations.epoch();
        self.give(page);
        let late = self.generations.epoch();
        let epoch = if self.without == Rule::EpochFirst { late } else { early };
        self.generations.lock().record_written([PageIndex(page as u64)], Copy::Cached, epoch);
    }

    /// A sync, which has what is suspect written again.
    fn sync(&self) -> Result<(), ()> {
        if let Some((pages, _)) = self.generations.suspects(PageIndex::FIRST, PageIndex::LAST) {
            for page in pages {
                if self.generations.lock().take_suspect(page) {
                    self.write(page.0 as usize);
                }
            }
        }
        let (pass, outcome) = if self.without == Rule::CoverFirst {
            let pass = self.generations.begin_durable();
            let outcome = self.device().sync();
            match self.generations.begin_sync() {
                Ok(late) => {
                    let _ = self.generations.end_durable(late);
                }
                Err(_) => {
                    let _ = self.generations.end_durable(pass);
                    return Err(());
                }
            }
            (pass, outcome)
        } else {
            let pass = match self.generations.begin_sync() {
                Ok(pass) => pass,
                Err(_) if self.without == Rule::Suspects => self.generations.begin_durable(),
                Err(_) => return Err(()),
            };
            (pass, self.device().sync())
        };
        self.conclude(pass, outcome)?;
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

fn beside(owing: &Arc<Owing>, body: fn(&Owing)) -> thread::JoinHandle<()> {
    let owing = Arc::clone(owing);
    thread::spawn(move || body(&owing))
}

/// Goal: of two durable writes that share an error of which one is told, none succeeds that was lost.
fn durable_writes_share_an_error(without: Rule) {
    model(move || {
        let owing = Owing::new(without);
        let other = beside(&owing, |owing| owing.write_durably(0));
        owing.write_durably(1);
        other.join().unwrap();
    });
}

#[test]
fn loom_durable_writes_share_an_error() {
    durable_writes_share_an_error(Rule::None);
}

#[test]
#[should_panic(expected = "lost, and nobody says so")]
fn loom_without_waiting_for_the_gate_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::Gate);
}

#[test]
#[should_panic(expected = "lost, and nobody says so")]
fn loom_without_entering_before_it_begins_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::EnterFirst);
}

#[test]
#[should_panic(expected = "lost, and nobody says so")]
fn loom_without_an_epoch_a_loss_is_hidden() {
    durable_writes_share_an_error(Rule::Epoch);
}

/// Goal: what was written before a sync that succeeds is durable then, whichever call was told of
/// an error.
/// Method: a write, and a durable one beside it that is told; then, or beside them, syncs.
fn a_sync_covers_what_was_written(without: Rule, apart: bool) {
    model(move || {
        let owing = Owing::new(without);
        let durable = beside(&owing, |owing| owing.write_durably(1));
        if apart {
            let syncing = beside(&owing, |owing| {
                let _ = owing.sync();
            });
            owing.write(0);
            syncing.join().unwrap();
        } else {
            owing.write(0);
        }
        for _ in 0..2 {
            if owing.sync().is_ok() {
                assert_eq!(owing.device().pages[0], Bytes::Durable, "claimed, and not durable");
                break;
            }
        }
        durable.join().unwrap();
    });
}

#[test]
fn loom_a_sync_covers_what_was_written() {
    a_sync_covers_what_was_written(Rule::None, false);
}

#[test]
fn loom_a_sync_beside_a_write_covers_what_it_says() {
    a_sync_covers_what_was_written(Rule::None, true);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_the_epoch_of_before_a_write_is_not_suspect() {
    a_sync_covers_what_was_written(Rule::EpochFirst, false);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_the_gate_a_sync_claims_what_is_lost() {
    a_sync_covers_what_was_written(Rule::Gate, false);
}

#[test]
#[should_panic(expected = "and not durable")]
fn loom_without_a_look_for_suspects_a_sync_claims_what_is_lost() {
    a_sync_covers_what_was_written(Rule::Suspects, false);
}

#[test]
#[should_panic(expected = "not durable")]
fn loom_without_covering_first_a_sync_covers_too_much() {
    a_sync_covers_what_was_written(Rule::CoverFirst, true);
}

/// A page that the cache has, and the device lost: it is suspect, and its word says nothing.
struct Suspect {
    generations: Generations,
    word: PageWord,
    device: AtomicUsize,
}

impl Suspect {
    fn new() -> Arc<Suspect> {
        let generations = Generations::default();
        generations.lock().record_written([PAGE], Copy::Kept, generations.epoch());
        generations.fail(generations.begin_durable(), Failure::UNKNOWN);
        let word = PageWord::new();
        word.try_fill(FrameIndex(1)).unwrap();
        let _ = word.finish_fill(FrameIndex(1), Shown::default());
        Arc::new(Suspect { generations, word, device: AtomicUsize::new(0) })
    }

    /// A sync, whose first half makes it DIRTY again, and writes it.
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
        let pass = self.generations.begin_sync().unwrap();
        let ended = self.generations.end_durable(pass);
        self.generations.wait(ended).unwrap();
        self.generations.end_sync().1.unwrap();
    }
}

/// Goal: who reads past the cache what was suspect, and finds nothing owed, finds it written again
/// (generations.G6).
#[test]
fn loom_what_is_suspect_no_more_is_at_the_device() {
    model(|| {
        let page = Suspect::new();
        let syncing = thread::spawn({
            let page = Arc::clone(&page);
            move || page.sync()
        });
        // As `flush::needs_writeback` does.
        if !page.generations.has_suspects(PAGE, PAGE) {
            let seen = page.word.load();
            if !seen.is_dirty() && !seen.is_under_writeback() {
                assert_eq!(page.device.load(Relaxed), 1, "read as it was lost");
            }
        }
        syncing.join().unwrap();
    });
}
