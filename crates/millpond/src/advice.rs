//! Hints that a program can give about its use of a file.

/// The expected use of a range of a file, after `posix_fadvise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// No particular pattern: read-ahead as detected (the default).
    Normal,
    /// Read in order: read-ahead starts at once, and with twice the window.
    Sequential,
    /// Read in no order: this handle starts no read-ahead.
    Random,
    /// Will be read soon: fill pages as far as that needs no waiting.
    WillNeed,
    /// Won't be read soon: drop cached pages that are not in use.
    DontNeed,
    /// Reads of this handle need not be of one moment: one that covers several pages may show some
    /// of them as they were before a write and some as after it, and ends at the end of the file as
    /// it finds it on the way. Each page is still whole, and no older than the call. In return such
    /// a read never waits for the writer or the holder of a page that it does not have to fetch.
    /// For programs with locks of their own. Concerns this handle's reads and nothing else.
    TornReads,
    /// Reads of this handle are atomic, over any number of pages (the default).
    AtomicReads,
}
