//! Models of the counters: readers beside writers whose bytes are two atomics of one page or of two.

use loom::sync::Arc;
use loom::sync::atomic::AtomicU8;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use super::*;

/// A file of two pages and its counters.
struct File {
    counters: [PageWrites; 4],
    is_written: AtomicBool,
    bytes: [AtomicU8; 2],
    waiting: AtomicU32,
    events: AtomicU32,
}

/// The counters of a read of `pages` pages alone: each counter more multiplies the interleavings.
fn span(pages: u64) -> Span {
    Span {
        pages: CounterRange { first: 0, count: pages },
        whole: CounterRange { first: 0, count: 0 },
        tail: None,
    }
}

/// The steps of the protocol; a twin replaces one of them.
#[derive(Clone, Copy)]
struct Protocol {
    begin: fn(CounterTable<'_>, &AtomicBool, &[Option<CounterRange>; 2]),
    end: fn(CounterTable<'_>, &[Option<CounterRange>; 2]),
    observe: fn(CounterTable<'_>, &Span) -> Option<u64>,
    is_unchanged: fn(CounterTable<'_>, &Span, u64) -> bool,
    is_unchanged_flag: fn(CounterTable<'_>, &AtomicBool) -> bool,
}

const RIGHT: Protocol = Protocol {
    begin: |counters, is_written, marks| counters.begin(is_written, marks),
    end: |counters, marks| counters.end(marks),
    observe: |counters, span| counters.observe(span),
    is_unchanged: |counters, span, seen| counters.is_unchanged(span, seen),
    is_unchanged_flag: |counters, is_written| counters.is_unchanged_flag(is_written),
};

impl File {
    fn new(is_written: bool) -> Arc<File> {
        Arc::new(File {
            counters: std::array::from_fn(|_| PageWrites {
                begun: AtomicU32::new(0),
                ended: AtomicU32::new(0),
            }),
            is_written: AtomicBool::new(is_written),
            bytes: [AtomicU8::new(0), AtomicU8::new(0)],
            waiting: AtomicU32::new(0),
            events: AtomicU32::new(0),
        })
    }

    fn table(&self) -> CounterTable<'_> {
        CounterTable { counters: &self.counters }
    }

    fn write(&self, protocol: &Protocol, value: u8) {
        let marks = [Some(CounterRange::range(0, 0, 2 * PAGE_BYTES)), None];
        (protocol.begin)(self.table(), &self.is_written, &marks);
        self.bytes.iter().for_each(|byte| byte.store(value, Relaxed));
        (protocol.end)(self.table(), &marks);
    }

    /// The bytes of a read that counts.
    fn read(&self, protocol: &Protocol) -> Option<[u8; 2]> {
        let span = span(2);
        // Acquire: as `Inode::is_written`.
        let seen = if self.is_written.load(Acquire) {
            Some((protocol.observe)(self.table(), &span)?)
        } else {
            None
        };
        let bytes = [self.bytes[0].load(Relaxed), self.bytes[1].load(Relaxed)];
        let counts = match seen {
            Some(seen) => (protocol.is_unchanged)(self.table(), &span, seen),
            None => (protocol.is_unchanged_flag)(self.table(), &self.is_written),
        };
        counts.then_some(bytes)
    }
}

/// One reader and one writer; the counters are in use before, or not.
fn read_beside_a_write(protocol: Protocol, is_written: bool) {
    loom::model(move || {
        let file = File::new(is_written);
        let writer = thread::spawn({
            let file = Arc::clone(&file);
            move || file.write(&protocol, 1)
        });
        if let Some([first, second]) = file.read(&protocol) {
            assert_eq!(first, second, "torn");
        }
        writer.join().unwrap();
        assert_eq!(file.read(&protocol), Some([1, 1]), "a read after the write sees it");
    });
}

/// One reader of a page and two writers, of which the second has ended when the first begins or is in progress.
/// The writers change a byte each, so that only the reader's order is tested.
fn read_beside_two_writes(protocol: Protocol) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let file = File::new(true);
        let writers = [0, 1].map(|byte| {
            let file = Arc::clone(&file);
            thread::spawn(move || {
                let marks = [Some(CounterRange::range(0, 0, PAGE_BYTES)), None];
                (protocol.begin)(file.table(), &file.is_written, &marks);
                file.bytes[byte].store(1, Relaxed);
                file.bytes[byte].store(2, Relaxed);
                (protocol.end)(file.table(), &marks);
            })
        });
        let span = span(1);
        if let Some(seen) = (protocol.observe)(file.table(), &span) {
            let bytes = [file.bytes[0].load(Relaxed), file.bytes[1].load(Relaxed)];
            if (protocol.is_unchanged)(file.table(), &span, seen) {
                assert!(!bytes.contains(&1), "torn");
                let written = bytes.iter().filter(|byte| **byte == 2).count();
                assert_eq!(written as u64, seen, "torn");
            }
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

/// A reader that has seen the end of a write, by another way, sees its bytes.
fn read_after_a_write(protocol: Protocol) {
    loom::model(move || {
        let file = File::new(true);
        let writer = thread::spawn({
            let file = Arc::clone(&file);
            move || file.write(&protocol, 1)
        });
        let span = span(1);
        // The reader has observed the write's begin and its end.
        if (protocol.observe)(file.table(), &span).is_some_and(|begun| begun > 0) {
            let bytes = [file.bytes[0].load(Relaxed), file.bytes[1].load(Relaxed)];
            assert_eq!(bytes, [1, 1], "stale");
        }
        writer.join().unwrap();
    });
}

/// versions.PV5: the reader that would sleep is woken.
fn no_wake_is_lost(order: fn()) {
    loom::model(move || {
        let file = File::new(true);
        let marks = [Some(CounterRange::range(0, 0, PAGE_BYTES)), None];
        file.table().begin(&file.is_written, &marks);
        let reader = thread::spawn({
            let file = Arc::clone(&file);
            move || {
                file.waiting.store(1, SeqCst);
                order();
                let event = file.events.load(SeqCst);
                let span = span(1);
                file.table().observe(&span).is_none().then_some(event)
            }
        });
        for counter in marks.iter().flatten().flat_map(|mark| file.table().each(mark)) {
            counter.ended.fetch_add(1, SeqCst);
        }
        order();
        if file.waiting.load(SeqCst) != 0 {
            file.events.fetch_add(1, SeqCst);
        }
        if let Some(event) = reader.join().unwrap() {
            assert_ne!(file.events.load(SeqCst), event, "the reader sleeps, and nothing wakes it");
        }
    });
}

/// versions.PV6: a reader that ends abandoned writes, beside a write that is not. `begin` and `leave`: how the writer's thread
/// notes that it writes, and that it does not.
fn no_write_is_ended_twice(begin: fn(&AtomicU32, &File), leave: fn(&AtomicU32, &File)) {
    loom::model(move || {
        let shared = Arc::new((File::new(true), AtomicU32::new(0)));
        // One write was abandoned before.
        shared.0.counters[0].begun.fetch_add(1, Relaxed);
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                begin(&shared.1, &shared.0);
                leave(&shared.1, &shared.0);
            }
        });
        // Acquire: as `is_any_writing` promises.
        shared.0.table().end_abandoned(&span(1), &|| shared.1.load(Acquire) != 0);
        writer.join().unwrap();
        let begun = shared.0.counters[0].begun.load(Relaxed);
        let ended = shared.0.counters[0].ended.load(Relaxed);
        assert_eq!(begun, 2);
        assert!(ended == 1 || ended == 2, "{ended} of 2 ended");
        shared.0.table().end_abandoned(&span(1), &|| false);
        assert_eq!(shared.0.table().observe(&span(1)), Some(2), "the page is quiet in the end");
    });
}

const PAGE_MARK: [Option<CounterRange>; 2] = [Some(CounterRange { first: 0, count: 1 }), None];

fn note_and_begin(writing: &AtomicU32, file: &File) {
    writing.store(1, Release);
    file.table().begin(&file.is_written, &PAGE_MARK);
}

fn end_and_note(writing: &AtomicU32, file: &File) {
    file.table().end(&PAGE_MARK);
    writing.store(0, Release);
}

#[test]
fn an_abandoned_write_is_ended_once() {
    no_write_is_ended_twice(note_and_begin, end_and_note);
}

#[test]
#[should_panic(expected = "of 2 ended")]
fn twin_that_notes_after_it_begins() {
    let begin = |writing: &AtomicU32, file: &File| {
        file.table().begin(&file.is_written, &PAGE_MARK);
        writing.store(1, Release);
    };
    no_write_is_ended_twice(begin, end_and_note);
}

#[test]
#[should_panic(expected = "of 2 ended")]
fn twin_that_notes_the_end_too_early() {
    let leave = |writing: &AtomicU32, file: &File| {
        writing.store(0, Release);
        file.table().end(&PAGE_MARK);
    };
    no_write_is_ended_twice(note_and_begin, leave);
}

#[test]
fn a_read_beside_a_write_is_whole() {
    read_beside_a_write(RIGHT, true);
}

#[test]
fn a_read_beside_the_first_write_is_whole() {
    read_beside_a_write(RIGHT, false);
}

#[test]
fn a_read_beside_two_writes_is_whole() {
    read_beside_two_writes(RIGHT);
}

#[test]
fn a_read_after_a_write_sees_it() {
    read_after_a_write(RIGHT);
}

#[test]
fn a_waiting_reader_is_woken() {
    no_wake_is_lost(order_for_loom);
}

#[test]
#[should_panic(expected = "nothing wakes it")]
fn twin_without_a_common_order() {
    no_wake_is_lost(|| ());
}

/// `begin` without its fence.
fn begin_unordered(
    counters: CounterTable<'_>,
    is_written: &AtomicBool,
    marks: &[Option<CounterRange>; 2],
) {
    is_written.store(true, Relaxed);
    for counter in marks.iter().flatten().flat_map(|mark| counters.each(mark)) {
        counter.begun.fetch_add(1, Relaxed);
    }
}

#[test]
#[should_panic(expected = "torn")]
fn twin_without_the_writers_fence() {
    read_beside_a_write(Protocol { begin: begin_unordered, ..RIGHT }, true);
}

#[test]
#[should_panic(expected = "torn")]
fn twin_without_the_writers_fence_at_first() {
    read_beside_a_write(Protocol { begin: begin_unordered, ..RIGHT }, false);
}

#[test]
#[should_panic(expected = "torn")]
fn twin_without_the_readers_fence() {
    let is_unchanged = |counters: CounterTable<'_>, span: &Span, seen: u64| {
        counters.sum(span, |counter| counter.begun.load(Relaxed)) == seen
    };
    read_beside_a_write(Protocol { is_unchanged, ..RIGHT }, true);
}

#[test]
#[should_panic(expected = "torn")]
fn twin_without_the_readers_fence_at_first() {
    let is_unchanged_flag =
        |_: CounterTable<'_>, is_written: &AtomicBool| !is_written.load(Relaxed);
    read_beside_a_write(Protocol { is_unchanged_flag, ..RIGHT }, false);
}

#[test]
#[should_panic(expected = "torn")]
fn twin_that_counts_the_end_first() {
    let begin =
        |counters: CounterTable<'_>, is_written: &AtomicBool, marks: &[Option<CounterRange>; 2]| {
            counters.begin(is_written, marks);
            counters.end(marks);
        };
    read_beside_a_write(Protocol { begin, end: |_, _| (), ..RIGHT }, true);
}

#[test]
#[should_panic(expected = "stale")]
fn twin_whose_end_is_not_ordered() {
    let end = |counters: CounterTable<'_>, marks: &[Option<CounterRange>; 2]| {
        for counter in marks.iter().flatten().flat_map(|mark| counters.each(mark)) {
            counter.ended.fetch_add(1, Relaxed);
        }
    };
    read_after_a_write(Protocol { end, ..RIGHT });
}

#[test]
#[should_panic(expected = "torn")]
fn twin_that_does_not_look_for_writes_in_flight() {
    let observe = |counters: CounterTable<'_>, span: &Span| {
        Some(counters.sum(span, |counter| counter.begun.load(Acquire)))
    };
    read_beside_a_write(Protocol { observe, ..RIGHT }, true);
}
